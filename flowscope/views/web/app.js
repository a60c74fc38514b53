// The page: what is chosen (runs, flow, metric, scale, pinned steps) and what follows from it.

import { fromAddress, toAddress } from "./address.js";
import { differing, timeline, verdicts } from "./alerts.js";
import { setAxis } from "./axis.js";
import { Controls, VIEWS, opening } from "./controls.js";
import { el, emptyState, replace } from "./dom.js";
import { colourBar, heatMap } from "./heatmap.js";
import { lossFigure } from "./loss.js";
import { matrixFigures, stackFigures } from "./matrix.js";
import { heading, plain } from "./names.js";
import { parameterTable } from "./parameters.js";
import { dash, profileFigure } from "./profile.js";
import { RunsTable } from "./runs.js";
import { RUN_COLOURS, decode, makeScale } from "./scale.js";
import { nearest, within } from "./source.js";

const POLL_MS = 10_000;
const MOST_PINS = 4;
const MOST_CONNECTED = 150;
const FIGURES = { matrix: matrixFigures, stack: stackFigures };
const NO_MATRIX = "It comes with every tenth record (WatchConfig.slow_every); wrapped streams and flows of changing width have none.";

export class App {
  /** `source` answers overview, series and record (source.js). */
  constructor(root, source) {
    this.root = root;
    this.source = source;
    this.runs = [];
    this.chosen = { runs: [], flow: null, metric: null, scale: null, pins: ["first", "last"], row: null, alert: null, own: null, range: null, unit: "step", per: 1, smooth: 0 };
    Object.assign(this.chosen, fromAddress());
    this.loaded = new Map();
    this.colours = new Map();
    this.opened = new Set();
    this.drawing = 0;
    this.drawingDepth = 0;
    this.controls = new Controls(source.reloads, {
      change: (part) => this.choose(part),
      reload: () => this.refresh(),
    });
    this.table = new RunsTable((names) => this.choose({ runs: names }));
    this.parts = Object.fromEntries(["problem", "runs-table", "state", "alerts", "picture", "depth", "extra", "loss", "about"].map((name) => [name, el("section", { class: name })]));
    this.parts.problem.setAttribute("role", "status");
  }

  async start() {
    const { problem, ...sections } = this.parts;
    const main = el("main", {}, problem, ...Object.values(sections));
    this.root.replaceChildren(el("div", { class: "flowscope" }, this.controls.element, main));
    await this.refresh();
    if (this.source.reloads) setInterval(() => document.hidden || !this.controls.auto || this.refresh(), POLL_MS);
  }

  clear(...names) {
    for (const name of names) this.parts[name].replaceChildren();
  }

  /** Ask what there is; draw again where something shown has changed. */
  async refresh() {
    let overview;
    try {
      overview = await this.source.overview();
    } catch (error) {
      this.parts.problem.replaceChildren(emptyState("This could not be loaded.", error.message));
      return;
    }
    this.parts.problem.replaceChildren();
    if (overview.title) this.controls.title(overview.title);
    const stamp = JSON.stringify(overview.runs.map((run) => [run.name, run.stamp]));
    if (stamp === this.stamp) return;
    this.stamp = stamp;
    this.runs = overview.runs;
    if (!this.runs.length) {
      this.clear("alerts", "picture", "depth", "extra", "loss", "about");
      this.parts.state.replaceChildren(
        emptyState("No flowscope run in this log folder.", "Train with flowscope.watch(model, optimizer, log_dir=…) and start TensorBoard with --logdir on that folder. This page looks again by itself."),
      );
      return;
    }
    await this.choose({});
  }

  /** Take over a choice, fill in what it leaves open, and draw. */
  async choose(part) {
    const chosen = Object.assign(this.chosen, part);
    if (part.metric) chosen.scale = part.scale ?? null;
    chosen.runs = chosen.runs.filter((name) => this.runs.some((run) => run.name === name));
    if (!chosen.runs.length && !part.runs) chosen.runs = this.runs.slice(0, 2).map((run) => run.name);
    this.giveColours();
    const runs = this.shown();
    const flows = [...new Set(runs.flatMap((run) => run.flows.map((flow) => flow.name)))];
    if (!flows.includes(chosen.flow)) chosen.flow = flows[0] ?? null;
    const metrics = this.metrics(runs);
    if (!metrics.some((metric) => metric.metric === chosen.metric)) {
      const first = VIEWS.map(([view]) => opening(metrics, view)).find(Boolean);
      chosen.metric = first ?? metrics.find((metric) => metric.shape === "profile")?.metric ?? null;
      chosen.scale = null;
    }
    this.metric = metrics.find((metric) => metric.metric === chosen.metric) ?? null;
    this.controls.update({ runs: this.runs, flows, metrics, chosen, metric: this.metric, colourOf: (name) => this.colourOf(name) });
    setAxis(chosen.unit, chosen.per);
    toAddress(chosen);
    await this.draw();
  }

  shown() {
    return this.runs.filter((run) => this.chosen.runs.includes(run.name));
  }

  /** The colour of a chosen run; it keeps it as long as it is chosen, whatever else is. */
  colourOf(name) {
    return this.colours.get(name) ?? "transparent";
  }

  giveColours() {
    for (const name of this.colours.keys()) if (!this.chosen.runs.includes(name)) this.colours.delete(name);
    for (const name of this.chosen.runs) {
      const taken = [...this.colours.values()];
      const free = RUN_COLOURS.find((colour) => !taken.includes(colour)) ?? RUN_COLOURS[this.colours.size % RUN_COLOURS.length];
      if (!this.colours.has(name)) this.colours.set(name, free);
    }
  }

  /** The metrics that at least one of the runs has for the chosen flow. */
  metrics(runs) {
    const found = new Map();
    for (const run of runs) {
      for (const metric of run.metrics) {
        if (this.find(run, metric.metric) && !found.has(metric.metric)) found.set(metric.metric, metric);
      }
    }
    return [...found.values()];
  }

  /** The entry of a metric in a run: of the chosen flow, or of the run's only flow where it has no such flow. */
  find(run, name) {
    const flow = run.flows.length === 1 ? run.flows[0].name : this.chosen.flow;
    return run.metrics.find((metric) => metric.metric === name && (!metric.per_flow || metric.flow === flow));
  }

  /** A promise kept until the run has changed. */
  load(run, ask, ...query) {
    const name = JSON.stringify([run.name, ask, ...query]);
    const known = this.loaded.get(name);
    if (known?.stamp === run.stamp) return known.answer;
    const answer = this.source[ask](run.name, ...query);
    this.loaded.set(name, { stamp: run.stamp, answer });
    if (this.loaded.size > 200) this.loaded.delete(this.loaded.keys().next().value);
    return answer;
  }

  async draw() {
    const turn = (this.drawing += 1);
    const runs = this.shown();
    if (this.runs.length > 1) {
      if (!this.table.element.isConnected) this.parts["runs-table"].replaceChildren(el("h2", {}, "Runs"), this.table.element);
      this.table.update(this.runs, this.chosen.runs, (name) => this.colourOf(name));
    } else this.clear("runs-table");
    this.parts.state.replaceChildren(verdicts(runs, (name) => this.colourOf(name)), ...differing(runs));
    const loss = lossFigure(runs, (name) => this.colourOf(name), this.chosen.smooth);
    replace(this.parts.loss, ...(loss ? [el("h2", {}, "Loss"), this.smoothing(), loss] : []));
    const alerts = timeline(runs, this.chosen.alert, (run, alert) => this.land(run, alert));
    replace(this.parts.alerts, ...(runs.length ? [el("h2", {}, "Alerts"), alerts] : []));
    replace(this.parts.about, ...runs.map((run) => this.about(run)));
    if (!runs.length || !this.metric) {
      this.clear("picture", "depth", "extra");
      if (runs.length) replace(this.parts.picture, emptyState("There is nothing to draw yet.", "Records come with the first optimizer steps; without a record, see scope.summary()."));
      return;
    }
    const results = await Promise.all(runs.map((run) => this.read(run)));
    if (turn !== this.drawing) return;
    this.drawPicture(results);
    await this.drawDepth();
  }

  async read(run) {
    const entry = this.find(run, this.metric.metric);
    if (!entry) return { run, problem: emptyState(`${run.name} has no ${this.metric.metric}.`, this.whyMissing()) };
    try {
      return { run, entry, series: await this.load(run, "series", entry.key) };
    } catch (error) {
      return { run, problem: emptyState(`${run.name}: ${entry.key} cannot be shown.`, error.message) };
    }
  }

  /** Why a run has nothing of the chosen view, or of the chosen flow. */
  whyMissing() {
    const view = VIEWS.find(([name]) => name === this.metric.view);
    return view && ["Gates", "Mixing"].includes(view[0]) ? `There are ${view[1]}.` : `It has no such metric for flow ${this.chosen.flow}.`;
  }

  drawPicture(results) {
    this.drawn = results.filter((result) => result.series).map((result) => Object.assign(result, { series: within(result.series, this.chosen.range) }));
    const own = this.chosen.own ?? this.drawn.length > 2;
    const numbers = this.drawn.flatMap(({ series }) => series.values.flat().map(decode));
    const kind = this.chosen.scale ?? this.metric.scale;
    this.scale = makeScale(kind, this.metric, numbers);
    this.maps = [];
    const figures = results.map(({ run, entry, series, problem }) => {
      if (problem) return problem;
      const title = entry.per_flow && run.flows.length > 1 ? `${run.name} · ${entry.flow}` : run.name;
      const alerts = run.alerts.filter((alert) => alert.key === entry.key && alert.row !== null);
      // on a scale of its own no run is hidden by what another did
      const seen = own ? series.values.flat().map(decode) : numbers;
      const scale = own ? makeScale(kind, this.metric, seen) : this.scale;
      const bar = own && colourBar(scale, seen);
      const marked = run.alerts.map(({ step, severity, kind: what, where }) => ({ step, severity, words: `${what}${where ? ` at ${where}` : ""} since step ${step}` }));
      const onZoom = (from, to) => this.choose({ range: [from, to] });
      const map = heatMap({ title, series, scale, alerts, loss: run.loss, marked, bar, onPin: (step) => this.pin(step), onAlert: (alert) => this.land(run, alert), onZoom });
      this.maps.push({ run, ...map });
      return map.element;
    });
    replace(
      this.parts.picture,
      ...heading(this.metric),
      ...this.definition(),
      el("div", { class: "bar" }, ...this.choices(own)),
      own ? "" : colourBar(this.scale, numbers),
      el("div", { class: "heats" }, ...figures),
      el("p", { class: "hint" }, "Input on top, one column a record. Point at a cell to read it (arrow keys do the same); click or Enter adds its step to the profiles below; drag over steps to see them alone ([ and ] do the same). A dot is an alert; a line leads to the worst place of its step."),
    );
  }

  /** Scale of the colours, unit of the step axis, and the way back from a zoom. */
  choices(own) {
    const { unit, per, range } = this.chosen;
    const count = { epoch: "steps an epoch", tokens: "tokens a step" }[unit];
    return [
      this.drawn.length > 1 && el("label", {}, el("input", { type: "checkbox", checked: own, onchange: (event) => this.choose({ own: event.target.checked }) }), " own scale per run"),
      el("label", {}, "steps as ", el("select", { class: "unit", "aria-label": "Unit of the step axis", onchange: (event) => this.choose({ unit: event.target.value }) }, ...["step", "epoch", "tokens"].map((name) => el("option", { value: name, selected: name === unit }, name)))),
      count && el("label", {}, el("input", { type: "number", class: "per", min: 1, value: per, "aria-label": count, onchange: (event) => this.choose({ per: Number(event.target.value) }) }), ` ${count}`),
      range && el("button", { class: "unzoom", onclick: () => this.choose({ range: null }) }, `steps ${range[0]} to ${range[1]}: show all`),
    ].filter(Boolean);
  }

  smoothing() {
    const { smooth } = this.chosen;
    return el("label", { class: "hint" }, "smoothing ", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: smooth, "aria-label": "Smoothing of the loss", onchange: (event) => this.choose({ smooth: Number(event.target.value) }) }));
  }

  /** How the metric is computed, in which unit, and who says so. */
  definition() {
    const { formula, unit, source } = this.metric;
    const told = [formula, unit && `unit: ${unit}`, source].filter(Boolean).join("; ");
    return told ? [el("p", { class: "formula" }, told)] : [];
  }

  /** Add a step to the profiles, or take it out again. */
  pin(step) {
    const { pins } = this.chosen;
    this.chosen.pins = pins.includes(step) ? pins.filter((pin) => pin !== step) : [...pins, step].slice(-MOST_PINS);
    return this.drawDepth();
  }

  steps() {
    const all = this.drawn.flatMap(({ series }) => [series.steps[0], series.steps.at(-1)]);
    const named = { first: Math.min(...all), last: Math.max(...all) };
    return this.chosen.pins.map((pin) => ({ pin, step: named[pin] ?? pin }));
  }

  /** What is shown at the pinned steps: the profiles, and the matrices of the view. */
  async drawDepth() {
    if (!this.drawn.length) {
      this.clear("depth", "extra");
      return;
    }
    // a slower, older answer must not overwrite what was chosen since: a pin, or a whole new picture
    const turn = [this.drawing, (this.drawingDepth += 1)];
    const steps = this.steps();
    for (const map of this.maps) map.pins(steps.map(({ step }) => step));
    const lines = (await Promise.all(this.drawn.flatMap(({ run, entry }) => steps.map(({ step }, n) => this.line(run, entry, step, n))))).filter(Boolean);
    if (lines.length) lines.unshift(...this.behind(steps));
    const extra = await this.matrices(steps.at(-1)?.step);
    if (turn[0] !== this.drawing || turn[1] !== this.drawingDepth) return;
    const shades = lines.flatMap((line) => [...line.values, ...(line.band ?? []).flat()].map(decode));
    const scale = makeScale(this.scale.kind, this.metric, shades);
    replace(
      this.parts.depth,
      el("h2", {}, `${plain(this.metric.metric)} over ${this.axis()}`),
      el("div", { class: "pins" }, "Steps: ", ...steps.map((pinned) => this.chip(pinned))),
      lines.length
        ? lines.some(({ scattered }) => scattered)
          ? parameterTable({ name: this.metric.metric, lines, row: this.chosen.row })
          : profileFigure({ lines, scale, limits: this.limits(), row: this.chosen.row, name: this.metric.metric, title: [plain(this.metric.metric), this.metric.unit].filter(Boolean).join(", "), across: `${this.axis()}, input first` })
        : emptyState("No step is pinned.", "Click a column of the picture above."),
    );
    replace(this.parts.extra, ...extra);
  }

  /** What the rows are: depth, time in a recurrent flow, or parameters. */
  axis() {
    if (!this.metric.per_flow) return this.metric.view === "Parameters" ? "parameters" : "depth";
    const kinds = this.drawn.map(({ run, entry }) => run.flows.find((flow) => flow.name === entry.flow)?.kind);
    return kinds.every((kind) => kind === "time") ? "time" : "depth";
  }

  chip({ pin, step }) {
    const words = pin === step ? `${step}` : `${pin} (${step})`;
    const remove = () => {
      this.chosen.pins = this.chosen.pins.filter((other) => other !== pin);
      this.drawDepth();
    };
    return el("button", { class: "chip", onclick: remove, "aria-label": `take step ${words} out` }, words);
  }

  async line(run, entry, step, n) {
    const band = (entry.band ?? []).map((name) => this.find(run, name)).filter(Boolean);
    try {
      const [record, ...edges] = await Promise.all([entry, ...band].map(({ key }) => this.load(run, "record", key, step)));
      const fits = edges.length === 2 && edges.every((edge) => edge.step === record.step && edge.values.length === record.values.length);
      const scattered = !entry.per_flow && record.values.length > MOST_CONNECTED;
      return { run: run.name, colour: this.colourOf(run.name), dash: dash(n), scattered, ...record, band: fits ? edges.map((edge) => edge.values) : null };
    } catch {
      return null; // the heat map beside it has told why
    }
  }

  /** The references of the drawn runs at the kept steps nearest to the pinned ones, each once. */
  behind(steps) {
    const lines = this.drawn.filter(({ series }) => series.behind).flatMap(({ run, entry, series }) =>
      steps.map(({ step }, n) => {
        const at = nearest(series.behind.steps, step);
        const rows = series.behind.values.map((kept) => kept[at]);
        const band = rows.length === 3 ? [rows[0], rows[2]] : null;
        const scattered = !entry.per_flow && rows[0].length > MOST_CONNECTED;
        return { run: run.behind.name, behind: true, dash: dash(n), step: series.behind.steps[at], values: rows[rows.length >> 1], band, scattered };
      }),
    );
    return lines.filter((line, i) => lines.findIndex((other) => other.run === line.run && other.step === line.step) === i);
  }

  limits() {
    const config = Object.assign({}, ...this.drawn.map(({ run }) => run.config));
    const here = (name) => (name === "vanishing_product" && this.axis() === "time" ? "vanishing_time" : name);
    return (this.metric.limits ?? [])
      .map(here)
      .filter((name) => typeof config[name] === "number")
      .map((name) => ({ value: config[name], text: `alert limit ${config[name]}` }));
  }

  /** The matrices of the view: layer x layer cosine, mixing of streams, and whatever else has them. */
  async matrices(step) {
    if (step === undefined) return [];
    const entries = this.metrics(this.shown()).filter((metric) => metric.view === this.metric.view && metric.shape !== "profile");
    if (!entries.length && this.metric.view === "Depth") return [emptyState("There is no matrix of all pairs of depths.", NO_MATRIX)];
    return (await Promise.all(entries.map((entry) => this.matricesOf(entry, step)))).flat();
  }

  async matricesOf(entry, step) {
    const { metric, shape, bounds, scale, per_flow } = entry;
    const problems = [];
    const read = async (run) => {
      const own = this.find(run, metric);
      if (!own) return problems.push(emptyState(`${run.name} has no ${metric}.`, NO_MATRIX));
      try {
        return { run, record: await this.load(run, "record", own.key, step) };
      } catch (error) {
        return problems.push(emptyState(`${run.name}: ${metric} cannot be shown.`, error.message));
      }
    };
    const records = (await Promise.all(this.shown().map(read))).filter((found) => found?.record);
    return [...heading(entry), ...(records.length ? FIGURES[shape](records, bounds, { scale, per_flow }) : []), ...problems];
  }

  /** Go to the place and the step of an alert. */
  async land(run, alert) {
    const same = this.chosen.alert?.run === run.name && this.chosen.alert.alert === alert;
    const entry = run.metrics.find((metric) => metric.key === alert.key);
    const part = { alert: same ? null : { run: run.name, alert } };
    if (same || !entry) return this.choose(part);
    await this.choose({
      ...part,
      flow: entry.per_flow ? entry.flow : this.chosen.flow,
      metric: entry.metric,
      pins: ["first", alert.step, "last"],
      range: null,
      row: alert.row,
    });
    this.maps.find((map) => map.run.name === run.name)?.land(alert.row, alert.step, alert.extreme);
  }

  /** The configuration of a run; what was opened stays open when new records come. */
  about(run) {
    const table = (entries) =>
      el("table", {}, el("tbody", {}, ...Object.entries(entries).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, typeof value === "string" ? value : JSON.stringify(value))))));
    const flows = Object.fromEntries(run.flows.map((flow) => [flow.name, `${flow.kind}, ${flow.points} points`]));
    const note = (event) => (event.target.open ? this.opened.add(run.name) : this.opened.delete(run.name));
    return el(
      "details",
      { open: this.opened.has(run.name), ontoggle: note },
      el("summary", {}, `${run.name}: configuration and environment`),
      el("div", { class: "tables" }, ...[flows, run.environment, run.config].filter((entries) => Object.keys(entries).length).map(table)),
    );
  }
}
