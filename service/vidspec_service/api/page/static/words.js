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
    this.clear();
    this.node.addEventListener("pointerover", (event) => this.tell(event));
    this.node.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
  }

  // Adds what is new; a token that lost its text at the end is taken up by `settle`.
  update(tokens) {
    for (const token of tokens.slice(this.shown)) {
      // The blank between two authors is nobody's.
      const isTurn = token.source !== this.source;
      const blank = isTurn ? token.text.match(/^\s*/)[0] : "";
      const word = el("span", { class: `by-${token.source}` }, token.text.slice(blank.length));
      Object.assign(word, { token, blank });
      this.node.append(blank, word);
      this.source = token.source;
    }
    this.shown = tokens.length;
  }

  settle(answer) {
    for (const word of this.node.children) word.textContent = word.token.text.slice(word.blank.length);
    if (!this.shown) this.node.textContent = answer.text;
  }

  clear() {
    this.node.replaceChildren();
    this.shown = 0;
    this.source = null;
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
