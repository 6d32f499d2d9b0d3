// The card of one answer: its words, live figures, timeline, and action buttons.

import { el, paced, percent, seconds, show } from "./dom.js";
import { figures } from "./reading.js";
import { Timeline } from "./timeline.js";
import { Words } from "./words.js";

const FIGURES = [
  ["rate", "tokens/s", (value) => value.toFixed(0)],
  ["firstToken", "first token", seconds],
  ["acceptance", "draft tokens accepted", (value, all) => `${all.isLeast ? "≥ " : ""}${percent(value)}`],
  ["accepted", "accepted per check", (value) => value.toFixed(1)],
  ["cached", "prompt tokens cached", (value, all) => percent(value / all.prompt)],
  ["mode", "mode", (value) => value],
];

export class AnswerCard {
  constructor(...actions) {
    this.words = new Words();
    this.timeline = new Timeline();
    this.share = el("div", { class: "share", role: "img", hidden: true });
    this.legend = el("p", { class: "legend" });
    this.numbers = new Map(FIGURES.map(([name]) => [name, el("dd", {}, "–")]));
    this.figures = el("dl", { class: "figures" },
      ...FIGURES.map(([name, label]) => el("div", {}, el("dt", {}, label), this.numbers.get(name))));
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    this.note = el("p", { class: "note", role: "status" });
    this.actions = el("div", { class: "row actions", hidden: true }, ...actions);
    this.drawPaced = paced(() => this.draw());
    this.node = el("article", { class: "answer", "aria-busy": "true", "aria-label": "Answer" },
      this.words.node, this.problem, this.legend, this.share, this.figures, this.timeline.node, this.note, this.actions);
  }

  update(answer) {
    this.answer = answer;
    this.drawPaced();
  }

  draw() {
    const { answer } = this;
    this.words.update(answer.tokens);
    this.timeline.update(answer.spans);
    const found = figures(answer);
    for (const [name, , write] of FIGURES) {
      if (found[name] !== null) this.numbers.get(name).textContent = write(found[name], found);
    }
    this.tellShares(found);
  }

  tellShares(found) {
    const all = found.draft + found.target + found.grammar;
    if (!all) return;
    const parts = [["draft", "by the draft, accepted"], ["target", "the target’s own"], ["grammar", "forced by the schema"]]
      .filter(([who]) => found[who]);
    this.legend.replaceChildren(...parts.map(([who, meaning]) =>
      el("span", { class: `key by-${who}` }, `${percent(found[who] / all)} ${meaning}`)));
    this.share.replaceChildren(...parts.map(([who]) => {
      const bar = el("span", { class: `bar by-${who}` });
      bar.style.flexGrow = found[who];
      return bar;
    }));
    this.share.setAttribute("aria-label", parts.map(([who, meaning]) => `${percent(found[who] / all)} ${meaning}`).join(", "));
    this.share.hidden = false;
  }

  finish(answer) {
    this.answer = answer;
    this.draw();
    this.words.settle(answer);
    this.node.setAttribute("aria-busy", "false");
    show(this.problem, answer.error ?? "");
    this.note.textContent = answer.finish === "length" ? "The answer reached the token limit." : "";
    this.actions.hidden = false;
  }
}
