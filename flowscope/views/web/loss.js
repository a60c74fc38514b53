// The loss of the chosen runs over steps, on top of each other: a flat one beside a falling one needs no words.

import { el, svg } from "./dom.js";
import { LEFT, RIGHT, WIDTH, gridLine, path } from "./profile.js";
import { decode, format, makeScale } from "./scale.js";
import { nearest } from "./source.js";

const [TALL, TOP_EDGE, FOOT] = [150, 10, 22];

/** The figure, or null where no run has a loss. */
export function lossFigure(runs, colourOf) {
  const curves = runs
    .map((run) => ({ name: run.name, steps: run.loss.steps, values: run.loss.values.map(decode) }))
    .filter((curve) => curve.values.some(Number.isFinite));
  if (!curves.length) return null;
  const seen = curves.flatMap((curve) => curve.values).filter(Number.isFinite);
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
    svg("text", { x: x(share * end), y: TALL - 5, "text-anchor": anchor }, `${share === 0 ? "step " : ""}${Math.round(share * end)}`);
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${TALL}`, tabindex: 0, role: "img", "aria-label": `Loss: ${curves.map(ending).join("; ")}` },
    scale.ticks.map((tick) => gridLine(TOP_EDGE + (1 - tick.position) * (TALL - TOP_EDGE - FOOT), tick.text)),
    stepLabel(0, "start"),
    stepLabel(0.5, "middle"),
    stepLabel(1, "end"),
    curves.map(line),
  );
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    const words = curves.map((curve) => {
      const at = nearest(curve.steps, Math.min(1, Math.max(0, share)) * end);
      return el("span", {}, `${curve.name}, step ${curve.steps[at]}: `, el("span", { class: "value" }, format(curve.values[at])));
    });
    readout.replaceChildren(...words);
    readout.style.left = `${(100 * (event.clientX - box.left)) / box.width}%`;
    readout.style.transform = share > 0.6 ? "translateX(calc(-100% - 12px))" : "translateX(12px)";
    readout.hidden = false;
  });
  picture.addEventListener("pointerleave", () => (readout.hidden = true));
  return el("figure", { class: "profile loss" }, el("div", { class: "plot" }, picture, readout));
}

function ending(curve) {
  return `${curve.name} ends at ${format(curve.values.at(-1))}`;
}
