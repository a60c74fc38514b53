// A square of numbers: the cosine of each pair of depths, or how streams are mixed at a site.

import { el } from "./dom.js";
import { decode, format, makeScale, paint } from "./scale.js";
import { colourBar } from "./heatmap.js";

function square(numbers, scale, describe) {
  const canvas = paint(numbers, scale);
  const readout = el("output", { class: "readout", hidden: true });
  let at = [0, 0];
  const show = (row, column) => {
    at = [row, column];
    readout.replaceChildren(el("b", {}, describe(row, column)), el("span", { class: "value" }, format(numbers[row][column])));
    readout.hidden = false;
  };
  const size = numbers.length;
  const clamp = (value) => Math.min(size - 1, Math.max(0, value));
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `Matrix of ${size} by ${size}; arrow keys move.`);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const cell = (share) => clamp(Math.floor(share * size));
    show(cell((event.clientY - box.top) / box.height), cell((event.clientX - box.left) / box.width));
  });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    show(clamp(at[0] + move[0]), clamp(at[1] + move[1]));
  });
  for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => (readout.hidden = true));
  return el("div", { class: "square" }, canvas, readout);
}

/** Matrices of several runs on one scale: rows and columns are depths, input on top and on the left. */
export function matrixFigures(records, bounds) {
  const scale = makeScale("linear", { bounds }, records.flatMap(({ record }) => record.matrix.flat().map(decode)));
  return [colourBar(scale, {}), el("div", { class: "matrices" }, ...records.map(({ run, record }) => matrixFigure(run.name, record, scale)))];
}

function matrixFigure(title, record, scale) {
  const numbers = record.matrix.map((row) => row.map(decode));
  const name = (i) => record.labels[i] ?? `row ${i}`;
  return el(
    "figure",
    { class: "matrix" },
    el("figcaption", {}, `${title}, step ${record.step}`),
    square(numbers, scale, (row, column) => `${name(row)} and ${name(column)}`),
    el("small", {}, `${name(0)} on top and on the left, ${name(numbers.length - 1)} at the other end`),
  );
}

/** The matrices of each run, one a site, in the order of depth, on one scale. */
export function stackFigures(records, bounds) {
  const scale = makeScale("linear", { bounds }, records.flatMap(({ record }) => record.stack.flat(2).map(decode)));
  return [colourBar(scale, {}), ...records.map(({ run, record }) => stackFigure(run.name, record, scale))];
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
