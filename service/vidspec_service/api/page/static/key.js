// The API key: asked for once, when the server requires one; kept in this tab only.

import { byId } from "./dom.js";

const PLACE = "vidspec.key";
let asking = null;

export function authorization() {
  const key = sessionStorage.getItem(PLACE);
  return key ? { authorization: `Bearer ${key}` } : {};
}

// Resolves to true if there is a (new) key to try.
export function askForKey() {
  asking ??= ask().finally(() => { asking = null; });
  return asking;
}

function ask() {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  byId("key-reason").textContent = sessionStorage.getItem(PLACE)
    ? "The server does not know that key."
    : "This server needs an API key. The key stays in this tab.";
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = field.value.trim();
      field.value = "";
      const isGiven = dialog.returnValue === "use" && key !== "";
      if (isGiven) sessionStorage.setItem(PLACE, key);
      resolve(isGiven);
    }, { once: true });
  });
}
