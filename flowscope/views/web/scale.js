// From numbers to colours and positions. Colours: viridis, readable with every kind of colour blindness and in grey.

const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"].map((hex) => [
  parseInt(hex.slice(0, 2), 16),
  parseInt(hex.slice(2, 4), 16),
  parseInt(hex.slice(4, 6), 16),
]);
const NOT_SEEN = [150, 150, 150];
const INFINITE = [213, 94, 0];

export const SCALES = { log: "logarithmic", linear: "linear", rest: "1 − value, logarithmic" };

/** A number of the JSON: null is "not seen" (NaN), "inf" and "-inf" are infinities. */
export function decode(value) {
  if (value === null) return NaN;
  if (value === "inf") return Infinity;
  return value === "-inf" ? -Infinity : value;
}

/** Four significant digits, without trailing zeros. */
export function format(value) {
  if (Number.isNaN(value)) return "not seen or NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "−inf";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(size > 0.99 && size < 1 ? 7 : 4)));
}

const FORWARD = {
  log: (value) => (value > 0 ? Math.log10(value) : value <= 0 ? -Infinity : NaN),
  linear: (value) => value,
  rest: (value) => (value < 1 ? -Math.log10(1 - value) : value >= 1 ? Infinity : NaN),
};

function domain(kind, { bounds, fitted }, seen) {
  if (!seen.length) return kind === "log" ? [-3, 0] : [0, 1];
  const sorted = Float64Array.from(seen).sort();
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  // single spikes must not wash out everything else; their numbers are still told on hover
  const [low, high] = sorted.length > 200 ? [at(0.003), at(0.997)] : [at(0), at(1)];
  if (kind !== "linear") {
    // at least two decades, so that noise does not look like a slope
    const top = Math.ceil(high - 1e-9);
    return [Math.min(Math.floor(low + 1e-9), top - 2), top];
  }
  if (bounds && fitted) {
    // at least a tenth of what is possible, so that noise does not look like a pattern
    const least = (bounds[1] - bounds[0]) / 10;
    const start = Math.max(bounds[0], Math.min(low, (low + high - least) / 2, bounds[1] - least));
    return [start, Math.min(bounds[1], Math.max(high, start + least))];
  }
  if (bounds) return [low < bounds[0] ? -1 : bounds[0], bounds[1]];
  const floor = Math.min(0, low);
  return [floor, high > floor ? high : floor + 1];
}

/**
 * A scale over all the numbers it is given, so that runs beside each other share their colours; `bounds` is what
 * the numbers lie between by definition, or null; `fitted` says to use only as much of it as the numbers do.
 * `position(value)` is 0 to 1, or NaN (not seen) or infinite; `ticks` are `{position, text}`.
 */
export function makeScale(kind, { bounds = null, fitted = false }, numbers) {
  const forward = FORWARD[kind];
  const seen = [];
  for (const value of numbers) {
    const at = forward(value);
    if (Number.isFinite(at)) seen.push(at);
  }
  let [low, high] = domain(kind, { bounds, fitted }, seen);
  const marks = ticks(kind, low, high);
  // what the logarithm sends to infinity gets an edge of its own, or 0 would be read as the lowest mark
  const room = 0.1 * (high - low);
  const [zeros, ones] = [kind === "log" && numbers.some((value) => value <= 0), kind === "rest" && numbers.some((value) => value >= 1)];
  if (zeros) low -= room;
  if (ones) high += room;
  const place = (at) => (at - low) / (high - low);
  return {
    kind,
    position: (value) => {
      const at = forward(value);
      return Number.isFinite(at) ? Math.min(1, Math.max(0, place(at))) : Number.isFinite(value) ? (at > 0 ? 1 : 0) : at;
    },
    inside: (value) => forward(value) >= low && forward(value) <= high,
    ticks: [
      ...(zeros ? [{ position: 0, text: "0" }] : []),
      ...marks.map((at) => ({ position: place(at), text: tickText(kind, at) })),
      ...(ones ? [{ position: 1, text: "1" }] : []),
    ],
  };
}

function ticks(kind, low, high) {
  const wanted = kind === "linear" ? niceStep((high - low) / 6) : Math.ceil((high - low) / 6);
  const found = [];
  for (let at = Math.ceil(low / wanted - 1e-9) * wanted; at <= high + 1e-9; at += wanted) found.push(at);
  return found;
}

function niceStep(rough) {
  const decade = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((factor) => factor * decade >= rough * 0.999) * decade;
}

function tickText(kind, at) {
  if (kind === "linear") return format(Number(at.toPrecision(10)));
  if (kind === "rest") return at === 0 ? "0" : `1 − ${format(10 ** -at)}`;
  return Math.abs(at) < 3.5 ? format(Number((10 ** at).toPrecision(3))) : `1e${Math.round(at)}`;
}

/** [red, green, blue] of a position. */
export function colour(position) {
  if (Number.isNaN(position)) return NOT_SEEN;
  if (!Number.isFinite(position)) return INFINITE;
  const at = position * (VIRIDIS.length - 1);
  const below = Math.min(VIRIDIS.length - 2, Math.floor(at));
  return VIRIDIS[below].map((channel, i) => Math.round(channel + (at - below) * (VIRIDIS[below + 1][i] - channel)));
}

/** A canvas with one pixel per number of `rows` (CSS stretches it). */
export function paint(rows, scale) {
  const canvas = document.createElement("canvas");
  canvas.height = rows.length;
  canvas.width = rows[0].length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  let at = 0;
  for (const row of rows) {
    for (const value of row) {
      image.data.set(colour(scale.position(value)), at);
      image.data[at + 3] = 255;
      at += 4;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const OKABE_ITO = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"];

/** Colours of runs, no two alike: those of Okabe and Ito (without yellow and black) first, then hues far from the last. */
export const RUN_COLOURS = [
  ...OKABE_ITO,
  ...Array.from({ length: 90 }, (_, n) => `hsl(${Math.round((n * 137.508 + 75) % 360)} ${[62, 85, 45][n % 3]}% ${[42, 55, 66][Math.floor(n / 3) % 3]}%)`),
];
