// A matrix of numbers: the cosine of each pair of depths, how streams are mixed at a site, a number for each head of a layer.

import { arrow, cellUnder, clamp, el } from "./dom.js";
import { decode, format, makeScale, paint } from "./scale.js";
import { colourBar } from "./heatmap.js";

function square(numbers, scale, describe) {
  const canvas = paint(numbers, scale);
  const readout = el("output", { class: "readout", hidden: true });
  let at = [0, 0];
  const show = (...place) => {
    at = place.map((one, axis) => clamp(one, 0, sizes[axis] - 1));
    readout.replaceChildren(el("b", {}, describe(...at)), el("span", { class: "value" }, format(numbers[at[0]][at[1]])));
    readout.hidden = false;
  };
  const sizes = [numbers.length, numbers[0].length];
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `Matrix of ${sizes.join(" by ")}; arrow keys move.`);
  canvas.addEventListener("pointermove", (event) => show(...cellUnder(event, canvas, ...sizes)));
  canvas.addEventListener("keydown", (event) => {
    const move = arrow(event.key);
    if (!move) return;
    event.preventDefault();
    show(at[0] + move[0], at[1] + move[1]);
  });
  for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => (readout.hidden = true));
  return el("div", { class: "square" }, canvas, readout);
}

/** Matrices of several runs on one scale: rows are depths, input on top; columns too, input on the left, or heads. */
export function matrixFigures(records, bounds, { scale: kind = "linear", per_flow: ofFlow = true } = {}) {
  const scale = makeScale(kind, { bounds }, records.flatMap(({ record }) => record.matrix.flat().map(decode)));
  return [colourBar(scale, []), el("div", { class: "matrices" }, ...records.map(({ run, record }) => matrixFigure(run.name, record, scale, !ofFlow)))];
}

function matrixFigure(title, record, scale, byHead) {
  const numbers = record.matrix.map((row) => row.map(decode));
  const name = (i) => record.labels[i] ?? `row ${i}`;
  const part = record.of > numbers.length ? ` (${numbers.length} of ${record.of} rows)` : "";
  return el(
    "figure",
    { class: "matrix" },
    el("figcaption", {}, `${title}, step ${record.step}${part}`),
    square(numbers, scale, (row, column) => (byHead ? `${name(row)}, head ${column}` : `${name(row)} and ${name(column)}`)),
    el("small", {}, `${name(0)} on top${byHead ? ", head 0" : " and"} on the left, ${name(numbers.length - 1)} at the other end`),
  );
}

/** The matrices of each run, one a site, in the order of depth, on one scale. */
export function stackFigures(records, bounds) {
  const scale = makeScale("linear", { bounds }, records.flatMap(({ record }) => record.stack.flat(2).map(decode)));
  return [colourBar(scale, []), ...records.map(({ run, record }) => stackFigure(run.name, record, scale))];
}

function stackFigure(title, record, scale) {
  const all = record.stack.map((matrix) => matrix.map((row) => row.map(decode)));
  const part = record.of > all.length ? ` (${all.length} of ${record.of} sites)` : "";
  const site = (numbers, i) =>
    el(
      "div",
      { class: "site" },
      square(numbers, scale, (row, column) => `${record.labels[i]}: stream ${column} → ${row}`),
      el("small", { title: record.labels[i] }, record.labels[i]),
    );
  return el(
    "figure",
    { class: "stack" },
    el("figcaption", {}, `${title}, step ${record.step}${part}`),
    el("div", { class: "sites" }, ...all.map(site)),
  );
}
