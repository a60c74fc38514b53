"""Gradient flow: the norms of hidden states and of their gradients at every point, and their non-finite entries."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor

from flowscope.hooks.calls import PointKey
from flowscope.hooks.points import AddedUp, FlowStep, Point
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.record_builder import RecordBuilder
from flowscope.sums import point_metrics, statistics
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.statistics import Sums

_gradient = partial(Metric, view="Gradient", scale="log", of_gradient=True)
_first = partial(Metric, view="Finiteness", unit="number of the call", healthy="missing", drawn=False)
_count = partial(Metric, view="Finiteness", unit="count")
METRICS = (
    _gradient(
        "gradient_product",
        "Share of the last point's gradient that arrives at each depth.",
        formula="‖dL/dx_l‖ / ‖dL/dx_L‖",
        healthy="0.1 to 10; alert under 0.001 (in time 1e-8)",
        limits=("vanishing_product", "exploding_product"),
        logged=True,
        charted="log",
        opens=True,
    ),
    _gradient(
        "gain",
        "What one block does to the gradient that passes back through it.",
        formula="‖dL/dx_{l-1}‖ / ‖dL/dx_l‖",
        healthy="about 1",
        rows="blocks",
        logged=True,
        charted="linear",
    ),
    _gradient(
        "grad_norm",
        "Norm of the gradient at each depth. Compare along depth, not between models.",
        formula="‖dL/dx_l‖",
        unit="loss / activation",
        times_loss_scale=True,
    ),
    _gradient(
        "grad_rms",
        "Gradient norm per entry: comparable between points of different size.",
        formula="‖dL/dx_l‖ / sqrt(entries of x_l)",
        unit="loss / activation",
        times_loss_scale=True,
    ),
    Metric(
        "act_rms",
        "Size of the hidden state. Growing slowly with depth is normal in Pre-LN; jumps are not.",
        formula="sqrt(mean x_l²)",
        unit="activation",
        source="arXiv 2002.04745",
        view="Depth",
        scale="log",
        logged=True,
        charted="linear",
    ),
    _count("nonfinite", "Count of inf and NaN in the activation.", healthy="0", opens=True),
    _count("nonfinite_grad", "Count of inf and NaN in the gradient.", healthy="0", of_gradient=True),
    _first(
        "nonfinite_call",
        "The point's first call of the step that held an inf or NaN. Missing where none did.",
    ),
    _first(
        "nonfinite_grad_call",
        "The same of the gradients that arrived at the point.",
        of_gradient=True,
    ),
    _count("backward_calls", "Gradients that arrived in the step."),
    _count("forward_calls", "Forward calls in the step."),
    _count("tracked_calls", "Forward calls whose output asked for a gradient."),
)


class Norms(AddedUp):
    """Sum of squares, non-finite entries, number of entries of x, first bad call; of dL/dx, the third counts gradients.

    Which call of its point a tensor is tells what was bad first in time: a second micro-batch may go bad at a point
    that lies before that of the first.
    """

    columns = 4
    gradient_powers = (2, 0, 0, 0)

    def __init__(self, buffer: DepositBuffer, at: int) -> None:
        super().__init__(buffer, at)
        self._calls: Counter[PointKey] = Counter()
        self._arrived: Counter[PointKey] = Counter()

    def look(self, point: Point) -> Sums:
        """[4] of a hidden state."""
        return statistics.head(point.x, float(point.x.numel()), self._weight(self._calls, point.key))

    def deposit(self, key: PointKey, row: int, seen: Any, gradient: Tensor | None) -> None:
        """Add the sums of both."""
        weight = self._weight(self._arrived, key)
        self.add(row, seen, None if gradient is None else statistics.head(gradient, 1.0, weight))

    @staticmethod
    def _weight(calls: Counter[PointKey], key: PointKey) -> float:
        """That of the next call; compiled code cannot count, its calls are taken for the first."""
        if is_compiling():
            return 0.0
        calls[key] += 1
        return statistics.weight_of_call(calls[key])

    def forget(self) -> None:
        """Calls are counted from 1 again."""
        self._calls.clear()
        self._arrived.clear()

    def take(self) -> dict[PointKey, list[Tensor]]:
        """Nothing; likewise."""
        self.forget()
        return {}

    def hide(self, row: int, *, entry: bool) -> None:
        """Only the squares are wrong: how often a gradient came is known."""
        self.buffer.hide(row, self.at + self.columns)
        if entry:
            self.buffer.hide(row, self.at)

    def read(self, out: RecordBuilder, flow: FlowStep) -> None:
        """The family "flow"."""
        out.along(point_metrics.flow_metrics(flow.rows), flow.labels)
        for name, counted in zip(("forward_calls", "tracked_calls"), flow.calls, strict=True):
            out.add(name, counted, flow.labels)
