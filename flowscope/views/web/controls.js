// The choices: runs, flow, view, metric, scale.

import { copyAddress } from "./address.js";
import { SIGNS } from "./alerts.js";
import { el, searchBox } from "./dom.js";
import { plain } from "./names.js";
import { SCALES } from "./scale.js";

const MANY_RUNS = 8;
/** The views, and why a run may have none of one. */
export const VIEWS = [
  ["Gradient", "no flow with gradients was recorded"],
  ["Depth", "the family depth is switched off: WatchConfig.metrics"],
  ["Gates", "no gated connections: flowscope.wrap(model) adds them, watch(gates=…) finds yours"],
  ["Mixing", "no streams: flowscope.wrap(model, mode=\"dhc\") adds them"],
  ["Routing", "no mixture of experts and no iterative layer (neural ODE, equilibrium)"],
  ["Parameters", "the family parameters is switched off: WatchConfig.metrics"],
  ["Finiteness", "no flow was recorded"],
];

/** The metric that a view starts with: the one that says so, else its first. */
export function opening(metrics, view) {
  const found = metrics.filter((one) => one.view === view && one.shape === "profile");
  return (found.find((one) => one.opens) ?? found[0])?.metric;
}

/** The known views and, behind them, those that only the metrics know. */
function allViews(metrics) {
  return [...new Set([...VIEWS.map(([view]) => view), ...metrics.map((one) => one.view).filter((view) => view !== "Other"), "Other"])];
}

export class Controls {
  /** `events.change(part)` takes what was chosen, `events.reload()` asks for news. */
  constructor(reloads, events) {
    this.events = events;
    this.auto = true;
    this.heading = el("h1", {}, "Flow");
    this.runs = el("div", { class: "runs", role: "group", "aria-label": "Runs" });
    this.runFilter = searchBox("find a run", () => this.drawRuns());
    this.flow = el("select", { id: "flow", onchange: () => events.change({ flow: this.flow.value, row: null }) });
    this.views = el("div", { class: "views", role: "group", "aria-label": "Views" });
    this.why = el("p", { class: "why", role: "status", hidden: true });
    this.search = searchBox("find a metric", () => this.drawMetrics());
    this.metric = el("select", { id: "metric", size: 14, "aria-label": "Metric", onchange: () => events.change({ metric: this.metric.value, row: null }) });
    this.scale = el(
      "select",
      { id: "scale", onchange: () => events.change({ scale: this.scale.value }) },
      ...Object.entries(SCALES).map(([value, words]) => el("option", { value }, words)),
    );
    const auto = el("input", { type: "checkbox", checked: true, onchange: (event) => (this.auto = event.target.checked) });
    this.element = el(
      "aside",
      {},
      this.heading,
      el("h2", {}, "Runs"),
      this.runFilter,
      this.runs,
      el("label", { for: "flow" }, "Flow"),
      this.flow,
      el("h2", {}, "View"),
      this.views,
      this.why,
      el("label", { for: "metric" }, "Metric"),
      this.search,
      this.metric,
      el("label", { for: "scale" }, "Scale"),
      this.scale,
      el("button", { class: "copy", title: "key: c", onclick: copyAddress }, "Copy link to this view"),
      reloads && el("div", { class: "reload" }, el("label", {}, auto, " reload by itself"), el("button", { onclick: () => events.reload() }, "Reload")),
    );
    document.addEventListener("keydown", (event) => {
      const meant = event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select");
      if (event.key === "c" && !meant) copyAddress();
    });
  }

  title(words) {
    this.heading.textContent = words;
  }

  update(state) {
    this.state = state;
    this.drawRuns();
    replaceOptions(this.flow, state.flows.map((name) => el("option", { value: name }, name)), state.chosen.flow);
    this.drawViews();
    this.drawMetrics();
    this.scale.querySelector('[value="rest"]').disabled = !state.metric?.bounds;
    this.scale.value = state.chosen.scale ?? state.metric?.scale ?? "linear";
  }

  drawRuns() {
    const { runs, chosen, colourOf } = this.state;
    this.runFilter.hidden = runs.length <= MANY_RUNS;
    const wanted = this.runFilter.value.toLowerCase();
    const held = document.activeElement?.closest?.(".runs label")?.title;
    const row = (run) => {
      const toggle = (event) => {
        const others = chosen.runs.filter((name) => name !== run.name);
        this.events.change({ runs: event.target.checked ? [...others, run.name] : others });
      };
      return el(
        "label",
        { title: run.name },
        el("input", { type: "checkbox", checked: chosen.runs.includes(run.name), onchange: toggle }),
        el("span", { class: "swatch", style: { background: colourOf(run.name) } }),
        el("span", { class: "run-name" }, run.name),
        el("span", { class: `sign ${run.verdict.severity}`, title: run.verdict.text, role: "img", "aria-label": run.verdict.text }, SIGNS[run.verdict.severity]),
      );
    };
    this.runs.replaceChildren(...runs.filter((run) => run.name.toLowerCase().includes(wanted)).slice(0, 200).map(row));
    if (held) [...this.runs.children].find((label) => label.title === held)?.querySelector("input").focus();
  }

  drawViews() {
    const { metrics, metric } = this.state;
    const held = this.views.contains(document.activeElement) && document.activeElement.textContent;
    this.why.hidden = true;
    const explain = (words) => {
      this.why.textContent = words;
      this.why.hidden = false;
    };
    const button = (view) => {
      const target = opening(metrics, view);
      const missing = VIEWS.find(([name]) => name === view)?.[1];
      return el(
        "button",
        {
          // not `disabled`: the keyboard must reach it, or the reason stays hidden
          "aria-disabled": target ? null : "true",
          title: target ? null : `${view}: ${missing}`,
          "aria-pressed": metric?.view === view ? "true" : "false",
          onclick: () => (target ? this.events.change({ metric: target, row: null }) : explain(`${view}: ${missing}.`)),
        },
        view,
      );
    };
    this.views.replaceChildren(...allViews(metrics).slice(0, -1).map(button));
    if (held) [...this.views.children].find((one) => one.textContent === held)?.focus();
  }

  drawMetrics() {
    const { metrics, chosen } = this.state;
    const wanted = this.search.value.toLowerCase().replaceAll(" ", "_");
    const found = metrics.filter((metric) => metric.shape === "profile" && metric.metric.includes(wanted));
    const groups = allViews(metrics).filter((view) => found.some((metric) => metric.view === view));
    const option = (metric) => el("option", { value: metric.metric, title: `${metric.metric}: ${metric.words}` }, plain(metric.metric));
    const options = groups.map((view) => el("optgroup", { label: view }, ...found.filter((metric) => metric.view === view).map(option)));
    replaceOptions(this.metric, options.length ? options : [el("option", { disabled: true }, metrics.length ? "no metric has this name" : "choose a run first")], chosen.metric);
  }
}

function replaceOptions(select, options, value) {
  select.replaceChildren(...options);
  select.value = value;
}
