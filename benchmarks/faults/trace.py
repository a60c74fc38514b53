"""A published trace, replayed: the first loss spike of BLOOM-176B (12 April 2022), iterations 31209 to 31222.

Loss and gradient norm of each iteration from BigScience's chronicles (Apache-2.0). The gradient norm is four times its
level at 31215 and 66 times at 31217; the loss jumps at 31219.
"""

from __future__ import annotations

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors import DetectorSet
from flowscope.records import Alert, FlowLayout, Record, RunHeader

TRACE = (
    (31214, 2.199, 0.242),
    (31215, 2.220, 0.947),
    (31216, 2.595, 2.390),
    (31217, 2.242, 15.886),
    (31218, 2.345, 145.1),
    (31219, 5.098, 960.4),
    (31220, 3.492, 353.2),
    (31221, 3.213, 379.3),
    (31222, 2.805, 650.2),
    (31250, 2.216, 0.267),
    (31251, 2.236, 0.205),
)
"""(iteration, loss, gradient norm)."""
MOVES, LOSS_JUMPS = 31215, 31219


def records(before: int = 120, seed: int = 0) -> tuple[RunHeader, list[Record]]:
    """The trace behind `before` iterations at the level that is reported for them: loss 2.1-2.46, norm .13-.17."""
    random = np.random.default_rng(seed)
    start = TRACE[0][0] - before
    usual = [(start + k, random.uniform(2.1, 2.46), random.uniform(0.13, 0.17)) for k in range(before)]
    header = RunHeader("0", (FlowLayout("model", "blocks", ("model",), ()),), {"param_norm": ("model.weight",)})
    out = []
    for step, loss, norm in (*usual, *TRACE):
        metrics = {
            "param_grad_norm": np.array([norm]),
            "grad_norm": np.array([norm]),
            "param_norm": np.array([1.0]),
            "step_losses": np.array([loss]),
        }
        out.append(Record(step, loss, metrics, metric_labels={"param_norm": ("model.weight",)}))
    return header, out


def replay(**limits: float) -> list[Alert]:
    """The alerts of the default detectors on the trace."""
    header, trace = records()
    detectors = DetectorSet(WatchConfig(**limits))
    return [alert for record in trace for alert in detectors.check(record, header)]
