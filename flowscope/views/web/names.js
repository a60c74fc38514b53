// What a metric is called where it is read. Files, addresses and Python keep its name.

import { el } from "./dom.js";

/** Its name in a sentence. */
export function plain(name) {
  return name.replaceAll("_", " ");
}

/** What it says as a heading with its name, and what else there is to say below. */
export function heading({ metric, words }) {
  const [first, ...others] = (words || plain(metric)).split(/(?<=\.) (?=[A-Z0-9])/);
  return [el("h2", {}, first.replace(/\.$/, ""), " ", el("code", {}, metric)), others.length ? el("p", { class: "words" }, others.join(" ")) : ""];
}
