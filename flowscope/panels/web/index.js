// The tab: TensorBoard imports this file and calls render().

import { App } from "./app.js";
import { ServerSource } from "./source.js";

export async function render() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("style.css", import.meta.url);
  document.head.append(style);
  document.title = "Flow";
  await new App(document.body, new ServerSource()).start();
}
