// The same question with two settings, asked one after the other: in parallel, each would slow the other down.

import { el, paced, seconds } from "./dom.js";
import { figures, read, unread } from "./reading.js";
import { Words } from "./words.js";

const SETTINGS = {
  "target alone": { speculation: "off" },
  auto: { speculation: "auto" },
  parallel: { speculation: "parallel" },
  serial: { speculation: "serial" },
  "parallel, draft sees all": { speculation: "parallel", preservation: "none" },
  "parallel, draft sees nothing": { speculation: "parallel", preservation: "blind" },
  "v-cast, auto": { speculation: "auto", compression: "v-cast" },
  "dycoke, auto": { speculation: "auto", compression: "dycoke" },
};

const FEWEST = 8; // tokens; the time of a shorter answer means nothing

class Lane {
  constructor(chosen) {
    this.choice = el("select", { "aria-label": "Setting" }, ...Object.keys(SETTINGS).map((name) =>
      el("option", { selected: name === chosen }, name)));
    this.clock = el("output", { class: "clock", "aria-label": "Time to write" });
    this.rate = el("p", { class: "note" });
    this.words = new Words();
    this.node = el("div", { class: "lane" }, el("div", { class: "row" }, this.choice, this.clock), this.words.node,
      this.rate);
    this.reset();
  }

  async run(body, signal) {
    this.answer = unread();
    const tick = setInterval(() => this.showClock(), 100);
    const show = paced(() => this.words.update(this.answer.tokens));
    await read({ ...body, ...SETTINGS[this.choice.value] }, this.answer, show, signal);
    clearInterval(tick);
    this.words.update(this.answer.tokens);
    this.words.settle(this.answer);
    this.showClock();
    const found = figures(this.answer);
    this.rate.textContent = this.answer.error
      ?? `${found.rate?.toFixed(0) ?? "–"} tokens/s, first token after ${seconds(found.firstToken)}`;
  }

  reset() {
    this.words.clear();
    this.clock.textContent = "0.00 s";
    this.rate.textContent = "waiting";
  }

  // The time since the first token: reading the video is the same work on both sides.
  get writing() {
    const per = this.answer.facts?.timings.time_per_output_token_s;
    if (per !== undefined) return per * Math.max(this.answer.tokens.length - 1, 0);
    return this.answer.first === null ? 0 : (performance.now() - this.answer.first) / 1000;
  }

  showClock() {
    this.clock.textContent = `${this.writing.toFixed(2)} s`;
  }
}

export class Race {
  constructor(turn, exclusively) {
    this.turn = turn;
    this.lanes = [new Lane("target alone"), new Lane("auto")];
    this.verdict = el("p", { class: "verdict", role: "status" }, "");
    const again = el("button", { type: "button", class: "quiet", onclick: () => exclusively((signal) => this.run(signal)) },
      "Race again");
    this.node = el("article", { class: "answer race", "aria-label": "Race" },
      el("div", { class: "lanes-row" }, ...this.lanes.map((lane) => lane.node)), this.verdict, el("div", { class: "row" }, again));
  }

  async run(signal) {
    this.lanes.forEach((lane) => lane.reset());
    this.lock(true);
    await this.hold(signal);
    this.lock(false);
  }

  // What a lane is called stays what it ran with.
  lock(isLocked) {
    for (const { choice } of this.lanes) choice.disabled = isLocked;
  }

  async hold(signal) {
    const [left, right] = this.lanes;
    this.verdict.textContent = "Both read the video first, so that neither has an advantage.";
    await read({ ...this.turn.body, max_tokens: 1, response_format: undefined }, unread(), () => {}, signal);
    this.verdict.textContent = "One after the other: at the same time, each would slow the other down.";
    for (const lane of this.lanes) if (!signal.aborted) await lane.run(this.turn.body, signal);
    this.verdict.textContent = signal.aborted ? "Stopped." : this.judge(left, right);
  }

  judge(left, right) {
    if (left.answer.error || right.answer.error) return "No result.";
    const ratio = left.writing / right.writing;
    const text = left.answer.text === right.answer.text ? "Word for word the same text." : "The texts differ.";
    if (left.answer.tokens.length < FEWEST || !Number.isFinite(ratio)) return `${text} Too short to say which is faster.`;
    const [faster, times] = ratio >= 1 ? [right, ratio] : [left, 1 / ratio];
    return `${faster.choice.value} is ${times.toFixed(1)} times as fast. ${text}`;
  }
}
