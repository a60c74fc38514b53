"""Cosines between hidden states: of neighbouring points, to x_0, between tokens and between samples of one point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowscope.hooks.calls import ENTRY
from flowscope.hooks.points import Point, PointMeasure
from flowscope.probes import statistics
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.depth import DepthRow, DepthRows
from flowscope.probes.layout import AxisReader, is_compiling
from flowscope.probes.payload import local
from flowscope.probes.statistics import Positions, Sums, full_precision, is_host

Compare = Callable[[Positions | None, Positions, Positions | None], Sums | DepthRow]


class Cosines(PointMeasure):
    """Compares a sample of each point's positions with those of the point before and of x_0.

    Args:
        buffer: where the sums are added up.
        at: from which column on.
        limit: largest number of positions.
        origin_first: whether the first point is x_0, because the flow has no entry.
    """

    def __init__(self, buffer: DepositBuffer, at: int, limit: int, *, origin_first: bool) -> None:
        self.buffer, self.at, self.limit, self.origin_first = buffer, at, limit, origin_first
        self._rows = DepthRows()
        self._previous: Positions | None = None
        self._origin: Positions | None = None

    def begin_pass(self) -> None:
        """No point was seen yet."""
        self._previous = self._origin = None

    def look(self, point: Point) -> Sums | DepthRow:
        """The sums, or on the host a row that is computed later, with those of the points beside it."""
        x = point.x
        before = self._previous if point.follows else None
        if point.before is not None:
            before = self._positions(point.reader, point.before)
        if is_host(x):  # only copies are made here
            return self._compared(point, before, self._rows.add)
        with full_precision(x):
            return self._compared(point, before, statistics.depth_statistics)

    def _compared(self, point: Point, before: Positions | None, compare: Compare) -> Sums | DepthRow:
        now = self._positions(point.reader, point.x)
        entering = point.key[0] == ENTRY
        origin = now if entering or (self._origin is None and self.origin_first) else self._origin
        sums = compare(None if entering else now.alike(before), now, now.alike(origin))
        if not is_compiling():
            self._remember(now, entering=entering)
        return sums

    def pass_by(self, point: Point) -> None:
        """Remember its positions."""
        self._remember(self._positions(point.reader, point.x))

    def _remember(self, now: Positions, *, entering: bool = False) -> None:
        self._previous = now
        if self._origin is None and (entering or self.origin_first):
            self._origin = now

    def _positions(self, reader: AxisReader, x: Tensor) -> Positions:
        states, axis, sequence = reader.read(local(x))
        return statistics.sample_positions(states, axis, self.limit, sequence=sequence)

    def deposit(self, key: tuple[int, int], row: int, seen: Any, gradient: Tensor | None) -> None:
        """Add the sums."""
        self.buffer.add(row, self.at, seen.read() if isinstance(seen, DepthRow) else seen)
