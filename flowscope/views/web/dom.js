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

/** A field that filters what stands below it. */
export function searchBox(what, draw) {
  return el("input", { type: "search", placeholder: what, "aria-label": what[0].toUpperCase() + what.slice(1), oninput: draw });
}

/** A table whose heads are buttons: `sort(i)` is called on a click, `marked(i, down)` shows by which it is sorted. */
export function sortable(titles, sort, body, ...before) {
  const heads = titles.map((title, i) => el("th", { scope: "col" }, el("button", { onclick: () => sort(i) }, title)));
  const element = el("div", { class: "scrolls" }, el("table", {}, el("thead", {}, el("tr", {}, ...before, ...heads)), body));
  return { element, marked: (chosen, down) => heads.forEach((head, i) => head.setAttribute("aria-sort", i !== chosen ? "none" : down ? "descending" : "ascending")) };
}

/** `number`, or the end of [low, high] that it lies beyond. */
export function clamp(number, low, high) {
  return Math.min(high, Math.max(low, number));
}

/** Rows and columns that an arrow key moves by; undefined for other keys. */
export function arrow(key) {
  return { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
}

/** The row and the column of a picture's cell under the pointer. */
export function cellUnder(event, canvas, rows, columns) {
  const box = canvas.getBoundingClientRect();
  const at = (share, count) => clamp(Math.floor(share * count), 0, count - 1);
  return [at((event.clientY - box.top) / box.height, rows), at((event.clientX - box.left) / box.width, columns)];
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
