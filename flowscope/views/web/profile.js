// Depth profiles on top of each other: colour tells the run, the dash tells the step.

import { clamp, el, spread, svg } from "./dom.js";
import { downloads } from "./download.js";
import { decode, format } from "./scale.js";
import { rowName } from "./source.js";

const DASHES = ["", "7 4", "2 3", "10 3 2 3"];

/** The plot area, whose edges the loss shares. */
export const WIDTH = 960;
export const LEFT = 66;
export const RIGHT = 12;
const [HEIGHT, BOTTOM, TOP] = [300, 26, 10];

/** Where the pointer is between the edges of the plot: 0 to 1, and beyond. */
export function shareAt(event, picture) {
  const box = picture.getBoundingClientRect();
  return (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
}

/** Show what is read beside the place x of the plot. */
export function readAt(readout, x, ...words) {
  readout.replaceChildren(...words);
  readout.style.left = `${(100 * x) / WIDTH}%`;
  readout.style.transform = x > 0.6 * WIDTH ? "translateX(calc(-100% - 12px))" : "translateX(12px)";
  readout.hidden = false;
}

/** The dash of the n-th pinned step. */
export function dash(n) {
  return DASHES[n % DASHES.length];
}

/**
 * Draw them.
 * `lines`: {run, step, colour, dash, rows, values, band: [low, high]
 * or null, behind: of a reference, first among the lines and without rows}; `limits`: {value, text}.
 */
export function profileFigure({ lines, scale, limits, row, name, title, across }) {
  const x = (index, depth) => LEFT + ((index + 0.5) / depth) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - scale.position(value)) * (HEIGHT - TOP - BOTTOM);
  const guide = svg("line", { class: "guide", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const readout = el("output", { class: "readout", hidden: true });
  const first = lines.find((line) => line.rows);
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "application", "aria-label": "Depth profiles; left and right arrow move along depth." },
    scale.ticks.map((tick) => gridLine(TOP + (1 - tick.position) * (HEIGHT - TOP - BOTTOM), tick.text)),
    limits.filter((limit) => scale.inside(limit.value)).map((limit) => limitLine(y(limit.value), limit.text)),
    spread(first.rows.length, Math.max(...first.rows.map(([label]) => label.length)) > 12 ? 5 : 7).map((i, n, all) => depthLabel(x(i, first.rows.length), first.rows[i][0], n, all.length)),
    lines.map((line) => line.band && svg("path", { class: line.behind ? "band behind" : "band", d: area(line, x, y), fill: line.colour })),
    lines.map((line) => curve(line, path(line.values, x, y) + infinities(line.values, x))),
    guide,
  );
  let at = null;

  function show(share) {
    at = clamp(share, 0, 1);
    const index = Math.min(first.rows.length - 1, Math.floor(at * first.rows.length));
    const place = x(index, first.rows.length);
    readAt(readout, place, el("b", {}, rowName(first.rows[index])), ...lines.map((line) => reading(line, at)));
    for (const name of ["x1", "x2"]) guide.setAttribute(name, place);
    guide.setAttribute("visibility", "visible");
  }

  function hide() {
    readout.hidden = true;
    guide.setAttribute("visibility", "hidden");
  }

  picture.addEventListener("pointermove", (event) => show(shareAt(event, picture)));
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const step = 1 / first.rows.length;
    if (event.key === "ArrowRight") show(at === null ? step / 2 : Math.min(1 - step / 2, at + step));
    else if (event.key === "ArrowLeft") show(at === null ? step / 2 : Math.max(step / 2, at - step));
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });
  if (row !== null) {
    const index = first.rows.findIndex(([, , start, count]) => row >= start && row < start + count);
    if (index >= 0) {
      const place = x(index, first.rows.length);
      picture.append(svg("line", { class: "place", x1: place, x2: place, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
  }
  const table = () => [["row", ...lines.map((line) => `${line.run} step ${line.step}`)], ...first.rows.map((group, i) => [rowName(group), ...lines.map((line) => decode(line.values[i] ?? null))])];
  const below = el("div", { class: "bar" }, el("span", { class: "hint" }, `→ ${across}`), downloads(name, { table, svg: () => picture }));
  return el("figure", { class: "profile" }, el("div", { class: "hint" }, `↑ ${title}`), el("div", { class: "plot" }, picture, readout), below, legend(lines));
}

function curve(line, d) {
  const look = line.behind ? { class: line.band ? "line behind middle" : "line behind" } : { class: "line", "stroke-width": 2, stroke: line.colour };
  return svg("path", { ...look, "stroke-dasharray": line.dash, d });
}

/** The path of a line; `x(i, count)` and `y(value)` place a point. */
export function path(values, x, y) {
  const numbers = values.map(decode);
  let out = "";
  numbers.forEach((value, i) => {
    // what was not seen is a gap, and a point between gaps a short dash
    if (!Number.isFinite(value)) return;
    const [before, after] = [numbers[i - 1], numbers[i + 1]].map(Number.isFinite);
    const [left, top] = [x(i, values.length), y(value).toFixed(1)];
    if (!before && !after) out += `M${(left - 2).toFixed(1)} ${top}h4`;
    else out += `${before ? "L" : "M"}${left.toFixed(1)} ${top}`;
  });
  return out;
}

/** Strokes at the upper edge where a value is infinite, at the lower where it is minus infinity. */
function infinities(values, x) {
  const stroke = (value, i) => `M${x(i, values.length).toFixed(1)} ${value > 0 ? TOP : HEIGHT - BOTTOM - 9}v9`;
  return values.map(decode).map((value, i) => (Math.abs(value) === Infinity ? stroke(value, i) : "")).join("");
}

function area(line, x, y) {
  const [low, high] = line.band;
  const whole = low.map((_, i) => i).filter((i) => Number.isFinite(decode(low[i])) && Number.isFinite(decode(high[i])));
  const point = (values) => (i) => `${x(i, low.length).toFixed(1)} ${y(decode(values[i])).toFixed(1)}`;
  return whole.length ? `M${whole.map(point(high)).join("L")}L${whole.reverse().map(point(low)).join("L")}Z` : "";
}

/** A horizontal line with its value on the left. */
export function gridLine(at, text) {
  return svg(
    "g",
    { class: "grid" },
    svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }),
    svg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, text),
  );
}

function limitLine(at, text) {
  return svg(
    "g",
    { class: "limit" },
    svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }),
    svg("text", { x: WIDTH - RIGHT - 4, y: at < TOP + 16 ? at + 14 : at - 4, "text-anchor": "end" }, text),
  );
}

function depthLabel(at, text, n, count) {
  const anchor = n === 0 ? "start" : n === count - 1 ? "end" : "middle";
  const short = text.length > 22 ? `…${text.slice(-21)}` : text;
  const edge = n === 0 ? LEFT : n === count - 1 ? WIDTH - RIGHT : at;
  return svg("text", { class: "depth", x: edge, y: HEIGHT - 6, "text-anchor": anchor }, svg("title", {}, text), short);
}

function sample(line) {
  return svg("svg", { class: "sample", viewBox: "0 0 28 8", "aria-hidden": "true" }, curve(line, "M0 4H28"));
}

function reading(line, share) {
  const index = Math.min(line.values.length - 1, Math.floor(share * line.values.length));
  const band = line.band ? ` (${format(decode(line.band[0][index]))} to ${format(decode(line.band[1][index]))})` : "";
  return el(
    "span",
    {},
    sample(line),
    ` ${named(line)}, step ${line.step}: `,
    el("span", { class: "value" }, format(decode(line.values[index]))),
    band,
  );
}

function named(line) {
  return line.behind ? `reference ${line.run}` : line.run;
}

function legend(lines) {
  return el(
    "ul",
    { class: "legend" },
    ...lines.map((line) => el("li", {}, sample(line), ` ${named(line)}, step ${line.step}${line.values.map(decode).every(Number.isNaN) ? ": not seen or NaN" : ""}`)),
  );
}
