// The report: everything it shows stands in the page.

import { App } from "./app.js";
import { EmbeddedSource } from "./source.js";

const embedded = JSON.parse(document.getElementById("flowscope-data").textContent);
await new App(document.body, new EmbeddedSource(embedded)).start();
