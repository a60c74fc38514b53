"""`scope.summary()`: the state of a run in a few lines, from records and alerts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowscope.detectors.coverage import Coverage
from flowscope.diagnosis import diagnose
from flowscope.records import Alert, Record, RunHeader, few, metric_key
from flowscope.sinks.console import sparkline

NEVER_RAN = "never called (module.forward(x) instead of module(x), a fused path, or unused)"
NO_GRADIENT = "never got a gradient"


def summarize(
    header: RunHeader, records: Sequence[Record], alerts: Sequence[Alert], failed: Mapping[str, str], plan: Any
) -> str:
    """Return the summary: flows and their last profile, the diagnosis, parameters without gradient, failed parts."""
    if not records:
        told = [f"  {line}" for line in diagnose(alerts).splitlines()] if alerts else []
        return "\n".join([f"flowscope: no record yet.\n{plan}", *told, *_switched_off(failed), _covered(header)])
    last = records[-1]
    loss = "" if last.loss is None else f", loss {last.loss:.4g}"
    lines = [f"flowscope: {len(records)} records, last at step {last.step}{loss}"]
    for number, flow in enumerate(header.flows):
        key = metric_key("gradient_product", None if number == 0 else flow.name)
        product = next((r.metrics[key] for r in reversed(records) if key in r.metrics), None)
        if product is not None:
            lines.append(f"  {flow.name} ({flow.kind}, {len(flow.points)} points): {_profile(product, flow.points)}")
    lines += [f"  {line}" for line in diagnose(alerts).splitlines()]
    for words, names in ((NEVER_RAN, _never_ran(header, records)), (NO_GRADIENT, _without_gradient(records))):
        lines += [f"  {words}: {few(names)}"] * bool(names)
    return "\n".join([*lines, *_switched_off(failed), _covered(header)])


def _switched_off(failed: Mapping[str, str]) -> list[str]:
    return [f"  switched off: {part} ({reason})" for part, reason in failed.items()]


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
        held = [np.sum([r.metrics[key] for key in keys], 0) for r in records if all(key in r.metrics for key in keys)]
        held = [calls for calls in held if len(calls) == len(flow.points)]
        if held:
            names += [point for point, calls in zip(flow.points, np.sum(held, axis=0), strict=True) if calls == 0]
    return names


def _without_gradient(records: Sequence[Record]) -> list[str]:
    held = [r for r in records if {"param_grad_norm", "param_trainable"} <= {*r.metrics}]
    if not held:
        return []
    never = np.all([np.isnan(r["param_grad_norm"]) & (r["param_trainable"] == 1) for r in held], axis=0)
    return [name for name, missing in zip(held[-1].labels("param_grad_norm"), never, strict=True) if missing]
