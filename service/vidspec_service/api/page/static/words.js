// The answer's words, coloured by who wrote them; the pointer or the arrow keys show the alternatives at a word.

import { byId, el, percent } from "./dom.js";

const WHO = {
  draft: "the draft proposed it, the target agreed",
  target: "the target’s own",
  grammar: "forced by the schema",
};

export class Words {
  constructor() {
    this.node = el("p", { class: "words", role: "group", tabIndex: 0,
      "aria-label": "The answer; arrow keys tell who wrote each word" });
    this.clear();
    this.node.addEventListener("pointerover", (event) => this.tell(event.target));
    this.node.addEventListener("keydown", (event) => this.walk(event));
    this.node.addEventListener("blur", () => this.tell(null));
    this.node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.tell(null)); // touch always fires it
  }

  // Adds the new tokens; `settle` handles tokens whose text was trimmed at the end.
  update(tokens) {
    for (const token of tokens.slice(this.shown)) {
      // The blank between words of two authors gets no colour.
      const isTurn = token.source !== this.source;
      const blank = isTurn ? token.text.match(/^\s*/)[0] : "";
      const word = el("span", { class: `by-${token.source}${token.thought ? " thought" : ""}` }, token.text.slice(blank.length));
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
    this.told = null;
  }

  walk(event) {
    const ways = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling", Escape: "" };
    if (!(event.key in ways)) return;
    event.preventDefault();
    const way = ways[event.key];
    this.tell(way && (this.told ? this.told[way] ?? this.told : this.node.firstElementChild));
  }

  tell(word) {
    const token = word?.token;
    const tip = byId("tip");
    this.told?.classList.remove("told");
    this.told = token ? word : null;
    tip.hidden = !token;
    if (!token) return;
    word.classList.add("told");
    const own = token.logprob ? `, log probability ${token.logprob.logprob.toFixed(2)}` : "";
    const others = token.logprob?.top_logprobs ?? [];
    tip.replaceChildren(
      el("p", {}, el("span", { class: "unseen" }, `${token.text}: `), WHO[token.source], own),
      ...others.map(({ token: text, logprob }) => el("p", { class: "alternative" },
        el("span", {}, JSON.stringify(text)), el("span", {}, `${logprob.toFixed(2)} (${percent(Math.exp(logprob))})`))));
    const place = word.getBoundingClientRect();
    const isLow = place.bottom + 6 + tip.offsetHeight > innerHeight;
    tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${scrollY + (isLow ? place.top - tip.offsetHeight - 6 : place.bottom + 6)}px`;
  }
}
