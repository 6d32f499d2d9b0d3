// The clips of the conversation: added in five ways, uploaded immediately, shown with a player.

import { sampleClip, upload } from "./api.js";
import { byId, el, show } from "./dom.js";
import { jpegOf } from "./frames.js";
import { record } from "./record.js";

const GIF = "image/gif"; // to the server a video, whose frames it chooses
const clips = [];
let onChange = () => {};
let arriving = Promise.resolve(); // a sample clip that is being loaded
let numCleared = 0;

export const current = () => clips;

// The clips and how a request refers to each; throws the error of a clip that failed, or that the user stopped waiting.
export function sources(signal) {
  const stopped = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  const all = async () => {
    await arriving;
    const shown = [...clips];
    return { shown, videos: await Promise.all(shown.map((clip) => clip.ready)) };
  };
  return Promise.race([stopped, all()]);
}

// Uploads the videos once more, for a server that has forgotten them; false if there is none. Whoever refers to a
// video has its new id at once, since all share its `source`.
export async function uploadAgain(signal) {
  const videos = clips.filter((clip) => clip.file && clip.source?.video_id);
  await Promise.all(videos.map(async ({ file, source }) => { source.video_id = (await upload(file, () => {}, signal)).id; }));
  return videos.length > 0;
}

export function start(changed) {
  onChange = changed;
  const drop = byId("drop");
  byId("pick").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", (event) => {
    addAll(event.target.files);
    event.target.value = "";
  });
  byId("sample").addEventListener("click", () => { arriving = addSample(); });
  byId("record").addEventListener("click", async () => {
    const file = await record();
    if (file) addAll([file]);
  });
  document.addEventListener("paste", (event) => addAll(event.clipboardData.files));
  const hasFiles = (event) => event.dataTransfer.types.includes("Files"); // text may be dragged into the question
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    drop.classList.add("over");
  });
  document.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    drop.classList.remove("over");
    addAll(event.dataTransfer.files);
  });
}

function addAll(files) {
  show(byId("clip-problem"), "");
  for (const file of files) add(file);
}

async function addSample() {
  const button = byId("sample");
  button.disabled = true;
  show(byId("clip-problem"), "");
  const before = numCleared;
  try {
    const seed = clips.some((clip) => clip.caption) ? Math.floor(Math.random() * 10000) : 8;
    const { blob, caption } = await sampleClip(seed);
    if (before === numCleared) add(new File([blob], `sample-${seed}.mp4`, { type: "video/mp4" }), caption);
  } catch (error) {
    if (before === numCleared) tellProblem(error.message);
  } finally {
    button.disabled = false;
  }
}

function add(file, caption) {
  const isImage = file.type.startsWith("image/") && file.type !== GIF;
  const clip = { name: file.name, file, caption, isImage, url: URL.createObjectURL(file) };
  enter(clip);
  clip.ready = prepare(clip);
  clip.ready.catch(() => {}); // `sources` throws the error, and the page shows it
}

function enter(clip) {
  clip.abort = new AbortController();
  clips.push(clip);
  byId("clip-list").append(card(clip));
  onChange();
}

// Resolves to what a request sends to refer to the clip.
async function prepare(clip) {
  try {
    if (clip.isImage) {
      clip.source = { video: `data:video/jpeg;base64,${await jpegOf(clip.url)}` };
      tell(clip, "An image.");
    } else {
      await clip.file.slice(0, 1).arrayBuffer()
        .catch(() => { throw new Error("It cannot be read: it is a folder, or it was changed or moved."); });
      const kept = await upload(clip.file, (share) => { clip.bar.value = share; }, clip.abort.signal);
      clip.source = { video_id: kept.id };
      Object.assign(clip, { width: kept.width, height: kept.height });
      tell(clip, `${kept.duration_s.toFixed(1)} s, ${kept.width} × ${kept.height}, ${kept.codec}.`, kept.warnings);
    }
    return clip.source;
  } catch (error) {
    if (error.name !== "AbortError") {
      tellProblem(`${clip.name}: ${error.message}`);
      remove(clip);
    }
    throw error;
  } finally {
    clip.bar.remove();
  }
}

// One line each: several files may fail together.
function tellProblem(text) {
  const problem = byId("clip-problem");
  show(problem, problem.textContent ? `${problem.textContent}\n${text}` : text);
}

// Shows what is known of the clip, and what the server did not do as one might expect.
export function tell(clip, facts, warnings = []) {
  clip.facts = facts;
  clip.note.textContent = [facts, ...warnings].join(" ");
}

function card(clip) {
  clip.bar = el("progress", { max: 1, value: 0, "aria-label": `Upload of ${clip.name}` });
  clip.note = el("span", { class: "note" }, "uploading");
  clip.player = clip.url ? player(clip) : null;
  clip.strip = el("div", { class: "strip", role: "group", "aria-label": `Frames of ${clip.name}`, hidden: true });
  clip.card = el("li", { class: "clip" },
    clip.player,
    el("div", { class: "title" }, el("span", { class: "name" }, clip.name),
      el("button", { type: "button", class: "quiet", "aria-label": `Remove ${clip.name}`, onclick: () => remove(clip) }, "Remove")),
    clip.note,
    clip.bar,
    clip.caption ? el("details", {}, el("summary", {}, "What the clip shows"), el("p", {}, clip.caption)) : null,
    clip.strip);
  return clip.card;
}

function player(clip) {
  const node = clip.isImage || clip.file.type === GIF
    ? el("img", { src: clip.url, alt: clip.name })
    : el("video", { src: clip.url, controls: true, loop: true, muted: true, playsInline: true, preload: "auto",
      "aria-label": clip.name });
  const refuse = () => node.replaceWith(el("p", { class: "unplayable" }, "This browser cannot show it; the server reads more formats."));
  node.addEventListener("error", refuse, { once: true });
  node.addEventListener("loadedmetadata", () => node.videoWidth || refuse()); // it would play the sound only
  return node;
}

function remove(clip) {
  clip.abort.abort();
  if (!clips.includes(clip)) return; // removed before it failed
  clips.splice(clips.indexOf(clip), 1);
  clip.card.remove();
  URL.revokeObjectURL(clip.url);
  onChange();
}

export function clear() {
  numCleared += 1;
  show(byId("clip-problem"), "");
  [...clips].forEach(remove);
}

// The clips of an earlier conversation: of videos only the ids are known, and only while the server keeps them.
export function recall(kept) {
  clear();
  for (const { name, source } of kept) {
    const isImage = "video" in source;
    const clip = { name, source, isImage, ready: Promise.resolve(source), url: isImage ? source.video.replace("video", "image") : "" };
    enter(clip);
    clip.bar.remove();
    tell(clip, isImage ? "An image." : "Usable while the server keeps it: by default, an hour after the last question.");
  }
}
