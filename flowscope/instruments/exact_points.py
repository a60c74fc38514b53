"""The hidden states and their gradients at all points, told to the bit: what two runs are compared by."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowscope.hooks.calls import PointKey
from flowscope.hooks.hooks import Switch
from flowscope.hooks.points import AddedUp, FlowStep, Point
from flowscope.metrics import Metric
from flowscope.model.hidden_state import AxisReader, is_compiling
from flowscope.record_builder import RecordBuilder
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.fingerprints import COLUMNS, PROJECTIONS, fingerprints
from flowscope.sums.statistics import full_precision, real

_exact = partial(Metric, shape="table", drawn=False, exact=True)
METRICS = (
    _exact(
        "exact_states",
        "Of each hidden state in the first steps: a checksum of every bit, the sum of squares, projections of it.",
        formula="checksum, ‖x‖², sum_b <r_k, x_b>, sum_b <r_k, x_b>² for fixed signs r_k",
    ),
    _exact(
        "exact_gradients",
        "The same of the gradient of each hidden state.",
        formula="as exact_states",
        of_gradient=True,
    ),
)
POWERS = (0, 2, *[1] * PROJECTIONS, *[2] * PROJECTIONS)
"""Of the gradient, in each column of its fingerprint."""


class ExactPoints(AddedUp):
    """Fingerprints of each hidden state and its gradient: in the first sampled steps, in compiled code in all."""

    columns = COLUMNS
    gradient_powers = POWERS

    def __init__(self, buffer: DepositBuffer, at: int, switch: Switch) -> None:
        super().__init__(buffer, at)
        self._switch = switch

    def _off(self) -> bool:
        # compiled: the same in all sampled steps, so that there are two graphs
        return not (is_compiling() or self._switch.exact)

    def look(self, point: Point) -> tuple[Tensor, AxisReader, torch.Size] | None:
        """[COLUMNS] of a hidden state, and how its gradient is laid out."""
        return None if self._off() else (_fingerprint(point.x, point.reader), point.reader, point.x.shape)

    def deposit(self, key: PointKey, row: int, seen: Any, gradient: Tensor | None) -> None:
        """Add both."""
        if seen is None:
            return
        states, reader, shape = seen
        self.buffer.add(row, self.at, states)
        if gradient is not None:
            if gradient.dim() < len(shape) and gradient.shape[-1] == shape[-1]:
                gradient = gradient.reshape(shape)  # of the product [B T, D] that a Linear's output is a view of
            self.buffer.add(row, self.at + self.columns, _fingerprint(gradient, reader))

    def read(self, out: RecordBuilder, flow: FlowStep) -> None:
        """Nothing where nothing was looked at."""
        middle, end = self.at + self.columns, self.at + 2 * self.columns
        for name, rows in (
            ("exact_states", flow.rows[:, self.at : middle]),
            ("exact_gradients", flow.rows[:, middle:end]),
        ):
            if rows.any():
                out.add(name, rows, flow.labels)


def _fingerprint(x: Tensor, reader: AxisReader) -> Tensor:
    states, axis, _ = reader.read(x)
    with torch.no_grad(), full_precision(states):
        return fingerprints(real(states)[None], axis)[0]
