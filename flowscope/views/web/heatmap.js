// A metric over depth (downwards, input on top) and steps (to the right), one cell a record and row.

import { axisTitle, stepText } from "./axis.js";
import { arrow, cellUnder, clamp, el, spread, svg } from "./dom.js";
import { downloads, pictureOf } from "./download.js";
import { decode, format, paint } from "./scale.js";
import { nearest, rowName, rowOf } from "./source.js";

const MOST_NAMED = 14;
const percent = (share) => `${(100 * share).toFixed(3)}%`;

/**
 * Draw it.
 * `onPin(step)` is called on click and Enter, `onAlert(alert)` on a marker, `onZoom(from, to)` when steps were dragged
 * over, or marked with [ and ]. `loss` ({steps, values}) is drawn above on the map's own axis; `bar` is a colour bar.
 * Returns the element, `pins(steps)` to mark columns and `land(row, step)` to move the cursor there.
 */
export function heatMap({ title, series, scale, alerts, loss, marked, bar, onPin, onAlert, onZoom }) {
  const rows = series.values.map((row) => row.map(decode));
  const columns = series.steps.length;
  const canvas = paint(rows, scale);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `${title}: heat map, ${rows.length} rows by ${columns} steps. Arrow keys move, Enter pins.`);
  const overlay = el("div", { class: "overlay" });
  const cursor = el("div", { class: "cursor", hidden: true });
  const readout = el("output", { class: "readout", hidden: true });
  const plot = el("div", { class: "plot" }, canvas, overlay, cursor, readout);
  let cell = null;

  function show(row, column, landed = false) {
    cell = { row, column };
    const [, , , count] = series.rows[row];
    readout.replaceChildren(
      el("b", {}, rowName(series.rows[row])),
      el("span", {}, `step ${series.steps[column]}`),
      el("span", { class: "value" }, format(rows[row][column])),
      count > 1 ? el("small", {}, `the most extreme of ${count} rows`) : "",
      landed ? el("small", {}, ends(rows, column, series.rows)) : "",
    );
    const [x, y] = [(column + 0.5) / columns, (row + 0.5) / rows.length];
    Object.assign(readout.style, {
      left: percent(x),
      top: percent(y),
      transform: `translate(${x > 0.6 ? "calc(-100% - 12px)" : "12px"}, ${y > 0.6 ? "calc(-100% - 8px)" : "8px"})`,
    });
    Object.assign(cursor.style, {
      left: percent(column / columns),
      top: percent(row / rows.length),
      width: percent(1 / columns),
      height: percent(1 / rows.length),
    });
    readout.hidden = cursor.hidden = false;
  }

  function hide() {
    readout.hidden = cursor.hidden = true;
  }

  const under = (event) => cellUnder(event, canvas, rows.length, columns);
  const brush = el("div", { class: "brush", hidden: true });
  plot.append(brush);
  let from = null;
  canvas.addEventListener("pointerdown", (event) => (from = under(event)[1]));
  canvas.addEventListener("pointermove", (event) => {
    const at = under(event);
    show(...at);
    brush.hidden = !(event.buttons & 1) || from === null || from === at[1];
    const [left, right] = [Math.min(from, at[1]), Math.max(from, at[1]) + 1];
    Object.assign(brush.style, { left: percent(left / columns), width: percent((right - left) / columns) });
  });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("click", (event) => {
    const to = under(event)[1];
    const [a, b] = [Math.min(from ?? to, to), Math.max(from ?? to, to)];
    from = null;
    brush.hidden = true;
    if (b > a) onZoom(series.steps[a], series.steps[b]);
    else onPin(series.steps[to]);
  });
  canvas.addEventListener("keydown", (event) => {
    const move = arrow(event.key);
    if (move) {
      const at = cell ?? { row: 0, column: columns - 1 };
      show(clamp(at.row + move[0], 0, rows.length - 1), clamp(at.column + move[1], 0, columns - 1));
    } else if (event.key === "[" && cell) from = cell.column;
    else if (event.key === "]" && cell && from !== null && from < cell.column) onZoom(series.steps[from], series.steps[cell.column]);
    else if (event.key === "Enter" && cell) onPin(series.steps[cell.column]);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });

  const marks = el("div", { class: "marks" }, ...alerts.flatMap((alert) => mark(alert, series, rows, onAlert)));
  plot.append(marks);
  const thinned =
    (series.records > columns || series.depth > rows.length || series.dropped > 0) &&
    el(
      "small",
      { class: "thinned" },
      [
        series.records > columns && `${columns} of ${series.records} records`,
        series.depth > rows.length && `${series.depth} rows in ${rows.length} groups, each shown by its most extreme`,
        series.dropped > 0 && `${series.dropped} records before a change of layout are left out`,
      ]
        .filter(Boolean)
        .join("; "),
    );
  const table = () => [["row", ...series.steps], ...series.values.map((row, i) => [rowName(series.rows[i]), ...row.map(decode)])];
  const curve = lossStrip(loss, series.steps, marked ?? []);
  const element = el(
    "figure",
    { class: "heat" },
    el("figcaption", {}, title, thinned, downloads(`${title} ${series.key}`, { table, png: () => pictureOf({ title: `${title}: ${series.key}`, canvas, rows: series.rows, steps: series.steps }) })),
    bar,
    el("div", { class: "frame" }, ...(curve ? [el("span", { class: "loss-name" }, "loss"), curve] : []), depthAxis(series.rows), plot, stepAxis(series.steps), el("span", { class: "axis-title" }, axisTitle())),
  );

  return {
    element,
    canvas,
    pins(steps) {
      overlay.replaceChildren(
        ...steps.map((step) => {
          const left = percent((nearest(series.steps, step) + 0.5) / columns);
          return el("div", { class: "pin", style: { left } });
        }),
      );
    },
    land(index, step, end) {
      // the cell that the message speaks of: the darkest of its step, not the block that makes it so
      const far = end && extreme(rows, nearest(series.steps, step), end);
      const row = far ? far[0] : index === null ? 0 : Math.max(0, rowOf(series.rows, index));
      canvas.focus({ preventScroll: true });
      element.scrollIntoView({ block: "center" });
      show(row, nearest(series.steps, step), true);
    },
  };
}

/** The loss above the map, on the map's axis of one column a record, with a stem where an alert begins; null without one. */
function lossStrip(loss, steps, marked) {
  const [from, to] = [steps[0], steps.at(-1)];
  const points = (loss?.steps ?? []).map((step, i) => [step, decode(loss.values[i])]).filter(([step, value]) => step >= from && step <= to && Number.isFinite(value));
  if (points.length < 2) return null;
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const log = low > 0 && high > 1000 * low;
  const height = (value) => (log ? Math.log(value) : value);
  const y = (value) => (44 - 40 * (high > low ? (height(value) - height(low)) / (height(high) - height(low)) : 0.5)).toFixed(2);
  const at = (step) => {
    const after = steps.findIndex((one) => one >= step);
    const before = Math.max(0, after - 1);
    const share = steps[after] > steps[before] ? (step - steps[before]) / (steps[after] - steps[before]) : 0;
    return (((before + share + 0.5) / steps.length) * 1000).toFixed(1);
  };
  const stems = marked.filter(({ step }) => step >= from && step <= to);
  return svg(
    "svg",
    { class: "loss-strip", viewBox: "0 0 1000 48", preserveAspectRatio: "none", role: "img", "aria-label": `loss from ${format(values[0])} to ${format(values.at(-1))}` },
    stems.map(({ step, severity, words }) => svg("line", { class: `stem ${severity}`, x1: at(step), x2: at(step), y1: 0, y2: 48 }, svg("title", {}, words))),
    svg("polyline", { class: "line", points: points.map(([step, value]) => `${at(step)},${y(value)}`).join(" ") }, svg("title", {}, `loss ${format(high)} to ${format(low)}`)),
  );
}

/** The finite cell of a column with the least or the largest value: [row, value], null where there is none. */
function extreme(rows, column, end) {
  let best = null;
  rows.forEach((row, i) => {
    const value = row[column];
    if (Number.isFinite(value) && (best === null || (end === "least" ? value < best[1] : value > best[1]))) best = [i, value];
  });
  return best;
}

function ends(rows, column, names) {
  const found = ["least", "largest"].map((end) => extreme(rows, column, end));
  if (found[0] === null) return "no finite value at this step";
  const [low, high] = found.map(([row, value]) => `${format(value)} (${rowName(names[row])})`);
  return `over depth at this step: ${low} to ${high}`;
}

/** The mark of an alert, and before it a line from its block to the end of the profile that the message speaks of. */
function mark(alert, series, rows, onAlert) {
  const row = rowOf(series.rows, alert.row);
  const column = nearest(series.steps, alert.step);
  if (row < 0) return [];
  const style = { left: percent((column + 0.5) / series.steps.length), top: percent((row + 0.5) / series.rows.length) };
  const far = alert.extreme && extreme(rows, column, alert.extreme);
  const words = `${alert.kind} at ${alert.where}, step ${alert.step}${far ? `; ${alert.extreme}: ${format(far[1])} at ${rowName(series.rows[far[0]])}` : ""}`;
  const button = el("button", { class: `mark ${alert.severity}`, style, title: words, "aria-label": words, onclick: () => onAlert(alert) });
  if (!far) return [button];
  const [top, bottom] = [Math.min(row, far[0]), Math.max(row, far[0])].map((at) => (at + 0.5) / series.rows.length);
  const reach = { left: style.left, top: percent(top), height: percent(bottom - top) };
  return [el("div", { class: `reach ${alert.severity} ${far[0] < row ? "up" : "down"}`, style: reach }), button];
}

function depthAxis(rows) {
  const labels = spread(rows.length, rows.length <= MOST_NAMED ? MOST_NAMED : 9).map((i) =>
    el("span", { style: { top: percent((i + 0.5) / rows.length) }, title: rowName(rows[i]) }, rows[i][0]),
  );
  return el("div", { class: "depth-axis", "aria-hidden": "true" }, ...labels);
}

function stepAxis(steps) {
  const labels = spread(steps.length, 7).map((i) =>
    el("span", { style: { left: percent((i + 0.5) / steps.length) } }, stepText(steps[i])),
  );
  return el("div", { class: "step-axis", "aria-hidden": "true" }, ...labels);
}

/** The legend of the colours. */
export function colourBar(scale, numbers) {
  const [notSeen, infinite] = [numbers.some(Number.isNaN), numbers.some((value) => Math.abs(value) === Infinity)];
  const shades = paint([Array.from({ length: 64 }, (_, i) => i / 63)], { position: (value) => value });
  const key = (name, words) => el("span", { class: `key ${name}` }, words);
  return el(
    "div",
    { class: "colour-bar" },
    el(
      "div",
      { class: "shades" },
      shades,
      ...scale.ticks.map((tick) => el("span", { style: { left: percent(tick.position) } }, tick.text)),
    ),
    notSeen && key("not-seen", "not seen or NaN"),
    infinite && key("infinite", "infinite"),
  );
}
