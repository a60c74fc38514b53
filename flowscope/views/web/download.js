// Ways out of the page: a table as CSV, a figure as SVG or PNG. Nothing is sent anywhere.

import { el } from "./dom.js";

function save(name, blob) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name.replaceAll(/[^\w.@-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const quoted = (cell) => (/[",\n]/.test(String(cell)) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell ?? ""));

/** Buttons that save what a figure shows; `table()` gives lines of cells, `figure()` an SVG or a canvas with its words. */
export function downloads(name, { table, svg, png }) {
  const button = (kind, act) => el("button", { onclick: act, "aria-label": `save ${name} as ${kind}` }, kind);
  return el(
    "span",
    { class: "downloads" },
    png && button("PNG", () => png().toBlob((blob) => save(`${name}.png`, blob))),
    svg && button("SVG", () => save(`${name}.svg`, new Blob([standalone(svg())], { type: "image/svg+xml" }))),
    table && button("CSV", () => save(`${name}.csv`, new Blob([table().map((line) => line.map(quoted).join(",")).join("\n") + "\n"], { type: "text/csv" }))),
  );
}

/** The SVG with the looks that the page gives it, so that it stands alone. */
function standalone(picture) {
  const copy = picture.cloneNode(true);
  const [before, after] = [picture, copy].map((root) => [root, ...root.querySelectorAll("*")]);
  before.forEach((node, i) => {
    const look = getComputedStyle(node);
    for (const name of ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "font-size", "font-family", "visibility"]) {
      after[i].style.setProperty(name, look.getPropertyValue(name));
    }
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.style.background = getComputedStyle(document.body).backgroundColor;
  return new XMLSerializer().serializeToString(copy);
}

/** A map as a picture with its title and the ends of its axes. */
export function pictureOf({ title, canvas, rows, steps }) {
  const [left, top, width, height] = [230, 34, 900, 420];
  const out = el("canvas", { width: left + width + 20, height: top + height + 40 });
  const context = out.getContext("2d");
  const ink = getComputedStyle(document.body);
  context.fillStyle = ink.backgroundColor;
  context.fillRect(0, 0, out.width, out.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, left, top, width, height);
  context.fillStyle = ink.color;
  context.font = "14px sans-serif";
  context.fillText(title, left, 22);
  context.textAlign = "right";
  context.fillText(rows[0][0], left - 8, top + 12);
  context.fillText(rows.at(-1)[1], left - 8, top + height);
  context.fillText(`step ${steps.at(-1)}`, left + width, top + height + 22);
  context.textAlign = "left";
  context.fillText(`step ${steps[0]}`, left, top + height + 22);
  return out;
}
