"""The points of all flows in one step: their sums and calls, and how ranks add them up.

Axis letters: R rows, C columns, P points of a flow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.calls import PointKey
from flowscope.hooks.flow_observer import FlowObserver
from flowscope.instruments.instrument import Array, table_rows
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.payload import Part, Sharing, flat, from_host
from flowscope.sums.statistics import BACKWARDS, wide

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
        parts = self._parts("points", known, total, sharing, fixed=True) if known else []
        for place in places:
            if place.row >= self._fixed:
                parts += self._parts(f"point {place.flow.flow.name} {place.key}", [place], total, sharing)
        return parts

    def _parts(
        self, name: str, places: list[Place], total: Array, sharing: Sharing, *, fixed: bool = False
    ) -> list[Part]:
        columns, width = self._columns, self._columns + CALLS
        rows = [place.row for place in places]

        def scatter(sums: Array) -> None:
            table = sums.reshape(len(places), width)
            table[:, :columns] /= sharing.divisor ** places[0].flow.seen.gradient_powers()
            table[:, [BACKWARDS, columns, columns + 1]] /= sharing.replicas
            table[:, self._maxima] = np.nan  # they have a part of their own
            for place, row in zip(places, table, strict=True):
                total[place.row] = row[:columns]
                for counted, number in zip(self._calls[id(place.flow)], row[columns:], strict=True):
                    counted[place.key] = float(number)
            self._sums = total

        def scatter_largest(largest: Array) -> None:
            total[np.ix_(rows, self._maxima)] = largest.reshape(len(places), -1)

        parts = [Part(name, len(places) * width, lambda: self._gather(places, sharing), scatter, fixed=fixed)]
        if self._maxima:
            size, gather = len(places) * len(self._maxima), partial(self._largest, places, sharing.device)
            parts.append(Part(f"largest {name}", size, gather, scatter_largest, fixed=fixed, largest=True))
        return parts

    def _largest(self, places: Sequence[Place], device: torch.device) -> Tensor:
        """The largest numbers of some points that follow one another, as one row; none of them is below 0."""
        start, stop = places[0].row, places[-1].row + 1
        out = torch.zeros(stop - start, len(self._maxima), dtype=wide(device), device=device)
        for table in self._tensors:
            if table.shape[0] >= stop:
                own = table[start:stop][:, self._maxima].to(device, out.dtype, non_blocking=True)
                out = torch.maximum(out, own)
        return out.reshape(-1)

    def _gather(self, places: Sequence[Place], sharing: Sharing) -> Tensor:
        """The rows of some points that follow one another, and their calls, as one row of numbers."""
        device, (start, stop) = sharing.device, (places[0].row, places[-1].row + 1)
        tables = [t[start:stop] for t in self._tensors if t.shape[0] >= stop]
        sums = flat(tables, device).view(-1, self._columns)
        counts = [[counted.get(place.key, 0) for counted in self._calls[id(place.flow)]] for place in places]
        out = torch.cat([sums, from_host(np.array(counts), device).view(-1, CALLS)], dim=1)
        if not sharing.states:
            mine = from_host(np.array([float(p.key in p.flow.seen.sharded) for p in places]), device)
            out = torch.where(mine[:, None] > 0, out, 0.0)
            out[:, [BACKWARDS, self._columns, self._columns + 1]] = 0.0
        return out.reshape(-1)
