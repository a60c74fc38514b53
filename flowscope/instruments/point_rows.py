"""The points of all flows in one step: their sums and calls, and how ranks add them up.

Axis letters: R rows, C columns, P points of a flow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.calls import PointKey
from flowscope.hooks.flow_observer import FlowObserver
from flowscope.instruments.instrument import Array, table_rows
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.payload import Part, Sharing, flat, from_host
from flowscope.sums.statistics import BACKWARDS

CALLS = 2
"""Behind a row's columns: how often its point was called, and how often it could give a gradient."""


class Place(NamedTuple):
    """Where a point's row is."""

    flow: FlowObserver
    key: PointKey
    row: int


class PointRows:
    """The rows [R, C] of one step.

    Args:
        buffer: where they were.
        tensors: the rows, one tensor a device.
        flows: whose points they are.
        fixed: how many rows are known from the structure; further calls of a module get theirs when they are seen.
    """

    def __init__(
        self, buffer: DepositBuffer, tensors: Sequence[Tensor], flows: Sequence[FlowObserver], fixed: int
    ) -> None:
        self._columns, self._maxima = buffer.columns, buffer.maxima
        self._tensors, self._flows, self._fixed = tensors, flows, fixed
        self._calls: dict[int, tuple[dict[PointKey, float], ...]] = {
            id(flow): ({**flow.calls.forward}, {**flow.calls.tracked}) for flow in flows
        }
        self._sums: Array | None = None

    @property
    def devices(self) -> int:
        """How many tensors the rows are."""
        return len(self._tensors)

    def read(self, host: Sequence[Array]) -> None:
        """Take over the host's copies of the tensors, unless the sums of all ranks are there."""
        if self._sums is None:
            self._sums = table_rows(list(host), self._columns, maxima=self._maxima)

    def of(self, flow: FlowObserver, points: Sequence[PointKey]) -> tuple[Array, Array]:
        """The rows [P, C] of some points, and their calls [2, P]: all, and those that could give gradient."""
        rows = np.zeros((len(points), self._columns)) if self._sums is None else self._sums
        picked = np.zeros((len(points), self._columns))
        calls = np.full((CALLS, len(points)), np.nan)
        for at, key in enumerate(points):
            owner, own = flow.source(key)
            if (row := owner.seen.numbers.get(own)) is not None and row < len(rows):
                picked[at] = rows[row]
            for kind, counted in enumerate(self._calls[id(owner)]):
                calls[kind, at] = counted.get(own, 0)
        return picked, calls

    def parts(self, sharing: Sharing, agreed: Mapping[str, int]) -> list[Part]:
        """The rows known from the structure as one part, each further call as one of its own."""
        count = max((t.shape[0] for t in self._tensors), default=0)
        total = np.zeros((count, self._columns))
        places = [
            Place(flow, key, row) for flow in self._flows for key, row in flow.seen.numbers.items() if row < count
        ]
        known = sorted((place for place in places if place.row < self._fixed), key=lambda place: place.row)
        parts = [self._part("points", known, total, sharing, fixed=True)] if known else []
        for place in places:
            if place.row >= self._fixed:
                parts.append(self._part(f"point {place.flow.flow.name} {place.key}", [place], total, sharing))
        return parts

    def _part(self, name: str, places: list[Place], total: Array, sharing: Sharing, *, fixed: bool = False) -> Part:
        columns, counts = self._columns, self._columns + CALLS
        # a sum has no largest: each rank has places of its own
        width = counts + sharing.ranks * len(self._maxima)

        def scatter(sums: Array) -> None:
            table = sums.reshape(len(places), width)
            table[:, self._maxima] = table[:, counts:].reshape(len(places), sharing.ranks, -1).max(1)
            table[:, :columns] /= sharing.divisor ** places[0].flow.seen.gradient_powers()
            table[:, [BACKWARDS, columns, columns + 1]] /= sharing.replicas
            for place, row in zip(places, table, strict=True):
                total[place.row] = row[:columns]
                for counted, number in zip(self._calls[id(place.flow)], row[columns:counts], strict=True):
                    counted[place.key] = float(number)
            self._sums = total

        return Part(name, len(places) * width, lambda: self._gather(places, sharing), scatter, fixed=fixed)

    def _gather(self, places: Sequence[Place], sharing: Sharing) -> Tensor:
        """The rows of some points that follow one another, and their calls, as one row of numbers."""
        device, (start, stop) = sharing.device, (places[0].row, places[-1].row + 1)
        tables = [t[start:stop] for t in self._tensors if t.shape[0] >= stop]
        sums = flat(tables, device).view(-1, self._columns)
        counts = [[counted.get(place.key, 0) for counted in self._calls[id(place.flow)]] for place in places]
        slots = sums.new_zeros(len(places), sharing.ranks, len(self._maxima))
        for table, (at, column) in itertools.product(tables, enumerate(self._maxima)):
            own = table[:, column].to(device, sums.dtype, non_blocking=True)
            slots[:, sharing.rank, at] = torch.maximum(slots[:, sharing.rank, at], own)
        out = torch.cat([sums, from_host(np.array(counts), device).view(-1, CALLS), slots.flatten(1)], dim=1)
        if not sharing.states:
            mine = from_host(np.array([float(p.key in p.flow.seen.sharded) for p in places]), device)
            out = torch.where(mine[:, None] > 0, out, 0.0)
            out[:, [BACKWARDS, self._columns, self._columns + 1]] = 0.0
        return out.reshape(-1)
