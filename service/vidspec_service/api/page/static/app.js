// Puts the parts of the page together and shows whether the server can be reached.

import * as ahead from "./ahead.js";
import { isReady, models } from "./api.js";
import * as clips from "./clips.js";
import { byId, el } from "./dom.js";
import * as history from "./history.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import * as talk from "./talk.js";

const IDEAS = ["Describe the video.", "How many objects are there?", "Which letters are shown?", "Is there a red object?"];
const RETRY_MS = 1500;
const WATCH_MS = 10_000;

byId("ideas").append(...IDEAS.map((idea) => el("button", { type: "button", class: "idea", onclick: () => {
  byId("prompt").value = idea;
  byId("prompt").focus();
} }, idea)));

ahead.start();
clips.start(() => document.body.classList.toggle("has-clips", clips.current().length > 0));
server.start();
settings.start();
talk.start();
history.start(talk.restore);
byId("new").addEventListener("click", () => {
  talk.clear();
  clips.clear();
  history.begin();
  byId("prompt").value = IDEAS[0];
});

let timer = null;

// Until the server is ready, and then every now and then: it may go away.
async function greet() {
  const { classList } = byId("model");
  const wasReady = classList.contains("ready");
  let wait = WATCH_MS;
  try {
    if (wasReady && document.hidden) return;
    if (!(await isReady())) throw new Error("loading the models");
    if (!wasReady) byId("state").textContent = (await models())[0].id;
    classList.add("ready");
  } catch (error) {
    classList.remove("ready");
    byId("state").textContent = error.status === 401 ? "needs an API key" : error.message;
    wait = error.status === 401 ? Infinity : RETRY_MS;
  } finally {
    clearTimeout(timer);
    if (wait < Infinity) timer = setTimeout(greet, wait);
  }
}

byId("key-dialog").addEventListener("close", ({ target }) => target.returnValue === "use" && greet());
greet();
