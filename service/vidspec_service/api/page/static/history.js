// Earlier conversations, kept in this browser: texts and figures, no clips.

import { byId, el } from "./dom.js";

const PLACE = "vidspec.history";
const MOST = 20;
let id = null;

function all() {
  try {
    return JSON.parse(localStorage.getItem(PLACE)) ?? [];
  } catch {
    return [];
  }
}

export function begin() {
  id = crypto.randomUUID?.() ?? String(Date.now());
}

export function keep(turns, clips) {
  const kept = {
    id,
    when: Date.now(),
    clips: clips.filter((clip) => clip.source?.video_id).map((clip) => ({ name: clip.name, source: clip.source })),
    turns: turns.filter((turn) => turn.answer?.finish).map(({ prompt, body, names, answer }) => ({
      prompt, body, names, answer: { ...answer, view: null, spans: [] },
    })),
  };
  if (!kept.turns.length) return;
  try {
    localStorage.setItem(PLACE, JSON.stringify([kept, ...all().filter((each) => each.id !== id)].slice(0, MOST)));
  } catch {
    localStorage.removeItem(PLACE); // storage is full: drop the history rather than fail
  }
}

export function start(restore) {
  begin();
  const dialog = byId("history-dialog");
  byId("history").addEventListener("click", () => {
    const kept = all();
    byId("history-list").replaceChildren(...kept.map((each) => el("li", {}, el("button", { type: "button", class: "quiet",
      onclick: () => {
        dialog.close();
        id = each.id;
        restore(each);
      } }, `${new Date(each.when).toLocaleString()}: ${each.turns[0].prompt.slice(0, 80)}`))));
    if (!kept.length) byId("history-list").append(el("li", {}, "Nothing yet."));
    dialog.showModal();
  });
  byId("history-clear").addEventListener("click", () => localStorage.removeItem(PLACE));
}
