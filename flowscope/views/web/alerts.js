// What is wrong: the verdict on each run, and the alerts over the steps, from raised to resolved.

import { el, emptyState } from "./dom.js";

/** One sign a severity: colour alone is lost on many. */
export const SIGNS = { error: "✖", warning: "▲", info: "●", ok: "✔", none: "–" };

const MOST_CARDS = 3;

/** The state of each run in a few words. */
export function verdicts(runs, colourOf) {
  if (!runs.length) return emptyState("No run is chosen.", "Tick one on the left.");
  if (runs.length > MOST_CARDS) return el("p", { class: "quiet" }, `${runs.length} runs are shown; the table says how each went.`);
  const card = (run) =>
    el(
      "article",
      { class: `verdict ${run.verdict.severity}` },
      el(
        "h3",
        {},
        el("span", { class: "swatch", style: { background: colourOf(run.name) } }),
        run.name,
        run.last_step !== null && el("small", {}, `step ${run.last_step}`),
      ),
      el("p", { class: "state" }, el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[run.verdict.severity]), ` ${run.verdict.sentence ?? run.verdict.text}`),
      run.verdict.advice && el("p", {}, el("b", {}, "What to do: "), run.verdict.advice),
      el(
        "details",
        {},
        el("summary", {}, run.verdict.sentence ? run.verdict.text : "what was seen"),
        run.verdict.story && el("p", { class: "story" }, run.verdict.story),
        run.verdict.message && el("p", { class: "message" }, run.verdict.message),
        run.facts.map((fact) => el("p", { class: "fact" }, fact)),
      ),
      run.notices.length > 0 && el("ul", { class: "notices" }, ...run.notices.map((notice) => el("li", {}, notice))),
    );
  return el("div", { class: "verdicts" }, ...runs.map(card));
}

/** What the runs were set up with otherwise than the first of them; nothing where there is one run. */
export function differing(runs) {
  const told = runs.filter((run) => run.differs?.length > 0);
  if (!told.length) return [];
  const lines = (run) => [el("p", {}, el("b", {}, run.name)), el("ul", {}, ...run.differs.map((line) => el("li", {}, line)))];
  return [el("details", { class: "differs" }, el("summary", {}, "What is set up differently"), ...told.flatMap(lines))];
}

/** One line an alert; a click calls `onAlert(run, alert)`. */
export function timeline(runs, chosen, onAlert) {
  const rows = runs.flatMap((run) => run.alerts.map((alert) => ({ run, alert })));
  if (!rows.length) return el("p", { class: "quiet" }, "No alert was raised.");
  const end = Math.max(1, ...runs.map((run) => run.last_step ?? 0), ...rows.map(({ alert }) => alert.resolved ?? alert.step));
  const line = ({ run, alert }) => {
    const until = alert.resolved ?? Math.max(run.last_step ?? alert.step, alert.step);
    const share = (step) => `${((100 * step) / end).toFixed(2)}%`;
    const isChosen = chosen?.run === run.name && chosen.alert.kind === alert.kind && chosen.alert.step === alert.step;
    return el(
      "li",
      { class: `alert ${alert.severity}${isChosen ? " chosen" : ""}` },
      el(
        "button",
        { onclick: () => onAlert(run, alert), "aria-expanded": isChosen ? "true" : "false" },
        el(
          "span",
          { class: "name" },
          el("span", { class: "sign", "aria-hidden": "true" }, SIGNS[alert.severity] ?? "●"),
          el("b", {}, ` ${alert.kind}`),
          alert.where ? ` at ${alert.where}` : "",
          runs.length > 1 && el("small", {}, ` ${run.name}`),
        ),
        el(
          "span",
          { class: "track" },
          el("span", { class: "span", style: { left: `min(${share(alert.step)}, 100% - 5px)`, width: `calc(${share(until - alert.step)} + 5px)` } }),
        ),
        el("span", { class: "when" }, alert.resolved === null ? `since step ${alert.step}` : `steps ${alert.step} to ${alert.resolved}`),
      ),
      isChosen &&
        el(
          "div",
          { class: "detail" },
          el("p", { class: "message" }, alert.message),
          el("p", {}, el("b", {}, "What to do: "), alert.advice),
          alert.raised !== alert.step && el("p", { class: "quiet" }, `It held from step ${alert.step} on and was told at step ${alert.raised}.`),
          where(alert),
        ),
    );
  };
  return el("ol", { class: "timeline" }, ...rows.slice(0, 200).map(line), rows.length > 200 && el("li", {}, `and ${rows.length - 200} more`));
}

function where(alert) {
  return alert.key === null && el("p", { class: "quiet" }, "The records of this run have no metric that shows this alert.");
}
