"""Non-finite values on every step, sampled or not: counts that the first bad tensor leaves behind."""

from __future__ import annotations

import math

from torch import Tensor

from flowscope.sums import statistics
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.payload import local
from flowscope.sums.statistics import is_host


class Canary:
    """Sticky counts of non-finite entries, kept on every step: root inputs, x_L, dL/dx_0, loss."""

    KINDS = ("input", "forward", "backward", "loss")

    def __init__(self) -> None:
        self.buffer = DepositBuffer(1)
        for _ in self.KINDS:
            self.buffer.new_row()

    def count(self, kind: str, x: Tensor | None) -> None:
        """Add the number of non-finite entries of x (None: it cannot be seen)."""
        if x is None:
            return
        x = local(x.detach())
        if is_host(x) and math.isfinite(abs(x.sum().item())):
            return  # a finite sum has no infinite or NaN term; one that is not may only have overflowed
        self.buffer.add(self.KINDS.index(kind), 0, statistics.nonfinite_count(x))
