// Creates elements from names, properties and children; never parses HTML.

export const byId = (id) => document.getElementById(id);

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function show(node, text) {
  node.textContent = text;
  node.hidden = !text;
}

// Runs `work` immediately, then at most every `PACE_MS`: a browser on the server's machine competes for its cores.
const PACE_MS = 100;

export function paced(work) {
  let timer = null;
  let isDue = false;
  const run = () => {
    timer = isDue ? setTimeout(run, PACE_MS) : null;
    if (isDue) work();
    isDue = false;
  };
  return () => {
    isDue = true;
    if (!timer) run();
  };
}

export const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
export const percent = (share) => `${Math.round(share * 100)} %`;

// Browsers offer the clipboard API to secure pages and localhost only, and may deny it; then, copy a selection.
export async function copyText(text) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch { /* a selection */ }
  const area = el("textarea", { value: text, class: "unseen", "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
