"""Non-finite values on every step, sampled or not: counts that the first bad tensor leaves behind."""

from __future__ import annotations

from torch import Tensor

from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.payload import local
from flowscope.sums.statistics import nonfinite_sum


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
        if (count := nonfinite_sum(local(x.detach()))) is not None:
            self.buffer.add(self.KINDS.index(kind), 0, count)
