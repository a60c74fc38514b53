"""The parts of one snapshot that add up over ranks: rows of points, sites and gates, units, parameters.

Each method of `PartMaker` says how one kind is gathered into the vector that the ranks add up, and puts the sum in the
place of this rank's own numbers, so that the record is made of it as of one process' numbers.

Axis letters: R rows, N parameters, U units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.instruments.instrument import Taken
from flowscope.probes.deposit import FlowObserver, PointKey
from flowscope.probes.payload import Part, Sharing, flat, from_host
from flowscope.probes.statistics import BACKWARDS, wide

Array = NDArray[np.float64]
Vectors = Sequence[tuple[slice, Sequence[tuple[int, int]]]]
Calls = Mapping[int, tuple[dict[PointKey, float], dict[PointKey, float]]]
SHARE_ROWS = (4, 6)
"""Of the parameters' rows these are shares of the entries, the others are norms, whose squares add up."""


class Place(NamedTuple):
    """Where a point's row is."""

    flow: FlowObserver
    key: PointKey
    row: int


class PartMaker:
    """Makes the parts of one snapshot.

    Args:
        tensors: all tensors of the snapshot, on their devices.
        replaced: filled with (place in `tensors`) -> the arrays of the sum.
        sharing: this rank's share.
    """

    def __init__(self, tensors: list[Tensor], replaced: dict[tuple[int, int], list[Array]], sharing: Sharing) -> None:
        self._tensors, self._replaced, self._sharing = tensors, replaced, sharing

    def _replace(self, where: slice, first: Array) -> None:
        """Put the sum of several devices in the place of the first of them, nothing in that of the others."""
        rest = [np.zeros((0, *first.shape[1:]))] * (where.stop - where.start - 1)
        self._replaced[where.start, where.stop] = [first, *rest]

    def _zeros(self, size: int) -> Tensor:
        device = self._sharing.device
        return torch.zeros(size, dtype=wide(device), device=device)

    def table(self, name: str, where: slice, columns: int) -> list[Part]:
        """All rows of a buffer whose rows are reserved when it is built."""
        held = self._tensors[where]
        if not held or not held[0].shape[0]:
            return []
        rows = max(t.shape[0] for t in held)
        size = rows * columns

        def gather() -> Tensor:
            full = [t for t in held if t.shape[0] == rows]
            return flat(full, self._sharing.device) if self._sharing.states else self._zeros(size)

        return [Part(name, size, gather, lambda total: self._replace(where, total.reshape(rows, columns)))]

    def vector(self, name: str, where: slice) -> list[Part]:
        """One tensor of sums that not every step has."""
        held = self._tensors[where.start]

        def gather() -> Tensor:
            return flat([held], self._sharing.device) if self._sharing.states else self._zeros(held.numel())

        return [Part(name, held.numel(), gather, lambda total: self._replace(where, total), fixed=False)]

    def parts(self, taken: Taken, where: slice, agreed: Mapping[str, int]) -> list[Part]:
        """What an instrument saw, as it says itself how ranks combine it."""
        if callable(taken.adds_up):
            return taken.adds_up(self._sharing, agreed)
        if not taken.adds_up or not taken.tensors:
            return []
        if taken.adds_up == "vector":
            return self.vector(taken.name, where)
        return self.table(taken.name, where, taken.tensors[0].shape[1])

    def rows(self, where: slice, flows: Sequence[FlowObserver], calls: Calls, fixed: int) -> list[Part]:
        """The rows of the points: those known from the structure as one part, each further call as one of its own.

        Args:
            where: the deposit buffer's tensors, [R, columns] each.
            flows: whose rows they are.
            calls: how often each point was called and gave gradient, by the id of the flow.
            fixed: how many rows are known from the structure.
        """
        held = self._tensors[where]
        count = max((t.shape[0] for t in held), default=0)
        columns = held[0].shape[1] if held else 0
        total = np.zeros((count, columns))
        places = [Place(flow, key, row) for flow in flows for key, row in flow.rows.items() if row < count]
        known = sorted((place for place in places if place.row < fixed), key=lambda place: place.row)
        further = [[place] for place in places if place.row >= fixed]

        def part(name: str, some: list[Place]) -> Part:
            def gather() -> Tensor:
                return self._gather_rows(held, some, calls)

            def scatter(sums: Array) -> None:
                table = sums.reshape(len(some), columns + 2)
                table[:, :columns] /= self._sharing.divisor ** some[0].flow.seen.gradient_powers()
                table[:, [BACKWARDS, columns, columns + 1]] /= self._sharing.replicas
                for place, row in zip(some, table, strict=True):
                    total[place.row] = row[:columns]
                    for counted, number in zip(calls[id(place.flow)], row[columns:], strict=True):
                        counted[place.key] = float(number)
                self._replace(where, total)

            return Part(name, len(some) * (columns + 2), gather, scatter, fixed=some is known)

        parts = [part("points", known)] if known else []
        return parts + [part(f"point {some[0].flow.flow.name} {some[0].key}", some) for some in further]

    def _gather_rows(self, held: Sequence[Tensor], places: Sequence[Place], calls: Calls) -> Tensor:
        """The rows of some points that follow one another, and their calls, as one row of numbers."""
        device, (start, stop) = self._sharing.device, (places[0].row, places[-1].row + 1)
        columns = held[0].shape[1]
        sums = flat([t[start:stop] for t in held if t.shape[0] >= stop], device).view(-1, columns)
        counts = [[counted.get(place.key, 0) for counted in calls[id(place.flow)]] for place in places]
        out = torch.cat([sums, from_host(np.array(counts), device).view(-1, 2)], dim=1)
        if not self._sharing.states:
            mine = from_host(np.array([float(p.key in p.flow.sharded) for p in places]), device)
            out = torch.where(mine[:, None] > 0, out, 0.0)
            out[:, [BACKWARDS, columns, columns + 1]] = 0.0
        return out.reshape(-1)
