"""What two records of one step are compared in, place by place, in the order in which a step computes it.

Axis letters: P points of a flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from flowscope.parting.distances import CHECKSUM, distance, update_distance, update_size
from flowscope.parting.matching import depth_pairs, flow_pairs, parameter_pairs, parameters_of
from flowscope.records import OWN_LOSS, Array, FlowLayout, Record, RunHeader, metric_key

Phase = Literal["setup", "input", "forward", "loss", "backward", "update"]
PHASES: tuple[Phase, ...] = ("input", "forward", "loss", "backward", "update")
RANDOM = "random state"


@dataclass(frozen=True)
class Look:
    """One place of one phase.

    Attributes:
        phase: of the step.
        where: a path of the first run, or what it is.
        distance: 0 for equal bits, else relative; NaN where it cannot be said.
        size: of an update relative to the weights; else 1.
        kind: what was compared: "modules", "points", "parameters", ...
    """

    phase: Phase
    where: str
    distance: float
    size: float = 1.0
    kind: str = ""


@dataclass(frozen=True)
class Sides:
    """Two runs and one step of each."""

    headers: tuple[RunHeader, RunHeader]
    records: tuple[Record, Record]

    def both(self, key: str, other: str | None = None) -> tuple[Array, Array] | None:
        """A metric of both, None where one lacks it."""
        found = self.records[0].metrics.get(key), self.records[1].metrics.get(other or key)
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    def rows(self, key: str) -> tuple[dict[str, Array], dict[str, Array]] | None:
        """A metric of both by its labels."""
        if (found := self.both(key)) is None:
            return None
        named = [
            dict(zip(record.metric_labels.get(key, ()), values, strict=False))
            for record, values in zip(self.records, found, strict=True)
        ]
        return named[0], named[1]

    @cached_property
    def parameters(self) -> list[tuple[str, str]]:
        """The names of the parameters that both have, in the first run's order."""
        return parameter_pairs(*(parameters_of(header) for header in self.headers))

    @cached_property
    def unlike(self) -> frozenset[str]:
        """The blocks whose hidden states are no longer the same numbers: those of a run that is wrapped otherwise.

        What is inside of the blocks (attention, feed-forward) is given and gives the same.
        """
        first, second = (header.setup.get("wrapped") or None for header in self.headers)
        return frozenset() if first == second else frozenset(b for flow in self.headers[0].flows for b in flow.blocks)

    @property
    def same_world(self) -> bool:
        """Whether as many processes saw the batch."""
        first, second = (header.setup.get("processes", 1) for header in self.headers)
        return bool(first == second)


def looks(sides: Sides) -> Iterator[Look]:
    """Every place of a step, in order."""
    if not all(map(told_to_the_bit, sides.records)):
        yield from coarse(sides)
        return
    yield from inputs(sides)
    yield from forward(sides)
    yield from loss(sides)
    yield from backward(sides)
    yield from update(sides)


# -- input ------------------------------------------------------------------------------------------------------------


def inputs(sides: Sides) -> Iterator[Look]:
    """The model's inputs, and the state of the random numbers where the forward draws some."""
    if (found := sides.both("exact_inputs")) is not None:
        first, second = found
        same = first[0] == second[0] and first[2] == second[2]
        if sides.same_world and first[3] == second[3]:
            same = same and first[1] == second[1]
        yield Look("input", "", 0.0 if same else 1.0, kind="inputs")
    states = sides.both("random_state")
    if states is not None and sides.same_world and np.isfinite([states[0][0], states[1][0]]).all():
        same = states[0][0] == states[1][0] or not (draws(states[0]) or draws(states[1]))
        yield Look("input", RANDOM, 0.0 if same else 1.0, kind="random")


def draws(states: Array) -> bool:
    """Whether the state of the random numbers was another after the forward."""
    return bool(np.isfinite(states[:2]).all() and states[0] != states[1])


def reordered(sides: Sides) -> bool:
    """Whether the runs hold the same samples in other numbers of forwards."""
    found = sides.both("exact_inputs")
    return found is not None and bool(found[0][3] != found[1][3])


# -- forward ----------------------------------------------------------------------------------------------------------


def forward(sides: Sides) -> Iterator[Look]:
    """Modules in the order in which they returned, where both runs saw them under the same names; else points."""
    modules = sides.rows("exact_modules")
    if modules is not None and sides.unlike:
        modules = {x: row for x, row in modules[0].items() if x.partition("#")[0] not in sides.unlike}, modules[1]
    if modules is not None and 2 * len(modules[0].keys() & modules[1].keys()) > max(map(len, modules)):
        yield from _modules(*modules)
    elif not sides.unlike:
        yield from _points(sides)


def _modules(a: dict[str, Array], b: dict[str, Array]) -> Iterator[Look]:
    for label in (label for label in a if label in b):
        given = a[label][0] == b[label][0]
        found = distance(a[label][1:], b[label][1:])
        where = label.partition("#")[0] if given or not found else _around(label)
        yield Look("forward", where, found, kind="modules")


def _around(label: str) -> str:
    """The module in whose own code something differed: what the module at this path was given did already."""
    return label.partition("#")[0].rpartition(".")[0]


def _points(sides: Sides) -> Iterator[Look]:
    for first, second in flow_pairs(*sides.headers):
        found = _of_flow(sides, "exact_states", first, second)
        for (i, j), label in _paired(first, second):
            if found is not None and _seen(found, i, j):
                yield Look("forward", label.removesuffix(":input"), distance(found[0][i], found[1][j]), kind="points")


def _of_flow(sides: Sides, name: str, first: FlowLayout, second: FlowLayout) -> tuple[Array, Array] | None:
    keys = [
        metric_key(name, None if header.flows[0].name == flow.name else flow.name)
        for header, flow in zip(sides.headers, (first, second), strict=True)
    ]
    return sides.both(*keys)


def _paired(first: FlowLayout, second: FlowLayout) -> list[tuple[tuple[int, int], str]]:
    return [((i, j), first.points[i]) for i, j in depth_pairs(len(first.points), len(second.points))]


def _seen(found: tuple[Array, Array], i: int, j: int) -> bool:
    """Whether both rows are there: one that got no gradient is all zeros."""
    return i < len(found[0]) and j < len(found[1]) and bool(found[0][i].any() and found[1][j].any())


# -- loss -------------------------------------------------------------------------------------------------------------


def loss(sides: Sides) -> Iterator[Look]:
    """The loss, where both runs were told it; one rank's own is none of another world's."""
    first, second = (record.loss for record in sides.records)
    owned = [OWN_LOSS in record.notes for record in sides.records]
    if first is not None and second is not None and owned[0] == owned[1]:
        gap = abs(first - second)
        # nine digits are written; neighbours in fp32 lie 6e-8 apart
        same = gap <= 1e-8 * abs(first) or (np.isnan(first) and np.isnan(second))
        yield Look("loss", "", 0.0 if same else float(gap / max(abs(first), abs(second))), kind="loss")


# -- backward ---------------------------------------------------------------------------------------------------------


def backward(sides: Sides) -> Iterator[Look]:
    """From the output to the input: of each block first its parameters, where its input's gradient is equal."""
    pairs = parameter_rows(sides, "exact_param_gradients")
    gradients = [Look("backward", x, distance(a, b), kind="parameters") for x, a, b in pairs]
    for first, second in reversed(flow_pairs(*sides.headers)):
        found = _of_flow(sides, "exact_gradients", first, second)
        if found is None or first.kind == "network" or sides.unlike:
            continue
        yield from _of_blocks(found, first, second, gradients)
    missing = _missing(sides, "exact_param_gradients")
    yield from (Look("backward", name, float("inf"), kind="gone") for name in missing)
    yield from reversed(gradients)


def _of_blocks(
    found: tuple[Array, Array], first: FlowLayout, second: FlowLayout, gradients: Sequence[Look]
) -> Iterator[Look]:
    pairs = [((i, j), label) for (i, j), label in _paired(first, second) if _seen(found, i, j)]
    after = ""
    for (i, j), label in reversed(pairs):
        # the gradient of a block's output is what comes out of the block behind it
        yield Look("backward", after, distance(found[0][i], found[1][j]), kind="points")
        after = label.partition("#")[0].removesuffix(":input")


def parameter_rows(sides: Sides, key: str) -> list[tuple[str, Array, Array]]:
    """(name, row, row) of the parameters that both have a number for, in the first run's order."""
    first, second = _told(sides, key)
    return [(x, first[x], second[y]) for x, y in sides.parameters if x in first and y in second]


def _missing(sides: Sides, key: str) -> list[str]:
    """The parameters that only one of the runs has a number for."""
    first, second = _told(sides, key)
    return [x for x, y in sides.parameters if (x in first) != (y in second)]


def _told(sides: Sides, key: str) -> list[dict[str, Array]]:
    """The rows that hold a number, of both runs; none where one of them lacks the metric."""
    rows = sides.rows(key) or ({}, {})
    return [{name: values for name, values in of.items() if not np.isnan(values[CHECKSUM])} for of in rows]


# -- update -----------------------------------------------------------------------------------------------------------


def update(sides: Sides) -> Iterator[Look]:
    """What the optimizer made of each parameter."""
    after = {x: (a, b) for x, a, b in parameter_rows(sides, "exact_updated")}
    for x, a, b in parameter_rows(sides, "exact_weights"):
        if x in after:
            moved = (a, after[x][0]), (b, after[x][1])
            size = np.nanmax([update_size(moved[0]), update_size(moved[1]), 0.0])
            yield Look("update", x, update_distance(*moved), float(size), kind="parameters")


# -- steps that were not told to the bit ------------------------------------------------------------------------------

WRITTEN = 1e-5
"""Numbers with seven digits are equal up to this; those near zero are not compared."""


def told_to_the_bit(record: Record) -> bool:
    """Whether it is one of the first steps."""
    return any(record.spec(key).exact for key in record.metrics)


def coarse(sides: Sides) -> Iterator[Look]:
    """The usual metrics of the first flow and of the parameters, to the digits that are written."""
    yield from _rows(sides, "forward", "act_rms")
    yield from (replace(look, distance=_written(look.distance)) for look in loss(sides))
    yield from reversed([*_rows(sides, "backward", "grad_norm")])
    yield from reversed([*_rows(sides, "backward", "param_grad_norm")])
    yield from _rows(sides, "update", "update_ratio")


def _rows(sides: Sides, phase: Phase, metric: str) -> Iterator[Look]:
    if (rows := sides.rows(metric)) is not None:
        for label in (label for label in rows[0] if label in rows[1]):
            yield Look(phase, label.removesuffix(":input"), _written(_apart(rows, label)), kind="metric")


def _apart(rows: tuple[dict[str, Array], dict[str, Array]], label: str) -> float:
    a, b = float(rows[0][label]), float(rows[1][label])
    if np.isnan(a) or np.isnan(b) or a == b:
        return float("inf") if np.isnan(a) != np.isnan(b) else 0.0
    return abs(a - b) / max(abs(a), abs(b))


def _written(found: float) -> float:
    return found if found > WRITTEN else 0.0
