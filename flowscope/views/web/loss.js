// The loss of the chosen runs over steps, on top of each other: a flat one beside a falling one needs no words.

import { axisTitle, stepText } from "./axis.js";
import { clamp, el, svg } from "./dom.js";
import { downloads } from "./download.js";
import { LEFT, RIGHT, WIDTH, gridLine, path, readAt, shareAt } from "./profile.js";
import { decode, format, makeScale } from "./scale.js";
import { nearest } from "./source.js";

const [TALL, TOP_EDGE, FOOT] = [150, 10, 22];

/** The figure, or null where no run has a loss. */
export function lossFigure(runs, colourOf, smoothing = 0) {
  const curves = runs
    .map((run) => ({ name: run.name, steps: run.loss.steps, values: smoothed(run.loss.values.map(decode), smoothing) }))
    .filter((curve) => curve.values.some(Number.isFinite));
  if (!curves.length) return null;
  const references = behind(runs);
  const seen = [...curves.map((curve) => curve.values), ...references.flatMap((reference) => reference.lines)].flat().filter(Number.isFinite);
  const [low, high] = [Math.min(...seen), Math.max(...seen)];
  // an explosion must not flatten what was before it
  const scale = low > 0 && high > 1000 * low ? makeScale("log", {}, seen) : makeScale("linear", { bounds: [low, Math.max(high, low + 1e-9)] }, seen);
  // a loss that is no number any more leaves the rest of the axis empty
  const end = Math.max(1, ...runs.map((run) => run.last_step ?? 0), ...curves.map((curve) => curve.steps.at(-1)));
  const x = (step) => LEFT + (step / end) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP_EDGE + (1 - scale.position(value)) * (TALL - TOP_EDGE - FOOT);
  const readout = el("output", { class: "readout", hidden: true });
  const line = (curve) =>
    svg("path", { class: "line", "stroke-width": 2, stroke: colourOf(curve.name), d: path(curve.values, (i) => x(curve.steps[i]), y) });
  const stepLabel = (share, anchor) =>
    svg("text", { x: x(share * end), y: TALL - 5, "text-anchor": anchor }, `${share === 0 ? `${axisTitle()} ` : ""}${stepText(Math.round(share * end))}`);
  const stems = runs.flatMap((run) => run.alerts.map((alert) => svg("line", { class: `stem ${alert.severity}`, x1: x(alert.step), x2: x(alert.step), y1: TOP_EDGE, y2: TALL - FOOT }, svg("title", {}, `${run.name}: ${alert.kind} since step ${alert.step}`))));
  const table = () => [["run", "step", "loss"], ...curves.flatMap((curve) => curve.steps.map((step, i) => [curve.name, step, curve.values[i]]))];
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${TALL}`, tabindex: 0, role: "img", "aria-label": `Loss: ${curves.map(ending).join("; ")}` },
    scale.ticks.map((tick) => gridLine(TOP_EDGE + (1 - tick.position) * (TALL - TOP_EDGE - FOOT), tick.text)),
    stepLabel(0, "start"),
    stepLabel(0.5, "middle"),
    stepLabel(1, "end"),
    references.map((reference) => backdrop(reference, x, y, end)),
    stems.slice(0, 60),
    curves.map(line),
  );
  picture.addEventListener("pointermove", (event) => {
    const share = clamp(shareAt(event, picture), 0, 1);
    const words = [...references.map((one) => ({ name: `reference ${one.name}`, steps: one.steps, values: one.lines[one.lines.length >> 1] })), ...curves].map((curve) => {
      const at = nearest(curve.steps, share * end);
      return el("span", {}, `${curve.name}, step ${curve.steps[at]}: `, el("span", { class: "value" }, format(curve.values[at])));
    });
    readAt(readout, x(share * end), ...words);
  });
  picture.addEventListener("pointerleave", () => (readout.hidden = true));
  return el("figure", { class: "profile loss" }, el("div", { class: "plot" }, picture, readout), downloads("loss", { table, svg: () => picture }));
}

/** The references of the runs, each once: `lines` are one, or the low, the middle and the high one of a band. */
function behind(runs) {
  const found = new Map();
  for (const { behind } of runs) {
    if (behind?.loss) found.set(behind.name, { name: behind.name, steps: behind.loss.steps, lines: behind.loss.values.map((kept) => kept.map(([value]) => decode(value))) });
  }
  return [...found.values()];
}

/** A reference as far as the runs go: a thick line, and the band around it. */
function backdrop({ steps, lines }, x, y, end) {
  const inside = steps.map((_, i) => i).filter((i) => steps[i] <= end && lines.every((values) => Number.isFinite(values[i])));
  const place = (values) => (i) => `${x(steps[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
  const middle = lines[lines.length >> 1];
  const band = lines.length === 3 && inside.length > 0 && `M${inside.map(place(lines[2])).join("L")}L${[...inside].reverse().map(place(lines[0])).join("L")}Z`;
  return [
    band && svg("path", { class: "band behind", d: band }),
    svg("path", { class: band ? "line behind middle" : "line behind", d: path(inside.map((i) => middle[i]), (n) => x(steps[inside[n]]), y) }),
  ];
}

function ending(curve) {
  return `${curve.name} ends at ${format(curve.values.at(-1))}`;
}

/** A running mean that forgets by `share` a value; where it begins it is the mean so far. */
function smoothed(values, share) {
  if (!share) return values;
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    [sum, weight] = [share * sum + value, share * weight + 1];
    return sum / weight;
  });
}
