// The conversation: questions, follow-ups, repeated questions. The clips stay the same.

import { AnswerCard } from "./answer.js";
import * as clips from "./clips.js";
import { byId, copyText, el } from "./dom.js";
import { curlOf, download, pythonOf } from "./export.js";
import * as history from "./history.js";
import { Race } from "./race.js";
import { read, unread } from "./reading.js";
import { areValid, fields } from "./settings.js";
import { showStrip } from "./strip.js";

const TOLD_MS = 2000;

let turns = [];
let running = null;

export function start() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("race").addEventListener("click", race);
}

export function clear() {
  running?.abort();
  turns = [];
  byId("turns").replaceChildren();
  byId("hint").hidden = false;
}

// The conversation so far and the new question in the API's format; leaves out turns that failed.
function messages(prompt, before) {
  const said = before.filter((turn) => turn.answer.finish && turn.answer.text.trim());
  return [
    ...said.flatMap((turn) => [
      { role: "user", content: turn.prompt }, { role: "assistant", content: turn.answer.text },
    ]),
    { role: "user", content: prompt },
  ];
}

async function question(signal, before = turns) {
  const prompt = byId("prompt").value.trim();
  if (!byId("ask").reportValidity() || !prompt || !areValid()) return null;
  const body = { messages: messages(prompt, before), ...fields() };
  const { shown, videos } = await clips.sources(signal);
  if (videos.length) body.videos = videos;
  return { prompt, body, names: shown.map((clip) => clip.name) };
}

// Runs `work` with the buttons that send questions disabled; passes it the signal that aborts it.
async function exclusively(work) {
  if (running) return;
  running = new AbortController();
  for (const id of ["send", "race"]) byId(id).disabled = true;
  byId("stop").hidden = false;
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name === "AbortError") return; // stopped before anything was asked
    byId("turns").append(el("li", {}, el("p", { class: "problem", role: "alert" }, error.message)));
  } finally {
    running = null;
    for (const id of ["send", "race"]) byId(id).disabled = false;
    byId("stop").hidden = true;
    const used = document.activeElement; // is off by now, or hidden
    if (used === document.body || used === byId("stop")) byId("prompt").focus({ preventScroll: true });
  }
}

function ask() {
  return exclusively(async (signal) => {
    const turn = await question(signal);
    if (!turn) return;
    turns.push(turn);
    if (byId("prompt").value.trim() === turn.prompt) byId("prompt").value = ""; // else it is the next question, typed meanwhile
    place(turn);
    await write(turn, signal);
    if (turn.answer.error && !turn.answer.text) byId("prompt").value ||= turn.prompt;
  });
}

function place(turn) {
  byId("hint").hidden = true;
  turn.item = el("li", { class: "turn" }, el("p", { class: "said" }, turn.prompt), el("div"));
  byId("turns").append(turn.item);
}

function cardOf(turn) {
  const action = (label, run) => el("button", { type: "button", class: "quiet", onclick: run }, label);
  const copy = (label, make) => action(label, async (event) => {
    await copyText(make(turn));
    event.target.textContent = "Copied";
    setTimeout(() => { event.target.textContent = label; }, TOLD_MS);
  });
  const card = new AnswerCard(
    action("Again, same seed", () => exclusively((stop) => again(turn, stop))),
    copy("Copy text", () => turn.answer.text),
    copy("Copy as curl", curlOf),
    copy("Copy as Python", pythonOf),
    action("Export JSON", () => download(turn)),
  );
  turn.item.lastElementChild.replaceWith(card.node);
  return card;
}

async function write(turn, signal) {
  const card = cardOf(turn);
  card.node.scrollIntoView({ block: "nearest" });
  turn.answer = unread();
  byId("told").textContent = "";
  await read(turn.body, turn.answer, () => {
    card.update(turn.answer);
    if (turn.answer.view !== turn.shownView) showFrames(turn);
  }, signal);
  card.finish(turn.answer);
  card.node.scrollIntoView({ block: "nearest" });
  showFrames(turn);
  byId("told").textContent = turn.answer.error ? "" : "The answer is complete.";
  history.keep(turns, clips.current());
  return card;
}

async function again(turn, signal) {
  const before = turn.answer;
  const card = await write(turn, signal);
  if (document.activeElement === document.body) card.actions.firstElementChild.focus({ preventScroll: true }); // the used one is gone
  if (before.finish && turn.answer.finish) {
    card.note.textContent = before.text === turn.answer.text ? "The same text again." : "A different text.";
  }
}

function showFrames(turn) {
  const { view, facts } = turn.answer;
  turn.shownView = view;
  turn.body.videos?.forEach((video, place) => {
    const clip = clips.current().find(({ source }) => source === video);
    const seen = view?.videos[place];
    const used = facts?.videos[place];
    const frames = seen ? seen.frames.map((frame) => ({ time: frame.timestamp_s, cells: frame.cells }))
      : used?.timestamps_s.map((time) => ({ time }));
    if (clip && frames) showStrip(clip, frames, seen);
    if (clip && used) clips.tell(clip, clip.facts, used.warnings);
  });
}

function race() {
  return exclusively(async (signal) => {
    const turn = await question(signal, []); // without history: both sides get the same request whatever was said before
    if (!turn) return;
    byId("hint").hidden = true;
    const track = new Race(turn, (again) => exclusively(again));
    byId("turns").append(el("li", { class: "turn" }, el("p", { class: "said" }, turn.prompt), track.node));
    track.node.scrollIntoView({ block: "nearest" });
    await track.run(signal);
  });
}

// Restores an earlier conversation from `history`.
export function restore(kept) {
  clear();
  clips.recall(kept.clips);
  for (const turn of kept.turns) {
    place(turn);
    cardOf(turn).finish(turn.answer);
  }
  turns = kept.turns;
}
