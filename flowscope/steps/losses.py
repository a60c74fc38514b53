"""The loss of a step as one token, from the first value given for it to the record that shows it.

No step waits for a device: a loss is read when its record is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flowscope.records import Record
from flowscope.sums.buffer import HostCopy

MOST = 1000
"""Losses of so many steps are kept for the next record."""
RECENT = 32
"""So many of those that were shown say how far losses scatter."""


class LateLoss:
    """A loss on its way from its device: reading it waits for its own copy, not for what was queued behind it."""

    def __init__(self, value: Tensor) -> None:
        self.source = value
        """The loss on its device."""
        self._copy = HostCopy([value.reshape(1)])

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._copy.ready()

    def __float__(self) -> float:
        """The loss."""
        return float(self._copy.read()[0][0])


Value: TypeAlias = LateLoss | float


class StepLoss:
    """The loss of one step: the mean of the values given for it, on this rank or on all of them.

    Attributes:
        step: the step's number; -1 while it is under way.
        values: what was given, numbers or on their way from a device.
    """

    def __init__(self, step: int = -1) -> None:
        self.step = step
        self.values: list[Value] = []
        self._shown_in: Record | None = None
        self._sent = 0
        self._of_ranks = 0.0, 0.0

    def give(self, value: Value) -> None:
        """Add a value; a record that was made (somebody read it) before the first one came gets it still."""
        self.values.append(value)
        if (record := self._shown_in) is not None and record.loss is None:
            record.loss = float(value)
            earlier = record.metrics.get("step_losses", np.full(1, np.nan))
            record.metrics["step_losses"] = np.append(earlier[:-1], record.loss)

    def renumber(self, step: int) -> None:
        """Give the step another number, in its record too."""
        self.step = step
        if self._shown_in is not None:
            self._shown_in.step = step

    def shown_in(self, record: Record) -> None:
        """The record of this step is complete but for what may come late."""
        self._shown_in = record

    def ready(self) -> bool:
        """Whether `mean` would not wait for a copy."""
        return all(value.ready() for value in self.values if isinstance(value, LateLoss))

    def settle(self) -> list[float]:
        """Wait for the copies; returns the values."""
        numbers = [float(value) for value in self.values]
        self.values = [*numbers]
        return numbers

    def mean(self) -> float | None:
        """The loss of the step, None where none was given."""
        numbers = [float(value) for value in self.values]
        return sum(numbers) / len(numbers) if numbers else None

    # -- over ranks ---------------------------------------------------------------------------------------------------

    def send(self) -> list[Any]:
        """The values that entered no sum over ranks so far, on their devices."""
        fresh, self._sent = self.values[self._sent :], len(self.values)
        return [value.source if isinstance(value, LateLoss) else value for value in fresh]

    def receive(self, total: float, count: float) -> None:
        """Take the sum and the number of the values that all ranks have sent."""
        self._of_ranks = self._of_ranks[0] + total, self._of_ranks[1] + count

    @property
    def shared(self) -> bool:
        """Whether a rank has sent a value."""
        return self._of_ranks[1] > 0

    def take_ranks(self) -> None:
        """Put the mean over the ranks in the place of this rank's own values."""
        total, count = self._of_ranks
        self.values = [total / count] if count > 0 else []


class Losses:
    """Decides which step a loss belongs to.

    Attributes:
        under_way: the loss of the step under way.
        unclaimed: that of the step that ended since the last call of `scope.step`: the next call may belong to it.
        given: whether `scope.step` was ever given one.
        silent: whether a step has gone by without one.
        early: whether this loop has given the loss of a step before it ended.
        late: whether it has given one after the model had run again.
        sparse: whether it has left out the loss of a step of which nothing else was looked at.
        at_end: the values that are known only when the step ends (of a launcher that listens to backward passes).
    """

    def __init__(self) -> None:
        self.under_way = StepLoss()
        self.unclaimed: StepLoss | None = None
        self.given = self.silent = self.early = self.late = self.sparse = False
        self.at_end: Callable[[], Iterable[Value]] = tuple

    def end(self, step: int) -> StepLoss:
        """The step under way has ended and has this number."""
        self.unclaimed = ended = self.under_way
        self.under_way = StepLoss()
        self.early |= bool(ended.values)
        ended.values += self.at_end()
        ended.step = step
        return ended

    def none_comes(self) -> bool:
        """Whether this loop gives no losses, as far as it has shown."""
        return self.silent and not self.given

    def claim(self, *, ran: bool) -> StepLoss | None:
        """`scope.step` is called: the step that has ended and that the call belongs to, None for the one under way.

        Args:
            ran: whether the model has run since. A step that has its loss already wants no other then, and none does
                where the loop gives each loss before the optimizer's step: one made again would take the next one's.
        """
        ended, self.unclaimed = self.unclaimed, None
        self.late |= ran and ended is not None
        return None if ended is None or (ran and (self.early or ended.values)) else ended


class LossesSinceRecord:
    """The mean loss of each step since the last record, NaN where none was given.

    Attributes:
        recent: the last finite ones that records have shown.
    """

    def __init__(self) -> None:
        self._held: deque[StepLoss] = deque(maxlen=MOST)
        self.recent: deque[float] = deque(maxlen=RECENT)

    def add(self, loss: StepLoss) -> None:
        """A step ended, and this is its loss."""
        self._held.append(loss)

    def take(self) -> NDArray[np.float64] | None:
        """Return the losses, oldest first, and start again; None where no step had one."""
        means = [loss.mean() for loss in self._held]
        self._held.clear()
        held = np.array([np.nan if mean is None else mean for mean in means])
        self.recent += held[np.isfinite(held)][-RECENT:].tolist()
        return held if not np.isnan(held).all() else None
