"""Gradient flow: the norms of hidden states and of their gradients at every point, and their non-finite entries."""

from __future__ import annotations

from torch import Tensor

from flowscope.hooks.points import AddedUp
from flowscope.probes import statistics
from flowscope.probes.statistics import Sums


class Norms:
    """Sum of squares, non-finite entries, and number of entries of x; of dL/dx, the last is its number of gradients."""

    columns = 3
    gradient_powers: tuple[int, ...] = (2, 0, 0)

    def sums(self, x: Tensor) -> Sums:
        """[3] of a hidden state."""
        return statistics.head(x, float(x.numel()))

    def gradient_sums(self, gradient: Tensor) -> Sums:
        """[3] of its gradient."""
        return statistics.head(gradient, 1.0)


class AddedNorms(AddedUp):
    """The norms in the rows of a buffer."""

    def hide(self, row: int, *, entry: bool) -> None:
        """Only the squares are wrong: how often a gradient came is known."""
        self.buffer.hide(row, self.at + self.statistic.columns)
        if entry:
            self.buffer.hide(row, self.at)
