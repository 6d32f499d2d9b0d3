// When each worker ran: one lane for the draft, one for the target. Where the lanes overlap, neither waited.

import { el, percent, seconds } from "./dom.js";

const LANES = ["draft", "target"];
const HEIGHT = 22;
const GAP = 6;

export class Timeline {
  constructor() {
    this.canvas = el("canvas", { role: "img", "aria-label": "Timeline" });
    this.range = el("span", { class: "note" });
    this.zoom = el("button", { type: "button", class: "quiet", "aria-pressed": "true", onclick: () => this.toggle() },
      "Writing only");
    this.node = el("div", { class: "timeline", hidden: true },
      el("div", { class: "lanes" }, el("span", {}, "draft"), el("span", {}, "target")), this.canvas,
      el("div", { class: "row scale" }, this.zoom, this.range,
        ...[["prepare", "reads the video"], ["prefill", "reads the prompt"], ["propose", "proposes"], ["verify", "checks"]]
          .map(([phase, meaning]) => el("span", { class: `key ${phase}` }, meaning))));
    this.spans = [];
    this.isDue = false;
    new ResizeObserver(() => this.update(this.spans)).observe(this.node);
  }

  toggle() {
    const isZoomed = this.zoom.getAttribute("aria-pressed") === "true";
    this.zoom.setAttribute("aria-pressed", String(!isZoomed));
    this.update(this.spans);
  }

  update(spans) {
    this.spans = spans;
    this.node.hidden = spans.length === 0;
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      if (this.spans.length) this.draw();
    });
  }

  draw() {
    const writing = this.spans.filter((span) => span.phase === "verify");
    const isZoomed = this.zoom.getAttribute("aria-pressed") === "true" && writing.length > 0;
    const shown = this.spans.filter((span) => !isZoomed || span.end_s >= writing[0].start_s);
    const start = isZoomed ? writing[0].start_s : Math.min(...shown.map((span) => span.start_s));
    const end = isZoomed ? writing.at(-1).end_s : Math.max(...shown.map((span) => span.end_s));
    this.paint(shown, start, Math.max(end - start, 1e-6));
    this.range.textContent = `${seconds(end - start)} shown`;
    this.canvas.setAttribute("aria-label", LANES.map((worker) => {
      const busy = shown.filter((span) => span.worker === worker)
        .reduce((sum, span) => sum + Math.max(0, Math.min(span.end_s, end) - Math.max(span.start_s, start)), 0);
      return `${worker} at work ${percent(Math.min(1, busy / Math.max(end - start, 1e-6)))} of the time`;
    }).join(", "));
  }

  paint(spans, start, length) {
    const ratio = devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    this.canvas.width = width * ratio;
    this.canvas.height = (2 * HEIGHT + GAP) * ratio;
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    context.scale(ratio, ratio);
    context.fillStyle = style.getPropertyValue("--lane");
    LANES.forEach((_, lane) => context.fillRect(0, lane * (HEIGHT + GAP), width, HEIGHT));
    for (const span of spans) {
      const left = Math.max(0, ((span.start_s - start) / length) * width);
      const right = Math.min(width, ((span.end_s - start) / length) * width);
      context.fillStyle = style.getPropertyValue(`--${span.phase}`);
      context.fillRect(left, LANES.indexOf(span.worker) * (HEIGHT + GAP), Math.max(0.75, right - left - 0.5), HEIGHT);
    }
  }
}
