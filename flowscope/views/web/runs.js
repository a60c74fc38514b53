// The runs as one table, on top of the page: sorted by any column, filtered, grouped; a tick shows a run below.

import { SIGNS } from "./alerts.js";
import { el, searchBox, sortable } from "./dom.js";
import { format } from "./scale.js";

const ORDER = ["error", "warning", "info", "ok", "none"];
const last = (run) => run.loss.values.at(-1);
const worst = (run) => run.alerts.find((alert) => alert.resolved === null) ?? run.alerts[0];

/** Name, value to sort by, what stands there. */
const COLUMNS_OF_RUNS = [
  ["run", (run) => run.name, (run) => run.name],
  ["verdict", (run) => ORDER.indexOf(run.verdict.severity), (run) => `${SIGNS[run.verdict.severity]} ${run.verdict.severity}`],
  ["first alert", (run) => worst(run)?.kind, (run) => worst(run)?.kind ?? "–"],
  ["where", (run) => worst(run)?.where, (run) => worst(run)?.where || "–"],
  ["since", (run) => worst(run)?.step, (run) => worst(run)?.step ?? "–"],
  ["loss", (run) => (typeof last(run) === "number" ? last(run) : undefined), (run) => (typeof last(run) === "number" ? format(last(run)) : last(run) ?? "–")],
  ["last", (run) => run.last_step ?? undefined, (run) => run.last_step ?? "–"],
  ["own time", (run) => run.own ?? undefined, (run) => (run.own == null ? "–" : `${(100 * run.own).toFixed(1)} %`)],
];

const GROUPS = {
  none: () => "",
  verdict: (run) => run.verdict.severity,
  "first alert": (run) => worst(run)?.kind ?? "no alert",
  folder: (run) => (run.name.includes("/") ? run.name.slice(0, run.name.lastIndexOf("/")) : "/"),
};

/** `state` keeps filter, order and group from one drawing to the next; `toggle(names)` shows these runs. */
export class RunsTable {
  constructor(toggle) {
    this.toggle = toggle;
    this.order = { column: 0, down: false };
    this.search = searchBox("filter runs", () => this.draw());
    this.group = el("select", { "aria-label": "Group runs", onchange: () => this.draw() }, ...Object.keys(GROUPS).map((name) => el("option", { value: name }, name === "none" ? "no groups" : `by ${name}`)));
    this.body = el("tbody");
    this.rows = sortable(COLUMNS_OF_RUNS.map(([name]) => name), (i) => this.sort(i), this.body, el("th", {}, el("span", { class: "unseen" }, "shown")));
    const each = (shown) => this.toggle(shown ? this.found().map((run) => run.name) : []);
    this.element = el(
      "div",
      { class: "all-runs" },
      el("div", { class: "bar" }, this.search, this.group, el("button", { onclick: () => each(true) }, "show these"), el("button", { onclick: () => each(false) }, "show none")),
      this.rows.element,
    );
  }

  sort(column) {
    this.order = { column, down: this.order.column === column && !this.order.down };
    this.draw();
  }

  update(runs, chosen, colourOf) {
    Object.assign(this, { runs, chosen, colourOf });
    this.draw();
  }

  found() {
    const wanted = this.search.value.toLowerCase();
    return this.runs.filter((run) => `${run.name} ${run.verdict.text}`.toLowerCase().includes(wanted));
  }

  draw() {
    const [, value] = COLUMNS_OF_RUNS[this.order.column];
    const group = GROUPS[this.group.value];
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      const way = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
      return this.order.down ? -way : way;
    };
    const rows = this.found().toSorted((a, b) => group(a).localeCompare(group(b)) || compare(a, b));
    this.rows.marked(this.order.column, this.order.down);
    let named = "";
    this.body.replaceChildren(
      ...rows.slice(0, 500).flatMap((run) => {
        const head = group(run) !== named && el("tr", { class: "group" }, el("th", { colspan: COLUMNS_OF_RUNS.length + 1 }, group(run)));
        named = group(run);
        return [head, this.row(run)].filter(Boolean);
      }),
    );
  }

  row(run) {
    const shown = this.chosen.includes(run.name);
    const tick = el("input", { type: "checkbox", checked: shown, "aria-label": `show ${run.name}`, onchange: () => this.toggle(shown ? this.chosen.filter((name) => name !== run.name) : [...this.chosen, run.name]) });
    const cells = COLUMNS_OF_RUNS.map(([name, , text], i) => el("td", { class: name === "verdict" ? `sign ${run.verdict.severity}` : null, title: i === 0 ? run.name : null }, text(run)));
    return el("tr", { class: shown ? "shown" : null }, el("td", {}, tick, el("span", { class: "swatch", style: { background: this.colourOf(run.name) } })), ...cells);
  }
}
