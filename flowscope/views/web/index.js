// The tab: TensorBoard imports this file and calls render().

import { App } from "./app.js";
import { ServerSource } from "./source.js";

/** Light or dark as TensorBoard is, whose setting may differ from the system's. */
function followTheme() {
  const outside = window.parent.document.body;
  const follow = () => (document.documentElement.dataset.theme = outside.classList.contains("dark-mode") ? "dark" : "light");
  if (window.parent === window) return;
  new MutationObserver(follow).observe(outside, { attributes: true, attributeFilter: ["class"] });
  follow();
}

export async function render() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("style.css", import.meta.url);
  document.head.append(style);
  document.title = "Flow";
  try {
    followTheme();
  } catch {
    // in a page of another origin the system's setting holds
  }
  await new App(document.body, new ServerSource()).start();
}
