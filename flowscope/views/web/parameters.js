// One metric of many parameters: a table sorted by any column in place of a cloud of dots. The map above shows them all.

import { el, searchBox, sortable } from "./dom.js";
import { downloads } from "./download.js";
import { decode, format } from "./scale.js";
import { rowName } from "./source.js";

const MOST = 300;

/** `lines` as for the profile, one a run and step. */
export function parameterTable({ name, lines, row }) {
  const first = lines.find((line) => line.rows);
  const columns = lines.map((line) => ({ title: `${line.run}, step ${line.step}`, values: line.values.map(decode) }));
  const rows = first.rows.map((group, i) => ({ name: rowName(group), group, values: columns.map(({ values }) => values[i] ?? NaN) }));
  const titles = ["parameter", ...columns.map(({ title }) => title)];
  const search = searchBox("filter parameters", () => draw());
  const body = el("tbody");
  const sorting = sortable(titles, (i) => sort(i - 1), body);
  const more = el("p", { class: "hint" });
  const order = { column: -1, down: true };

  function sort(column) {
    Object.assign(order, { down: order.column === column ? !order.down : true, column });
    draw();
  }

  function sorted() {
    const wanted = search.value.toLowerCase();
    const found = rows.filter((one) => one.name.toLowerCase().includes(wanted));
    if (order.column < 0) return order.down ? found : found.toReversed();
    const key = (one) => (Number.isNaN(one.values[order.column]) ? -Infinity : one.values[order.column]);
    return found.toSorted((a, b) => (order.down ? 1 : -1) * (key(b) - key(a) || 0));
  }

  function draw() {
    const found = sorted();
    sorting.marked(order.column + 1, order.down);
    const here = ([, , start, count]) => row !== null && row >= start && row < start + count;
    body.replaceChildren(...found.slice(0, MOST).map((one) => el("tr", { class: here(one.group) ? "shown" : null }, el("th", { scope: "row" }, one.name), ...one.values.map((value) => el("td", { class: "value" }, format(value))))));
    more.textContent = found.length > MOST ? `${MOST} of ${found.length}; sort or filter for the others.` : "";
  }

  draw();
  const table = () => [titles, ...sorted().map((one) => [one.name, ...one.values])];
  return el("div", { class: "parameters" }, el("div", { class: "bar" }, search, downloads(name, { table })), sorting.element, more);
}
