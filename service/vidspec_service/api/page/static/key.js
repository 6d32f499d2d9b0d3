// The API key: asked for once, when the server requires one; kept in this tab only.

import { byId } from "./dom.js";

const PLACE = "vidspec.key";
let asking = null;
let given = null; // where the browser lets pages keep nothing

function known() {
  try {
    return sessionStorage.getItem(PLACE);
  } catch {
    return given;
  }
}

function keep(key) {
  given = key;
  try {
    sessionStorage.setItem(PLACE, key);
  } catch { /* site data is blocked */ }
}

export function authorization() {
  const key = known();
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
  byId("key-reason").textContent = known()
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
      if (isGiven) keep(key);
      resolve(isGiven);
    }, { once: true });
  });
}
