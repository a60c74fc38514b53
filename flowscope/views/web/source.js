// Where the numbers come from. Both sources answer the same three questions: overview, series, record.

/** The tab: asks the plugin's routes, which stand beside this script. */
export class ServerSource {
  reloads = true;

  async ask(route, query = {}) {
    const url = new URL(route, import.meta.url);
    url.search = new URLSearchParams(query).toString();
    let answer;
    try {
      answer = await fetch(url);
    } catch {
      throw new Error("TensorBoard does not answer. Is it still running? This page goes on asking.");
    }
    const payload = await answer.json().catch(() => ({ error: `TensorBoard answered ${answer.status}.` }));
    if (payload.error) throw new Error(payload.error);
    return payload;
  }

  overview() {
    return this.ask("overview");
  }

  series(run, key) {
    return this.ask("series", { run, key });
  }

  record(run, key, step) {
    return this.ask("record", { run, key, step });
  }
}

/** The report: everything is in the page. */
export class EmbeddedSource {
  reloads = false;

  constructor(data) {
    this.data = data;
  }

  async overview() {
    return this.data;
  }

  find(run, key) {
    const found = this.data.series[run]?.[key];
    if (!found) throw new Error(`run "${run}" has no metric "${key}"`);
    return found;
  }

  async series(run, key) {
    return this.find(run, key);
  }

  async record(run, key, step) {
    const found = this.find(run, key);
    if (found.records instanceof Array) {
      return found.records.reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a));
    }
    const at = nearest(found.steps, step);
    return { key, step: found.steps[at], rows: found.rows, values: found.values.map((row) => row[at]) };
  }
}

/** The index of the step nearest to `step`. */
export function nearest(steps, step) {
  let best = 0;
  steps.forEach((candidate, i) => {
    if (Math.abs(candidate - step) < Math.abs(steps[best] - step)) best = i;
  });
  return best;
}

/** The index of the group of rows that holds row `index` of the whole depth. */
export function rowOf(rows, index) {
  return rows.findIndex(([, , start, count]) => index >= start && index < start + count);
}

/** The name of a group of rows. */
export function rowName([first, last, , count]) {
  return count > 1 ? `${first} … ${last}` : first;
}

/** The columns of a map that lie within a range of steps; all of them where it is null or none does. */
export function within(series, range) {
  if (!range) return series;
  const kept = series.steps.map((step, i) => i).filter((i) => series.steps[i] >= range[0] && series.steps[i] <= range[1]);
  if (!kept.length) return series;
  return { ...series, steps: kept.map((i) => series.steps[i]), values: series.values.map((row) => kept.map((i) => row[i])) };
}
