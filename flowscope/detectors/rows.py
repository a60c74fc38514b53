"""The rows of a record's metrics: of a flow, of the modules that lie in it, of parameters; and what they are called."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowscope.detectors.detector import Array, Flags
from flowscope.records import FlowLayout, Record, RunHeader, metric_key


class FlowView(NamedTuple):
    """One flow of one record: its layout and its metrics, without the naming rule of further flows."""

    layout: FlowLayout
    record: Record
    first: bool

    def get(self, metric: str) -> Array | None:
        """The metric's values, or None where this record has none (not measured, or all NaN)."""
        values = self.record.metrics.get(self._key(metric))
        if values is None or values.size == 0:
            return None
        # most often the first or the last entry tells, at a tenth of the cost
        seen = not (math.isnan(values.item(0)) and math.isnan(values.item(-1)))
        return None if not seen and bool(np.isnan(values).all()) else values

    def point(self, index: int) -> str:
        """Module path of point `index`."""
        return _label(self.layout.points, index)

    def row(self, metric: str, index: int) -> str:
        """Module path of row `index` of a metric whose rows need not be points (merge sites of wrapped blocks)."""
        return self._labelled(metric, index, self.layout.points)

    def site(self, metric: str, index: int) -> str:
        """Module path of entry `index` of a metric with one entry a merge site."""
        return self._labelled(metric, index, self.layout.blocks)

    def block(self, index: int) -> str:
        """Module path of the block between points `index` and `index + 1`."""
        return _label(self.layout.blocks, index)

    def _key(self, metric: str) -> str:
        return metric_key(metric, None if self.first else self.layout.name)

    def _labelled(self, metric: str, index: int, otherwise: Sequence[str]) -> str:
        labels = self.record.metric_labels.get(self._key(metric), ())
        return labels[index].partition("#")[0] if index < len(labels) else _label(otherwise, index)


def each_flow(record: Record, header: RunHeader) -> Iterator[FlowView]:
    """The flows of a record in the header's order."""
    for index, layout in enumerate(header.flows):
        yield FlowView(layout, record, index == 0)


def flow_holding(path: str, header: RunHeader) -> str | None:
    """The flow that a module or parameter belongs to: the longest name it lies under, else the flow of the whole model.

    A stage of a convnet answers with the flow over all stages, which is where gradients are judged.
    """
    flows = [layout for layout in header.flows if layout.kind not in ("time", "gates")]
    whole = next((layout.name for layout in flows if layout.kind == "network" or layout.name == "network"), None)
    holding = [layout for layout in flows if path == layout.name or path.startswith(f"{layout.name}.")]
    if not holding:
        return whole or (flows[0].name if len(flows) == 1 else None)
    nearest = max(holding, key=lambda layout: len(layout.name))
    return whole if whole and nearest.kind == "stage" else nearest.name


@dataclass(frozen=True)
class FlowGroup:
    """The rows of one flow in a metric that is labelled by module or parameter.

    Attributes:
        flow: its name; None for what lies in no flow.
        rows, names: the rows in order, and their labels.
        inner: which of them lie on the depth axis, the end of a flow apart.
    """

    flow: str | None
    rows: NDArray[np.intp]
    names: tuple[str, ...]
    inner: Flags


class FlowGroups:
    """Splits the rows of such a metric by flow; computed once a layout."""

    def __init__(self) -> None:
        self._labels: tuple[str, ...] | None = None
        self._header: RunHeader | None = None
        self.known: list[FlowGroup] = []

    def of(self, labels: tuple[str, ...], header: RunHeader) -> list[FlowGroup]:
        """The groups, in the order of their first row."""
        if self._labels != labels or self._header is not header:
            self._labels, self._header = labels, header
            self.known = _groups(labels, header)
        return self.known


def _groups(labels: tuple[str, ...], header: RunHeader) -> list[FlowGroup]:
    axis = {path for layout in header.flows for path in (*layout.points, *layout.blocks)}
    ends = {layout.points[-1] for layout in header.flows if layout.points}
    rows: dict[str | None, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(flow_holding(label.partition(":")[0], header), []).append(row)
    groups = []
    for flow, found in rows.items():
        names = tuple(labels[row] for row in found)
        inner = [name not in ends and any(path in axis for path in ancestors(name)) for name in names]
        groups.append(FlowGroup(flow, np.array(found, dtype=np.intp), names, np.array(inner, dtype=bool)))
    return groups


def ancestors(path: str) -> Iterator[str]:
    """The path itself, then what holds it, from the inside out; the root is left out."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def lie_at(points: Sequence[str], chosen: Flags, owners: Sequence[str]) -> Flags:
    """Which of the modules `owners` belong to one of the chosen points of a flow [P], each to one point at most.

    A module belongs to the point it lies in, or, beside it, to the next one of the same container (a chain's point is
    the activation behind its layer).
    """
    paths = [point.partition("#")[0] for point in points]
    inside = {path: bool(flag) for path, flag in zip(paths, chosen, strict=True)}
    beside: dict[str, list[tuple[int, bool]]] = {}
    for path, flag in inside.items():
        holder, _, last = path.rpartition(".")
        if last.isdigit():
            beside.setdefault(holder, []).append((int(last), flag))

    def lies(owner: str) -> bool:
        if (point := next((path for path in ancestors(owner) if path in inside), None)) is not None:
            return inside[point]
        holder, _, last = owner.rpartition(".")
        behind = [place for place in beside.get(holder, ()) if last.isdigit() and place[0] >= int(last)]
        return min(behind)[1] if behind else False

    known: dict[str, bool] = {}
    for owner in owners:
        if owner not in known:
            known[owner] = lies(owner)
    return np.array([known[owner] for owner in owners], dtype=bool)


def _label(names: Sequence[str], index: int) -> str:
    return names[index] if 0 <= index < len(names) else f"row {index}"


def labels_of(record: Record, header: RunHeader, metric: str) -> tuple[str, ...]:
    """The labels of a metric's entries, the record's own before the header's; empty where neither has any."""
    return record.metric_labels.get(metric) or header.labels.get(metric, ())


def label_of(record: Record, header: RunHeader, metric: str, index: int, what: str) -> str:
    """The label of entry `index` of a metric; `what` and its number where there is none."""
    labels = labels_of(record, header, metric)
    if index < len(labels):
        return labels[index]
    return parameter_name(record, header, index) if what == "parameter" else f"{what} {index}"


def parameter_name(record: Record, header: RunHeader, index: int) -> str:
    """The path of entry `index` of the parameter metrics."""
    for labels in (record.metric_labels, header.labels):
        for metric in ("param_norm", "param_grad_norm", "param_trainable"):
            if index < len(labels.get(metric, ())):
                return labels[metric][index]
    return f"parameter {index}"


def module_of(parameter: str) -> str:
    """The module that owns a parameter."""
    return parameter.rpartition(".")[0]
