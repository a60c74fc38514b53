"""Metrics that no instrument declares: those of the run itself."""

from __future__ import annotations

from flowscope.metrics import Metric

_RUN = (
    Metric(
        "rank_gap",
        "How far ranks differ in a replicated parameter's norm.",
        formula="(max - min) / max over ranks of ‖w‖",
        healthy="0",
        view="Parameters",
        scale="log",
        rows="parameters",
    ),
    Metric(
        "loss_scale", "Scale of the GradScaler in this step's backward.", view="Finiteness", scale="log", rows="model"
    ),
    Metric(
        "canary",
        "Count of inf and NaN at the ends of the model, looked at on every step.",
        unit="count",
        healthy="0",
        view="Finiteness",
        rows="model",
    ),
    Metric("step_losses", "Mean loss of each step since the record before.", unit="loss", rows="model", drawn=False),
)

OTHERS = {metric.name: metric for metric in _RUN}
