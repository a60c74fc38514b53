"""`scope.summary()`: the state of a run in a few lines, from records and alerts alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowscope.detectors.coverage import Coverage
from flowscope.diagnosis import diagnosis
from flowscope.records import Alert, Record, RunHeader, few, metric_key, row_names
from flowscope.sinks.console import sparkline
from flowscope.terminal import block

NEVER_RAN = "never called (module.forward(x) instead of module(x), a fused path, or unused)"
NO_GRADIENT = "never got a gradient"


def summarize(
    header: RunHeader, records: Sequence[Record], alerts: Sequence[Alert], failed: Mapping[str, str], plan: Any
) -> str:
    """Return the summary: flows and their last profile, the diagnosis, parameters without gradient, blown fuses."""
    if not records:
        told = [f"  {line}" for line in diagnosis(alerts)] if alerts else []
        return block(
            ["flowscope: no record yet.", *str(plan).split("\n"), *told, *_switched_off(failed), _covered(header)]
        )
    last = records[-1]
    loss = "" if last.loss is None else f", loss {last.loss:.4g}"
    lines = [f"flowscope: {len(records)} records, last at step {last.step}{loss}"]
    for number, flow in enumerate(header.flows):
        key = metric_key("gradient_product", None if number == 0 else flow.name)
        seen = [r.metrics[key] for r in reversed(records) if key in r.metrics]
        # a net that is trained in every second step has no gradient in the others
        product = next((values for values in seen if np.isfinite(values).any()), seen[0] if seen else None)
        if product is not None and not _is_target(flow.name, records):
            points = row_names(flow.points, len(product))
            lines.append(f"  {flow.name} ({flow.kind}, {len(points)} points): {_profile(product, points)}")
    lines += [f"  {line}" for line in diagnosis(alerts)]
    for words, names in ((NEVER_RAN, _never_ran(header, records)), (NO_GRADIENT, _without_gradient(records))):
        lines += [f"  {words}: {few(names)}"] * bool(names)
    return block([*lines, *_switched_off(failed), *costs(header), _covered(header)])


def costs(header: RunHeader) -> list[str]:
    """One line on what flowscope itself costs; none where that is not known."""
    cost = header.cost
    if not {"share", "sample", "bare_step"} <= cost.keys():
        return []
    line = f"cost: {cost['share']:.2%} of a step of {_seconds(cost['bare_step'])}, {_seconds(cost['sample'])} a sample"
    if "interval" in cost:
        line += f"; after the first steps each {cost['interval']:.0f}th is sampled"
    if cost.get("budget", math.inf) < cost["share"]:
        line += f", and the budget of {cost['budget']:.2%} is missed: watch(budget=...) asks for another"
    return [f"  {line}."]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def _switched_off(failed: Mapping[str, str]) -> list[str]:
    return [f"  switched off: {fuse} ({reason})" for fuse, reason in failed.items()]


def _covered(header: RunHeader) -> str:
    return header.coverage or Coverage().line(header)


def _profile(product: np.ndarray[Any, Any], points: Sequence[str]) -> str:
    if not np.isfinite(product).any():
        return "no finite gradient seen"
    low = int(np.nanargmin(np.where(np.isfinite(product), product, np.nan)))
    return f"gradient product {sparkline(product)} least {product[low]:.3g} at {points[low]}"


def _never_ran(header: RunHeader, records: Sequence[Record]) -> list[str]:
    """Points whose module was never called: `module.forward(x)` and fused paths go past its hooks."""
    names: list[str] = []
    for number, flow in enumerate(header.flows):
        keys = [metric_key(m, None if number == 0 else flow.name) for m in ("forward_calls", "backward_calls")]
        calls = [r.metrics[key] for r in records for key in keys if {*keys} <= r.metrics.keys()]
        calls = [of_record for of_record in calls if of_record.shape == (len(flow.points),)]
        if calls and not _is_target(flow.name, records):
            names += [point for point, ran in zip(flow.points, np.any(calls, axis=0), strict=True) if not ran]
    return names


def _without_gradient(records: Sequence[Record]) -> list[str]:
    """Trainable parameters of the last record that has any: those without a gradient in all records that name them."""
    held = [record for record in records if {"param_grad_norm", "param_trainable"} <= record.metrics.keys()]
    if not held:
        return []
    arrived = {name for record in held for name in _named(record, "param_grad_norm", lambda norm: not np.isnan(norm))}
    asked = _named(held[-1], "param_trainable", lambda trainable: trainable == 1)
    optimized = _optimized(records)
    return [name for name in asked if name not in arrived and (optimized is None or name in optimized)]


def _is_target(flow: str, records: Sequence[Record]) -> bool:
    """Whether no optimizer holds a parameter of a flow while it holds others: a target network, an average."""
    optimized = _optimized(records)
    return bool(optimized) and not any(name.startswith(f"{flow}.") for name in optimized or ()) and flow != "network"


def _optimized(records: Sequence[Record]) -> set[str] | None:
    """The parameters that an optimizer holds, None where that is not known."""
    last = next((record for record in reversed(records) if "param_optimized" in record.metrics), None)
    return None if last is None else {*_named(last, "param_optimized", lambda held: held == 1)}


def _named(record: Record, metric: str, wanted: Callable[[float], bool]) -> list[str]:
    """The parameters whose number is one of the wanted; files of old name the rows of one metric only."""
    labelled = (record.labels(key) for key in (metric, "param_grad_norm") if key in record.metrics)
    names = next(filter(None, labelled), ())
    return [name for name, value in zip(names, record[metric], strict=False) if wanted(value)]
