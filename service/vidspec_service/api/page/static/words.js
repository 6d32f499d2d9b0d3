// The answer's words, coloured by who wrote them; what else could have stood there is told under the pointer.

import { byId, el, percent } from "./dom.js";

const WHO = {
  draft: "the draft proposed it, the target agreed",
  target: "the target’s own",
  grammar: "forced by the schema",
};

export class Words {
  constructor() {
    this.node = el("p", { class: "words" });
    this.shown = 0;
    this.node.addEventListener("pointerover", (event) => this.tell(event));
    this.node.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
  }

  // Adds what is new; a token that lost its text at the end is taken up by `settle`.
  update(tokens) {
    const added = tokens.slice(this.shown).map((token) => {
      const word = el("span", { class: `by-${token.source}` }, token.text);
      word.token = token;
      return word;
    });
    this.node.append(...added);
    this.shown = tokens.length;
  }

  settle(answer) {
    for (const word of this.node.children) word.textContent = word.token.text;
    if (!this.shown) this.node.textContent = answer.text;
  }

  tell(event) {
    const token = event.target.token;
    const tip = byId("tip");
    tip.hidden = !token;
    if (!token) return;
    const others = token.logprob?.top_logprobs ?? [];
    tip.replaceChildren(
      el("p", {}, WHO[token.source]),
      ...others.map((other) => el("p", { class: "alternative" },
        el("span", {}, JSON.stringify(other.token)), el("span", {}, percent(Math.exp(other.logprob))))));
    const place = event.target.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${place.bottom + 6 + tip.offsetHeight > innerHeight ? place.top - tip.offsetHeight - 6 : place.bottom + 6}px`;
  }
}
