"""Width of the hidden states of a flow that concatenates (DenseNet)."""

from __future__ import annotations

import numpy as np

from flowscope.hooks.calls import PointKey
from flowscope.hooks.points import FlowStep, Point, PointMeasure
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.record_builder import RecordBuilder
from flowscope.sums import point_metrics

METRICS = (
    Metric(
        "group_grad_norm",
        "Gradient of each layer's new features over all their uses (features are concatenated).",
        view="Gradient",
        scale="log",
        of_gradient=True,
        formula="‖dL/dF_l‖",
        unit="loss / activation",
        times_loss_scale=True,
    ),
    Metric("width", "Number of new features of each layer.", unit="features", view="Depth"),
)


class Widths(PointMeasure):
    """How many features each point has."""

    def __init__(self) -> None:
        self._widths: dict[PointKey, int] = {}

    def look(self, point: Point) -> None:
        """Nothing has to wait: a width is no sum."""
        if not is_compiling():
            states, axis, _ = point.reader.read(point.x)
            self._widths[point.key] = states.shape[axis]

    def read(self, out: RecordBuilder, flow: FlowStep) -> None:
        """Features are concatenated: a point's gradient is that of a layer's new features."""
        out.add("group_grad_norm", point_metrics.flow_metrics(flow.rows)["grad_norm"], flow.labels)
        out.add("width", np.array([self._widths.get(key, np.nan) for key in flow.points]), flow.labels)
