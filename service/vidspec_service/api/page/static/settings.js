// The settings as fields of a request; the server chooses what is left empty.

import { byId } from "./dom.js";

const EXAMPLE = {
  type: "object",
  properties: {
    colour: { enum: ["red", "green", "blue", "yellow", "pink", "orange", "purple", "cyan"] },
    moves: { type: "boolean" },
  },
  required: ["colour", "moves"],
  additionalProperties: false,
};

export function fields() {
  const form = byId("settings");
  const found = {};
  for (const input of form.querySelectorAll("select, input[type=number]")) {
    if (input.value === "") continue;
    found[input.name] = input.type === "number" ? Number(input.value) : input.value;
  }
  if (form.elements.logprobs.checked) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  // Sent even if the server decodes greedily: the same request and seed give the same text.
  found.seed ??= Math.floor(Math.random() * 2 ** 32);
  return { ...found, ...schemaField() };
}

// Whether all settings can be sent; if not, shows the wrong one and moves the focus to it.
export function areValid() {
  const form = byId("settings");
  if (!form.checkValidity()) form.querySelector("details").open = true;
  return form.reportValidity();
}

// The text box for a JSON schema, checked while the user types.
export function start() {
  const box = byId("schema");
  box.addEventListener("input", check);
  addEventListener("pageshow", check); // what the browser restored
  byId("schema-example").addEventListener("click", () => {
    box.value = JSON.stringify(EXAMPLE, null, 2);
    check();
  });
}

function check() {
  const box = byId("schema");
  const fault = box.value.trim() ? faultOf(box.value) : "";
  box.setCustomValidity(fault);
  box.setAttribute("aria-invalid", String(fault !== ""));
  const verdict = byId("schema-verdict");
  verdict.classList.toggle("bad", fault !== "");
  verdict.textContent = fault || (box.value.trim() ? "The answer will be JSON that follows this schema." : "No schema: any text.");
}

function faultOf(text) {
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    return `Not JSON: ${error.message}`;
  }
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) return "The schema must be a JSON object.";
  return "";
}

function schemaField() {
  const text = byId("schema").value.trim();
  if (!text) return {};
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } } };
}
