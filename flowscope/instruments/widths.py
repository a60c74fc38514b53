"""Width of the hidden states of a flow that concatenates (DenseNet)."""

from __future__ import annotations

from flowscope.hooks.calls import PointKey
from flowscope.hooks.points import Point, PointMeasure
from flowscope.metrics import Metric
from flowscope.probes.layout import is_compiling

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
        self.widths: dict[PointKey, int] = {}

    def look(self, point: Point) -> None:
        """Nothing has to wait: a width is no sum."""
        if not is_compiling():
            states, axis, _ = point.reader.read(point.x)
            self.widths[point.key] = states.shape[axis]
