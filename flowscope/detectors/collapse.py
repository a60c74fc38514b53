"""`token_collapse` and `representation_collapse`: depth that no longer tells tokens, samples or layers apart.

Adjacent cosines near 1 are healthy in Keel and DeepNorm, so no cosine between layers has an absolute limit here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors.detector import Array, Detector, Finding, Flags, FlowView, each_flow, pack, unpack
from flowscope.records import Record, RunHeader, Severity

CLEARLY_LOWER = 10.0
"""1 - token cosine of the input must exceed the limit's by this factor: tokens were different when they came in."""
HEALTHY_RANK = 4.0
"""Below this effective rank at the start (few classes, narrow heads, a batch of one) a rank says nothing."""
SUPPORTING_PRODUCT = 0.3
"""A gradient product below this supports a token collapse; healthy Pre-LN models stay above 1."""
FROM_START_RECORDS = 4
"""A rank that was low from the start must stay so for this many records that have one."""


class TokenCollapse(Detector):
    """All tokens of a sequence have become the same vector by the last points, and were not at the first."""

    kind = "token_collapse"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a flow at most."""
        for view in each_flow(record, header):
            if view.layout.kind == "time":
                continue
            cosine = view.get("token_cosine")
            finding = Finding(self.kind, flow=view.layout.name, level="unseen") if cosine is None else None
            if cosine is not None and cosine.size >= 3:
                finding = self._judge(view, 1 - cosine)
            if finding is not None:
                yield finding

    def _judge(self, view: FlowView, distance: Array) -> Finding | None:
        """`distance` is 1 - token cosine [L+1]."""
        limit = 1 - self.config.token_cosine
        if not distance[0] > CLEARLY_LOWER * limit:  # also where x_0 was not seen
            return None
        beyond = distance < limit
        trailing = _trailing(beyond)
        depth = distance.size - 1
        if trailing < max(2, math.ceil(depth / (8 if _falling(view) else 3))):
            close = _trailing(distance < limit * self.config.release_factor) > 0
            return Finding(self.kind, flow=view.layout.name, level="near") if close else None
        where = distance.size - trailing
        severity: Severity = "error" if 2 * _trailing(distance < limit / 10) > depth else "warning"
        return Finding(
            self.kind,
            view.point(where),
            severity,
            float(1 - distance[-1]),
            1 - limit,
            f"the mean cosine between different tokens of a sequence is {1 - distance[-1]:.5f} at the last of "
            f"{depth} blocks and {1 - distance[0]:.3f} at {view.point(0)} (limit {1 - limit:.4f}, crossed at "
            f"{view.point(where)}): what tells tokens apart is lost",
            "lower the learning rate or lengthen its warm-up; keep a residual path around attention; if the blocks are "
            'post-norm, make them pre-norm or call flowscope.wrap(model, mode="keel")',
            view.layout.name,
            immediate=severity == "error",
        )


class RepresentationCollapse(Detector):
    """Blocks have become copies of their input, or all samples end in one vector; each against the run's own start."""

    kind = "representation_collapse"
    yields_to = frozenset({"token_collapse", "vanishing_gradient"})

    def __init__(self, config: WatchConfig) -> None:
        super().__init__(config)
        self._first_cosines: dict[str, list[Array]] = {}
        self._first_to_input: dict[str, float] = {}
        self._first_rank: dict[str, Array] = {}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """Two causes a flow: copies (cosines) and rank."""
        for view in each_flow(record, header):
            if view.layout.kind == "time":
                continue
            for finding in (self._copies(view), self._rank(view)):
                if finding is not None:
                    yield finding

    def _copies(self, view: FlowView) -> Finding | None:
        cosine, to_input, name = view.get("cosine"), view.get("cosine_to_input"), view.layout.name
        if cosine is None or to_input is None or np.isnan(to_input[-1]) or cosine.size < 2:
            return Finding(self.kind, flow=name, cause="copies", level="unseen")
        first = self._first_cosines.setdefault(name, [])
        if len(first) < self.config.baseline_records:
            first.append(cosine)
            self._first_to_input.setdefault(name, float(to_input[-1]))
            return None
        if any(values.shape != cosine.shape for values in first):
            return None
        limit, base = 1 - self.config.representation_cosine, 1 - np.median(first, axis=0)
        came_closer = 1 - self._first_to_input[name] > self.config.drift * (1 - to_input[-1])
        distance = np.maximum(1 - cosine, 1e-12)
        copies = (distance < limit) & (base > self.config.drift * distance)
        if copies.sum() * 2 < cosine.size or not came_closer:
            close = ((distance < limit * self.config.release_factor) & (base > limit)).sum() * 2 >= cosine.size
            return Finding(self.kind, flow=name, cause="copies", level="near") if close else None
        where = int(np.argmax(copies))
        return Finding(
            self.kind,
            view.block(where),
            "warning",
            float(np.nanmedian(cosine)),
            1 - limit,
            f"{int(copies.sum())} of {cosine.size} blocks return a copy of their input (median cosine "
            f"{np.nanmedian(cosine):.6f}, at the start {1 - np.nanmedian(base):.3f}); cosine of the last point to the "
            f"first {to_input[-1]:.4f}, at the start {self._first_to_input[name]:.3f}",
            "check that the blocks' learning rate and initialisation are not near zero, nor weight decay too strong; "
            "scale the branches up or remove blocks",
            name,
            cause="copies",
        )

    def _rank(self, view: FlowView) -> Finding | None:
        rank, name = view.get("effective_rank"), view.layout.name
        if rank is None or rank.size < 2:
            return Finding(self.kind, flow=name, cause="rank", level="unseen")
        first = self._first_rank.setdefault(name, rank.copy())
        if first.shape != rank.shape:
            return None
        limit = self.config.collapsed_rank
        # A head of one unit has rank 1 by construction, so a low rank at the start says something only where the layer
        # before it has it too; untrained layers whose biases outweigh their weights come close and grow out of it.
        strict = 1 + (limit - 1) / self.config.release_factor
        from_start = _trailing(first < strict) >= 2
        if from_start:
            limit = strict
        needed = 2 if from_start else 1
        if not rank[0] >= HEALTHY_RANK or not (from_start or first[-1] >= HEALTHY_RANK):
            return None
        trailing = _trailing(rank < limit)
        if trailing < needed:
            close = _trailing(rank < 1 + (limit - 1) * self.config.release_factor) >= needed
            return Finding(self.kind, flow=name, cause="rank", level="near") if close else None
        where = rank.size - trailing
        return Finding(
            self.kind,
            view.point(where),
            "warning",
            float(rank[-1]),
            limit,
            f"all samples end in one vector: effective rank {rank[-1]:.2f} at {view.point(rank.size - 1)} (limit "
            f"{limit:.2f}, crossed at {view.point(where)}), {rank[0]:.1f} at {view.point(0)}, "
            f"{first[-1]:.1f} there at the start",
            "check the activation (no softmax between layers) and the initialisation; in self-supervised training add "
            "the stop-gradient, the predictor or a variance term",
            name,
            records=FROM_START_RECORDS if from_start else None,
            cause="rank",
        )

    def state_dict(self) -> dict[str, Any]:
        """The first cosines and ranks by flow."""
        return {
            "cosines": {name: [pack(v) for v in rows] for name, rows in self._first_cosines.items()},
            "to_input": dict(self._first_to_input),
            "rank": {name: pack(v) for name, v in self._first_rank.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._first_cosines = {name: [unpack(v) for v in rows] for name, rows in state["cosines"].items()}
        self._first_to_input = dict(state["to_input"])
        self._first_rank = {name: unpack(v) for name, v in state["rank"].items()}


def _falling(view: FlowView) -> bool:
    """Whether the gradient is also getting lost: then less of the depth needs to have collapsed to tell."""
    product = view.get("gradient_product")
    return product is not None and bool((product < SUPPORTING_PRODUCT).any())


def _trailing(flags: Flags) -> int:
    """How many entries at the end are true in a row."""
    wrong = np.flatnonzero(~flags)
    return int(flags.size if wrong.size == 0 else flags.size - 1 - wrong[-1])
