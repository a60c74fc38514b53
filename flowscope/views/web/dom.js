// Elements. Text only ever arrives through textContent or setAttribute: module names may contain anything.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

/** An HTML element; `on...` attributes are listeners, strings among the children are text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Replace what is in a section. What had the focus there hands it to what takes its place, or the keyboard would be lost. */
export function replace(section, ...children) {
  const reachable = () => [...section.querySelectorAll("button, canvas, svg[tabindex], summary")];
  const held = reachable().indexOf(document.activeElement);
  section.replaceChildren(...children);
  const now = reachable();
  if (held >= 0) now[Math.min(held, now.length - 1)]?.focus({ preventScroll: true });
}

/** What is shown where there is nothing to draw: why, and what to do. */
export function emptyState(headline, advice) {
  return el("p", { class: "empty", role: "note" }, el("strong", {}, headline), " ", advice);
}

/** At most `limit` evenly spaced indices of `count`, the first and the last among them. */
export function spread(count, limit) {
  if (count <= limit) return Array.from({ length: count }, (_, i) => i);
  const found = new Set();
  for (let i = 0; i < limit; i += 1) found.add(Math.round((i * (count - 1)) / (limit - 1)));
  return [...found];
}
