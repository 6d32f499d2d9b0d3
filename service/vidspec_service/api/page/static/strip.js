// The frames that the target saw, with the cells that the draft saw; a click seeks the player.

import { el } from "./dom.js";
import { pictures } from "./frames.js";

// `frames` are [{time, cells?}]; `grid` is {rows, columns} if cells are known. Pictures appear as they are decoded.
export function showStrip(clip, frames, grid) {
  const times = frames.map((frame) => frame.time);
  const isNew = clip.stripTimes !== times.join();
  clip.stripTimes = times.join();
  if (isNew) clip.pictures = [];
  clip.shown = { frames, grid };
  clip.strip.replaceChildren(...frames.map((_, place) => thumbnail(clip, place)));
  clip.strip.hidden = false;
  if (isNew) load(clip, times);
}

async function load(clip, times) {
  const found = clip.pictures;
  for await (const picture of pictures(clip, times)) {
    if (clip.pictures !== found) return; // the strip shows other frames by now
    found.push(picture);
    const place = found.length - 1;
    clip.strip.children[place].firstElementChild.replaceWith(pictureOf(clip, place));
  }
}

function thumbnail(clip, place) {
  const { frames, grid } = clip.shown;
  const { time, cells } = frames[place];
  const told = grid && cells ? `, the draft saw ${cells.length} of ${grid.rows * grid.columns} cells` : "";
  const label = `Frame at ${time.toFixed(2)} s${told}`;
  return el("button", { type: "button", class: "frame", title: label, "aria-label": label,
    onclick: () => { if (clip.player) clip.player.currentTime = time; } },
    pictureOf(clip, place), el("span", { class: "time" }, `${time.toFixed(2)} s`));
}

function pictureOf(clip, place) {
  const { frames, grid } = clip.shown;
  const picture = clip.pictures[place];
  return picture ? veiled(picture, frames[place].cells, grid) : el("span", { class: "blank" });
}

// Draws the picture, dark where the draft saw nothing.
function veiled(picture, cells, grid) {
  const canvas = el("canvas", { width: picture.width, height: picture.height });
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  if (!grid || !cells) return canvas;
  const seen = new Set(cells);
  const [width, height] = [canvas.width / grid.columns, canvas.height / grid.rows];
  for (let cell = 0; cell < grid.rows * grid.columns; cell += 1) {
    const [left, top] = [(cell % grid.columns) * width, Math.floor(cell / grid.columns) * height];
    if (seen.has(cell)) {
      context.strokeStyle = "#5eead4";
      context.lineWidth = 1.5;
      context.strokeRect(left + 0.75, top + 0.75, width - 1.5, height - 1.5);
    } else {
      context.fillStyle = "rgba(8, 16, 20, 0.62)";
      context.fillRect(left, top, width, height);
    }
  }
  return canvas;
}
