"""What a run says of each metric over its steps, in the numbers that runs of one recipe are compared in.

Axis letters: N runs, K steps, R rows (relative depth, from input to output).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from flowscope.backdrop import LOSS
from flowscope.metrics import Metric, spec_of
from flowscope.records import Array, Record

PHASES = ("state", "forward", "output", "loss", "backward")
"""What a step goes through: weights and settings, hidden states, the answer, the loss, gradients and updates."""
MOST_STEPS, MOST_ROWS = 128, 64
"""So many steps of a run are judged, the first ones and then evenly spaced ones; rows beyond are joined in depth."""
LEAST, MOST = 1e-30, 1e30
"""What a logarithm is taken of."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run: the steps [K] at which it was seen, its values [K, R], the paths of its rows."""

    steps: tuple[int, ...]
    values: Array
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """One metric of N runs of a recipe at the steps they share.

    Attributes:
        key: as in `Record.metrics`, or "loss".
        steps: [K].
        values: [N, K, R].
        recorded: how many rows a record has; where that is more than R, each row is the mean of a stretch of them.
        labels: the paths of the rows, of a stretch the first; empty where the metric is one number.
        phase: when in a step its numbers come about, one of `PHASES`.
        per_flow: whether the rows are a depth axis, so that a run of another depth can be laid beside.
        in_logs: whether the values are logarithms.
        unit: what a small deviation is small against; None: the values' own size.
    """

    key: str
    steps: tuple[int, ...]
    values: Array
    recorded: int
    labels: tuple[str, ...]
    phase: str = "loss"
    per_flow: bool = False
    in_logs: bool = False
    unit: float | None = None


def phase_of(spec: Metric) -> str:
    """When in a step the numbers of a metric come about."""
    if spec.of_gradient:
        return "backward"
    if spec.rows == "parameters":
        return "state"
    return "output" if spec.rows == "model" and spec.view == "Depth" else "forward"


def comparable(spec: Metric) -> bool:
    """Whether runs can be compared in a metric: a number per row, none that identifies what was computed."""
    return spec.drawn and spec.shape == "profile" and not getattr(spec, "exact", False)


def numbers_of(record: Record) -> dict[str, Array]:
    """Key -> values [R] of a record as they are compared: logarithms where the metric is drawn so."""
    found = {} if record.loss is None else {LOSS: np.array([record.loss])}
    for key, values in record.metrics.items():
        spec = record.spec(key)
        if comparable(spec) and values.ndim == 1 and values.size:
            found[key] = logs_of(values) if spec.is_log else values
    return found


def logs_of(values: Array) -> Array:
    """Logarithms; what is zero, negative or infinite counts as very small or large."""
    logs: Array = np.log(np.clip(values, LEAST, MOST))
    return logs


def joined_rows(values: Array, most: int) -> Array:
    """Means over at most `most` nearly equal stretches of the last axis, [..., min(R, most)]."""
    rows = values.shape[-1]
    if rows <= most:
        return values
    starts = np.arange(most) * rows // most
    sizes = np.diff(np.append(starts, rows))
    joined: Array = np.add.reduceat(values, starts, axis=-1) / sizes
    return joined


def joined_labels(labels: Sequence[str], rows: int) -> tuple[str, ...]:
    """The labels of joined rows: of each stretch the first."""
    return tuple(labels[n * len(labels) // rows] for n in range(rows)) if len(labels) > rows else tuple(labels)


def curves_of(records: Iterable[Record]) -> dict[str, Curve]:
    """The curves of a run; a metric whose rows change within the run is left out."""
    seen: dict[str, list[tuple[int, Array, Sequence[str]]]] = {}
    for record in records:
        for key, values in numbers_of(record).items():
            seen.setdefault(key, []).append((record.step, values, record.metric_labels.get(key, ())))
    curves = {}
    for key, rows in seen.items():
        sizes = {values.size for _, values, _ in rows}
        if len(sizes) == 1:
            curves[key] = Curve(
                tuple(step for step, _, _ in rows), np.stack([v for _, v, _ in rows]), tuple(rows[-1][2])
            )
    return curves


def stacked(runs: Sequence[Mapping[str, Curve]], specs: Mapping[str, Metric]) -> list[Stack]:
    """The metrics that all runs have with the same rows, at the steps they share; `specs` is what they mean."""
    stacks = []
    for key in runs[0]:
        curves = [run.get(key) for run in runs]
        known = [curve for curve in curves if curve is not None]
        shared = reduce(set.intersection, (set(curve.steps) for curve in known)) if len(known) == len(runs) else set()
        if not shared or len({curve.values.shape[1] for curve in known}) > 1:
            continue
        steps = sorted(shared)
        values = np.stack([curve.values[[curve.steps.index(step) for step in steps]] for curve in known])
        spec = spec_of(key, specs)
        told = phase_of(spec), spec.per_flow, spec.is_log, 1.0 if spec.is_log or spec.bounds else None
        whole = Stack(key, tuple(steps), values, values.shape[2], known[0].labels, *(told if key != LOSS else ()))
        stacks.append(thinned(whole, MOST_STEPS, MOST_ROWS))
    return stacks


def thinned(stack: Stack, steps: int, rows: int) -> Stack:
    """At most so many steps, a quarter from the beginning and the rest evenly spaced; at most so many rows."""
    known = len(stack.steps)
    chosen = np.arange(known)
    if known > steps:
        chosen = np.append(chosen[: steps // 4], np.linspace(steps // 4, known - 1, steps - steps // 4).round())
    chosen = chosen.astype(int)
    values = joined_rows(stack.values[:, chosen], rows)
    labels = joined_labels(stack.labels, values.shape[2])
    return replace(stack, steps=tuple(stack.steps[n] for n in chosen), values=values, labels=labels)
