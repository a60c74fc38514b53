"""What blocks return beside the hidden state: its non-finite entries, which name the block that spoils a loss.

A coupling of a flow returns the log of its scale so, a layer of experts its balance loss: all hidden states are finite
and the loss is not.
"""

from __future__ import annotations

import numpy as np

from flowscope.hooks.points import AddedUp, FlowStep, Point
from flowscope.metrics import Metric
from flowscope.record_builder import RecordBuilder
from flowscope.sums.payload import local
from flowscope.sums.statistics import Sums, nonfinite_sum

TENSORS = 3
"""So many further tensors are looked at, none larger than the hidden state."""

METRICS = (
    Metric(
        "nonfinite_beside",
        "Count of inf and NaN in what a block returns beside the hidden state. Missing where there is none.",
        view="Finiteness",
        unit="count",
        healthy="none, or -inf where something is masked",
        drawn=False,
    ),
)


class Beside(AddedUp):
    """Count of non-finite entries, once the block's gradient has arrived."""

    columns, gradient_powers = 1, ()

    def look(self, point: Point) -> Sums | None:
        """[1] of all tensors together; None where there is nothing to add."""
        if not point.beside:
            return None
        small = [x for x in point.beside if x.requires_grad and x.numel() <= point.x.numel()]
        counts = [nonfinite_sum(local(x.detach())) for x in small[:TENSORS]]
        found = [count for count in counts if count is not None]
        return sum(found[1:], found[0]) if found else None

    def read(self, out: RecordBuilder, flow: FlowStep) -> None:
        """Nothing where all is finite, or not known."""
        counts = flow.rows[:, self.at]
        if bool((counts > 0).any()):
            out.add("nonfinite_beside", np.where(counts > 0, counts, 0.0), flow.labels)
