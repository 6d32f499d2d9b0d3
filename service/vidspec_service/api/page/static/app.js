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

async function greet() {
  try {
    if (!(await isReady())) throw new Error("loading the models");
    const [model] = await models();
    byId("state").textContent = model.id;
    byId("model").classList.add("ready");
  } catch (error) {
    byId("state").textContent = error.status === 401 ? "needs an API key" : error.status ? error.message : "not ready yet";
    if (error.status !== 401) setTimeout(greet, RETRY_MS);
  }
}

byId("key-dialog").addEventListener("close", ({ target }) => target.returnValue === "use" && greet());
greet();
