"""Losses between the step that gave them and the record that reads them: no step waits for a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flowscope.probes.buffer import HostCopy

MOST = 1000
"""Losses of so many steps are kept for the next record."""


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


def mean_loss(losses: Sequence[float]) -> float | None:
    """The loss of a step from those given for it; None where none was given."""
    return sum(losses) / len(losses) if losses else None


class LossesSinceRecord:
    """The mean loss of each step since the last record, NaN where none was given."""

    def __init__(self) -> None:
        self._held: deque[float] = deque(maxlen=MOST)

    def add(self, losses: Sequence[float]) -> None:
        """A step ended, for which these losses were given."""
        loss = mean_loss(losses)
        self._held.append(np.nan if loss is None else loss)

    def take(self) -> NDArray[np.float64] | None:
        """Return the losses, oldest first, and start again; None where no step had one."""
        held = np.array(self._held)
        self._held.clear()
        return held if not np.isnan(held).all() else None
