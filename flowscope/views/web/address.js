// What is chosen stands in the address: a link, or a page that is loaded again, shows what was looked at.

/** What of a choice is kept. */
const KEPT = ["runs", "flow", "metric", "scale", "pins", "own", "range", "unit", "per", "smooth"];

/** The choice that the address holds; empty where it holds none. */
export function fromAddress() {
  try {
    const held = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}");
    return Object.fromEntries(KEPT.filter((name) => name in held).map((name) => [name, held[name]]));
  } catch {
    return {};
  }
}

/** Copy the address; where the browser lets no page write to the clipboard, it is shown, to be copied by hand. */
export async function copyAddress() {
  try {
    await navigator.clipboard.writeText(location.href);
  } catch {
    prompt("The link to this view:", location.href);
  }
}

/** Keep this one there. */
export function toAddress(chosen) {
  // the whole address: TensorBoard's page has a base of another one
  const held = JSON.stringify(Object.fromEntries(KEPT.map((name) => [name, chosen[name]])));
  location.replace(`${location.href.split("#")[0]}#${encodeURIComponent(held)}`);
}
