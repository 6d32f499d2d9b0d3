// Elements from names, properties and children; nothing is ever parsed as HTML.

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

export const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
export const percent = (share) => `${Math.round(share * 100)} %`;
