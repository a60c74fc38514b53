"""Effective rank of hidden states and the cosines between all points: slow schedule, computed on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowscope.hooks.calls import PointKey
from flowscope.hooks.points import Point, PointMeasure
from flowscope.metrics import Metric
from flowscope.probes import statistics
from flowscope.probes.hooks import Switch
from flowscope.probes.layout import is_compiling
from flowscope.probes.statistics import full_precision

METRICS = (
    Metric(
        "effective_rank",
        "How many directions the tokens of a sequence use. At 1 they are one vector.",
        formula="exp(-sum p log p), p = singular values / their sum",
        unit="directions",
        source="arXiv 2210.02885",
        view="Depth",
        scale="log",
        ranks="first",
    ),
    Metric(
        "cosine_matrix",
        "Cosine of each pair of depths. Bright squares on the diagonal are stretches of blocks that change nothing.",
        formula="mean over positions of cos(x_i, x_j)",
        view="Depth",
        shape="matrix",
        bounds=(0.0, 1.0),
        ranks="first",
    ),
)


class Rank(PointMeasure):
    """Keeps of each point the Gram matrix of 64 positions of one sequence, and 16 positions for cosines."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self.grams: dict[PointKey, Tensor] = {}
        self.slices: dict[PointKey, Tensor] = {}

    def look(self, point: Point) -> tuple[Tensor, Tensor] | None:
        """[64, 64] and [16, D]."""
        if is_compiling() or not self._switch.slow:
            return None
        x = point.x
        with full_precision(x):
            states, axis, _ = point.reader.read(x)
            states = statistics.real_features(statistics.feature_last(states, axis))
            one = (states[:, 0] if states.shape[1] == 1 else states[0])[:64].to(statistics.wide(x.device))
            flat = states.reshape(-1, states.shape[-1])
            some = flat[:: -(-flat.shape[0] // 16)][:16].float()
            return one @ one.T, some / torch.linalg.vector_norm(some, dim=-1, keepdim=True)

    def deposit(self, key: PointKey, row: int, seen: Any, gradient: Tensor | None) -> None:
        """Keep the newest."""
        if seen is not None and gradient is not None:
            self.grams[key], self.slices[key] = seen

    def forget(self) -> None:
        """Of the step that ended."""
        self.grams.clear()
        self.slices.clear()
