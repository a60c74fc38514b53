"""Steps that have ended, until they are records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flowscope.faults import Faults
from flowscope.observation.snapshot import Snapshot
from flowscope.records import Record
from flowscope.steps.losses import Losses, StepLoss
from flowscope.sums.buffer import HostCopy

FAILED = object()


@dataclass(eq=False)
class EndedStep:
    """A step that ended, until it becomes a record.

    Attributes:
        loss: the loss given for it, and its number.
        sampled: whether it becomes a record.
        snapshot: what it deposited; None where it was not sampled, or could not be taken.
        canary: its counts of non-finite entries; None where they could not be taken.
        flags: what is special about it.
        scale: the GradScaler's scale in its backward, None without a scaler.
        found_inf: above 0 where the gradients of an optimizer held inf (the scaler's, or a fused optimizer's own).
        awaited: whether numbers of other ranks are still to come.
        record: the record, where it was made before its time (`Recorder.prepare`).
        rank_gap: [N] the gap between the ranks of each parameter, where they were compared.
        unshared: metrics that only this rank has: shown, and not judged.
        note: what is special about its numbers.
    """

    loss: StepLoss
    sampled: bool
    snapshot: Snapshot | None = None
    canary: HostCopy | None = None
    flags: tuple[str, ...] = ()
    scale: Any = None
    found_inf: list[Tensor] = field(default_factory=list)
    awaited: bool = False
    record: Record | None = None
    rank_gap: NDArray[np.float64] | None = None
    unshared: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    note: str = ""

    @property
    def step(self) -> int:
        """Its number."""
        return self.loss.step

    def ready(self) -> bool:
        """Whether finishing it would not wait for a copy."""
        copies = (self.canary, self.snapshot, self.loss)
        return not self.awaited and all(copy is None or copy.ready() for copy in copies)


class EndedSteps(deque[EndedStep]):
    """The steps that have ended and are no records yet, oldest first.

    Args:
        take: makes a record of one.
        missed: makes do without, where that fails.
        pass_by: takes the loss of a step that becomes no record.
        losses: tell whether the newest may still get a loss.
        faults: who is told where it fails.

    Attributes:
        losses: which step a loss belongs to.
        pass_by: takes the loss of a step that becomes no record.
        found_inf: of the step under way, above 0 where the gradients of an optimizer held inf.
    """

    def __init__(
        self,
        take: Callable[[EndedStep], object],
        missed: Callable[[EndedStep], None],
        pass_by: Callable[[StepLoss], None],
        losses: Losses,
        faults: Faults,
    ) -> None:
        super().__init__()
        self._take, self._missed, self._faults = take, missed, faults
        self.pass_by, self.losses = pass_by, losses
        self.found_inf: list[Tensor] = []
        self._finishing = False

    @property
    def newest(self) -> EndedStep | None:
        """The step that ended last, None where it is a record already."""
        return self[-1] if self else None

    def finish(self, *, everything: bool = False, newest: bool = False) -> None:
        """Turn them into records, as far as their copies are there.

        Args:
            everything: wait for the copies.
            newest: also the one that ended last; else it waits for its loss until the next one ends.
        """
        if self._finishing:  # an alert's callback reads records
            return
        self._finishing = True
        try:
            while self:
                oldest = self[0]
                waits = oldest.loss is self.losses.unclaimed and not newest
                if not everything and (waits or not oldest.ready()):
                    return
                self.popleft()
                if self._faults.attempt("records", self._take, oldest, otherwise=FAILED) is FAILED:
                    self._missed(oldest)
        finally:
            self._finishing = False
