// Earlier conversations, kept in this browser: texts, figures and images, no videos.

import { byId, el } from "./dom.js";

const PLACE = "vidspec.history";
const MOST = 20;
let id = null;

function all() {
  try {
    return (JSON.parse(localStorage.getItem(PLACE)) ?? []).filter((each) => each.sources); // others are of an older page
  } catch {
    return [];
  }
}

export function begin() {
  id = crypto.randomUUID?.() ?? String(Date.now());
}

export function keep(turns, clips) {
  const shown = clips.filter((clip) => clip.source);
  const sources = [...new Set([...shown.map((clip) => clip.source), ...turns.flatMap((turn) => turn.body.videos ?? [])])];
  const place = (source) => sources.indexOf(source); // once each: an image is long, and every question has it
  const kept = {
    id,
    when: Date.now(),
    sources,
    clips: shown.map(({ name, source }) => ({ name, source: place(source) })),
    turns: turns.filter((turn) => turn.answer?.finish).map(({ prompt, body, names, answer }) => ({
      prompt, body: { ...body, videos: body.videos?.map(place) }, names, answer: { ...answer, view: null, spans: [] },
    })),
  };
  if (!kept.turns.length) return;
  const latest = [kept, ...all().filter((each) => each.id !== id)].slice(0, MOST);
  for (; latest.length; latest.pop()) { // until it fits: storage is small, and images are long
    try {
      return localStorage.setItem(PLACE, JSON.stringify(latest));
    } catch { /* full */ }
  }
}

function unpacked({ sources, clips, turns }) {
  return {
    clips: clips.map(({ name, source }) => ({ name, source: sources[source] })),
    turns: turns.map((turn) => ({ ...turn, body: { ...turn.body, videos: turn.body.videos?.map((place) => sources[place]) } })),
  };
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
        restore(unpacked(each));
      } }, `${new Date(each.when).toLocaleString()}: ${each.turns[0].prompt.slice(0, 80)}`))));
    if (!kept.length) byId("history-list").append(el("li", {}, "Nothing yet."));
    dialog.showModal();
  });
  byId("history-clear").addEventListener("click", () => {
    try {
      localStorage.removeItem(PLACE);
    } catch { /* site data is blocked: there is nothing */ }
  });
}
