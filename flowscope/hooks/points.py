"""Deposit on backward: what is measured at a point waits for its gradient, then is added to the point's row.

What got no backward is therefore not counted (evaluation, no_grad, the discarded first pass of reentrant
checkpointing), and micro-batches and calls become one sum. What is measured is a list: each `PointMeasure` of a flow
looks at the hidden state in the forward, and deposits in backward what it saw.

Axis letters: D features, P points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flowscope.errors import FlowscopeError
from flowscope.hooks.calls import ENTRY, PointKey
from flowscope.hooks.hooks import Hooks
from flowscope.model.hidden_state import AxisReader, is_compiling
from flowscope.record_builder import RecordBuilder
from flowscope.records import Array
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.payload import local
from flowscope.sums.statistics import ELEMENTS, Sums, full_precision


class Point(NamedTuple):
    """A hidden state as it is measured in the forward.

    Attributes:
        key: which point it is.
        x: this rank's part of it, detached.
        reader: which of its axes are which.
        follows: whether the point before it is the one that was measured last.
        before: else the hidden state that went into its block, where it is known.
        beside: what else the module returned.
    """

    key: PointKey
    x: Tensor
    reader: AxisReader
    follows: bool = True
    before: Tensor | None = None
    beside: Sequence[Tensor] = ()


class FlowStep(NamedTuple):
    """One flow in one step, on the host.

    Attributes:
        points: in depth order.
        labels: of the points.
        rows: [P, columns] their sums.
        calls: [2, P] how often each was called, and how often it could give a gradient.
        kept: what the reading measure took, by point.
    """

    points: Sequence[PointKey]
    labels: Sequence[str]
    rows: Array
    calls: Array
    kept: Mapping[PointKey, list[Array]]


class PointMeasure:
    """One kind of number at the points of one flow. Every method has a default that does nothing."""

    def begin_pass(self) -> None:
        """A pass through the flow begins: no point was seen before its first."""

    def look(self, point: Point) -> Any:
        """Measure a hidden state in the forward: what waits for its gradient. Nothing is read from a device."""

    def pass_by(self, point: Point) -> None:
        """A hidden state that gives no gradient: it is only the point before the next."""

    def deposit(self, key: PointKey, row: int, seen: Any, gradient: Tensor | None) -> None:
        """The gradient has arrived (None: it cannot be seen); `seen` is what `look` returned."""

    def hide(self, row: int, *, entry: bool) -> None:
        """Compiled: an operation in place changed the hidden state, and its hook gets only a part of the gradient."""

    def forget(self) -> None:
        """Backward deposited what belongs to no step of ours, or the step is over."""

    def take(self) -> dict[PointKey, list[Tensor]]:
        """What it kept of a step that is no sum, on its way to the host."""
        return {}

    def read(self, out: RecordBuilder, flow: FlowStep) -> None:
        """Write the metrics of a flow."""


class Statistic(Protocol):
    """`flowscope.instruments.PointStatistic`: sums of a hidden state and its gradient, and its own metric of them."""

    name: ClassVar[str]
    columns: int
    gradient_powers: tuple[int, ...]
    maxima: int
    """So many of its sums, the last, are no sums: the largest of all calls counts."""
    seldom: ClassVar[bool]
    """Whether it looks at the first samples and each `WatchConfig.seldom_every`-th only."""

    @property
    def fuse(self) -> str:
        """What a fault of it switches off."""

    def look(self, point: Point) -> Tensor:
        """[columns] of a hidden state."""

    def gradient_sums(self, gradient: Tensor) -> Tensor:
        """[len(gradient_powers)] of its gradient."""

    def values(self, rows: Array) -> Array | Mapping[str, Array]:
        """[P] of [P, columns of both]; of several metrics, each by its name."""


class AddedUp(PointMeasure):
    """Sums of a hidden state and of its gradient, in the rows of a buffer from column `at` on; `look` gives the first.

    Attributes:
        columns: how many sums of the hidden state; those of the gradient follow.
        gradient_powers: one a column of the gradient's: the power of it that is added up there (0: a count).
    """

    columns: int
    gradient_powers: tuple[int, ...]

    def __init__(self, buffer: DepositBuffer, at: int) -> None:
        self.buffer, self.at = buffer, at

    def of_gradient(self, gradient: Tensor) -> Sums | None:
        """The gradient's sums."""

    def deposit(self, key: PointKey, row: int, seen: Any, gradient: Tensor | None) -> None:
        """Add the forward's sums and the gradient's."""
        self.add(row, seen, self.of_gradient(gradient) if gradient is not None and self.gradient_powers else None)

    def add(self, row: int, seen: Any, backward: Sums | None) -> None:
        """Add them to a row."""
        if isinstance(seen, tuple) and isinstance(backward, tuple):
            self.buffer.add(row, self.at, seen + backward)  # their columns are neighbours
            return
        for at, sums in ((self.at, seen), (self.at + self.columns, backward)):
            if sums is not None:
                self.buffer.add(row, at, sums)

    def hide(self, row: int, *, entry: bool) -> None:
        """The gradient's sums are not seen; at the entry x itself is only read when the gradient arrives."""
        for column in range(0 if entry else self.columns, self.columns + len(self.gradient_powers)):
            self.buffer.hide(row, self.at + column)


class Stranger(AddedUp):
    """A statistic that is not ours: its faults switch off it alone, and what it returns is checked."""

    def __init__(self, statistic: Statistic, buffer: DepositBuffer, at: int, hooks: Hooks) -> None:
        super().__init__(buffer, at)
        self.columns, self.gradient_powers = statistic.columns, statistic.gradient_powers
        self._stranger, self._faults, self._switch = statistic, hooks.faults, hooks.switch

    def look(self, point: Point) -> Sums | None:
        """The forward's sums, None where it failed or it is not its turn."""
        if not is_compiling() and self._stranger.seldom and not self._switch.seldom:
            return None
        return self._sums(self._stranger.look, point, point.x, self.columns)

    def deposit(self, key: PointKey, row: int, seen: Any, gradient: Tensor | None) -> None:
        """Likewise; what are maxima is not added."""
        if seen is not None and (maxima := self._stranger.maxima):
            self.buffer.raise_to(row, self.at + self.columns - maxima, seen[-maxima:])
            seen = seen[:-maxima]
        super().deposit(key, row, seen, gradient)

    def of_gradient(self, gradient: Tensor) -> Sums | None:
        """Likewise of the gradient."""
        return self._sums(self._stranger.gradient_sums, gradient, gradient, len(self.gradient_powers))

    def _sums(self, function: Callable[[Any], Tensor], given: Any, x: Tensor, count: int) -> Sums | None:
        with torch.no_grad(), full_precision(x):
            if is_compiling():  # a fault breaks the graph there, and the hook with it
                return self._checked(function, given, count)
            sums: Tensor | None = self._faults.guard(self._stranger.fuse, self._checked, function, given, count)
        return sums.double().numpy() if sums is not None and sums.is_cpu else sums

    def _checked(self, function: Callable[[Any], Tensor], given: Any, count: int) -> Tensor:
        sums = torch.as_tensor(function(given))
        if sums.shape != (count,):
            raise FlowscopeError(
                f"{type(self._stranger).__name__}.{function.__name__}: got sums of shape {tuple(sums.shape)}, expected "
                f"({count},), one a column."
            )
        return sums.detach()

    def read(self, out: RecordBuilder, flow: FlowStep) -> None:
        """The statistic's values, NaN where a point was not seen; nothing where it failed or it was not its turn."""
        if self._stranger.seldom and not self._columns(flow.rows).any():
            return
        values = self._faults.guard(self._stranger.fuse, self._values, flow.rows)
        for name, metric in (values or {}).items():
            out.add(name, metric, flow.labels)

    def _values(self, rows: Array) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            found = self._stranger.values(self._columns(rows).copy())
        named = found if isinstance(found, Mapping) else {self._stranger.name: found}
        return {name: self._seen(values, rows) for name, values in named.items()}

    def _columns(self, rows: Array) -> Array:
        return rows[:, self.at : self.at + self.columns + len(self.gradient_powers)]

    def _seen(self, given: Array, rows: Array) -> Array:
        values = np.asarray(given, dtype=np.float64)
        if values.shape != (len(rows),):
            raise FlowscopeError(
                f"{type(self._stranger).__name__}.values: got shape {values.shape}, expected ({len(rows)},), a number "
                "a point."
            )
        return np.where(rows[:, ELEMENTS] > 0, values, np.nan)


def placed(statistics: Sequence[Statistic], start: int) -> tuple[list[tuple[Statistic, int]], int]:
    """Each statistic with where its columns begin in a row, one behind the other from `start` on; where they end."""
    ends = list(accumulate((s.columns + len(s.gradient_powers) for s in statistics), initial=start))
    return list(zip(statistics, ends[:-1], strict=True)), ends[-1]


class Deposits:
    """The rows of one flow's points, and what is measured there."""

    def __init__(self, buffer: DepositBuffer, measures: Sequence[PointMeasure]) -> None:
        self.buffer, self.measures = buffer, measures
        self.numbers: dict[PointKey, int] = {}
        self.sharded: set[PointKey] = set()
        """Points of which ranks of the same batch hold a part each: they add up too."""
        self._entry: list[Any] | None = None
        """What was seen at an x_0 without gradient waits for that of the next point."""

    def row(self, key: PointKey) -> int:
        """The row of a point, reserved where it is new."""
        row = self.numbers.get(key)
        if row is None:
            row = self.numbers[key] = self.buffer.new_row()
        return row

    def begin_pass(self) -> None:
        """A pass through the flow begins."""
        self._entry = None
        for measure in self.measures:
            measure.begin_pass()

    def look(
        self,
        key: PointKey,
        x: Tensor,
        reader: AxisReader,
        *,
        follows: bool = True,
        before: Tensor | None = None,
        beside: Sequence[Tensor] = (),
    ) -> list[Any]:
        """Measure a hidden state: what waits for its gradient."""
        x = x.detach()
        part = local(x)
        if part is not x and any(placement.is_shard() for placement in x.placements):  # type: ignore[attr-defined]
            self.sharded.add(key)
        point = Point(key, part, reader, follows, before, beside)
        return [measure.look(point) for measure in self.measures]

    def pass_by(self, key: PointKey, x: Tensor, reader: AxisReader) -> None:
        """A hidden state without gradient was seen."""
        point = Point(key, local(x.detach()), reader)
        for measure in self.measures:
            measure.pass_by(point)

    def hold_entry(self, seen: list[Any] | None) -> None:
        """What was seen at an x_0 without gradient waits for the next point's; None: x_0 has a gradient of its own."""
        self._entry = seen

    def take_entry(self) -> list[Any] | None:
        """What waits of x_0, once."""
        entry, self._entry = self._entry, None
        return entry

    def deposit(self, key: PointKey, seen: list[Any], gradient: Tensor | None) -> None:
        """Add to the point's row what was seen in the forward, and what the gradient shows."""
        row = self.row(key)
        for measure, waiting in zip(self.measures, seen, strict=True):
            measure.deposit(key, row, waiting, gradient)

    def hide(self, key: PointKey) -> None:
        """Compiled: the next block changed this point in place. What its hook gets is a part of the gradient: NaN."""
        if (row := self.numbers.get(key)) is not None:
            for measure in self.measures:
                measure.hide(row, entry=key[0] == ENTRY)

    def gradient_powers(self) -> Array:
        """The power of the gradient that is added up in each column: 0 for sums of the forward, and for counts."""
        powers = np.zeros(self.buffer.columns)
        for measure in self.measures:
            if isinstance(measure, AddedUp):
                at = measure.at + measure.columns
                powers[at : at + len(measure.gradient_powers)] = measure.gradient_powers
        return powers

    def forget(self) -> None:
        """What backward deposited counts no more."""
        for measure in self.measures:
            measure.forget()
