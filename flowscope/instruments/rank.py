"""Effective rank of hidden states and the cosines between all points: slow schedule, computed on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.calls import PointKey
from flowscope.hooks.hooks import Switch
from flowscope.hooks.points import FlowStep, Point, PointMeasure
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.record_builder import RecordBuilder
from flowscope.sums import matrices, statistics
from flowscope.sums.statistics import BACKWARDS, ELEMENTS, full_precision

MATRIX_POINTS = 128
"""The cosine matrix has at most so many evenly spaced points."""

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
        self._kept: dict[PointKey, tuple[Tensor, Tensor]] = {}

    def look(self, point: Point) -> tuple[Tensor, Tensor] | None:
        """[64, 64] and [16, D]."""
        if is_compiling() or not self._switch.slow:  # asked first, else its flag would be a guard of the graph
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
            self._kept[key] = seen

    def forget(self) -> None:
        """Of the step that ended."""
        self._kept.clear()

    def take(self) -> dict[PointKey, list[Tensor]]:
        """The Gram matrix of each point, and of `MATRIX_POINTS` of them the positions too."""
        shown = set(sorted(self._kept)[:: -(-len(self._kept) // MATRIX_POINTS) or 1])
        return {key: [gram, some] if key in shown else [gram] for key, (gram, some) in self._kept.items()}

    def read(self, out: RecordBuilder, flow: FlowStep) -> None:
        """Of a step on the slow schedule."""
        kept = [flow.kept.get(key, []) for key in flow.points]
        if any(kept):
            ranks = [matrices.effective_rank_of_gram(torch.from_numpy(of[0])) if of else np.nan for of in kept]
            out.add("effective_rank", np.array(ranks), flow.labels)
        held = np.array([len(of) > 1 for of in kept], dtype=bool)
        units = [of[1] for of in kept if len(of) > 1]
        # states of another size (after a stride) have other positions: no cosine between them
        sizes = np.round(flow.rows[held, ELEMENTS] / flow.rows[held, BACKWARDS])
        if len(units) > 1 and len({u.shape for u in units}) == 1 and len(set(sizes.tolist())) == 1:
            matrix = matrices.cosine_matrix(torch.from_numpy(np.stack(units)))
            out.add("cosine_matrix", matrix, [label for label, shown in zip(flow.labels, held, strict=True) if shown])
