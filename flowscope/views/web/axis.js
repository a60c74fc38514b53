// What the numbers of the step axis say: steps, or epochs or tokens where it is told how many go to a step.

const axis = { unit: "step", per: 1 };

/** Choose the unit; `per` is steps an epoch or tokens a step. */
export function setAxis(unit, per) {
  axis.unit = unit;
  axis.per = per > 0 ? per : 1;
}

/** A step on the axis. */
export function stepText(step) {
  if (axis.unit === "epoch") return String(Number((step / axis.per).toPrecision(4)));
  if (axis.unit !== "tokens") return String(step);
  const tokens = step * axis.per;
  const size = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([least]) => tokens >= least);
  return size ? `${Number((tokens / size[0]).toPrecision(3))}${size[1]}` : String(tokens);
}

/** Its name. */
export function axisTitle() {
  return axis.unit;
}
