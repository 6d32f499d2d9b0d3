// The settings as fields of a request; what is left empty is the server's choice.

import { byId } from "./dom.js";
import { schemaField } from "./schema.js";

export function fields() {
  const form = byId("settings");
  const found = {};
  for (const input of form.querySelectorAll("select, input[type=number]")) {
    if (input.value === "") continue;
    found[input.name] = input.type === "number" ? Number(input.value) : input.value;
  }
  if (form.elements.logprobs.checked) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  // Told even where the server is greedy: the same request and seed give the same text.
  found.seed ??= Math.floor(Math.random() * 2 ** 32);
  return { ...found, ...schemaField() };
}

// Whether all can be sent; if not, what is wrong is shown and has the focus.
export function areValid() {
  const form = byId("settings");
  if (!form.checkValidity()) form.querySelector("details").open = true;
  return form.reportValidity();
}
