"""Whether steps were unusual, judged by the run's own recent ones: what tells a fault of the steps from other data."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.rates import largest_rate
from flowscope.records import Record

RECENT = 20
"""So many records make what is usual."""
ENOUGH = 5
"""So many it needs."""
FACTOR = 4.0
"""A step (or rate) this many times as large as the largest recent one is unusual ..."""
LEAST_UPDATE = 0.05
"""... where it changes the weights by this share of their norm at least,"""
LEAST_DRIFT = 0.05
"""or the norm itself changed by this share between two records."""
GRADIENT = 8.0
"""A gradient this many times the recent median announces a jump, where it comes before it."""


class Strain:
    """The course of a run's steps. Its numbers are kept in a detector's `state`.

    Args:
        kept: `begins_with` at first.
    """

    begins_with: ClassVar[dict[str, Any]] = {
        "updates": deque(maxlen=RECENT),
        "gradients": deque(maxlen=RECENT),
        "rates": deque(maxlen=RECENT),
        "norm": math.nan,
        "drift": 0.0,
        "odd": -math.inf,
        "announced": -math.inf,
        "step": -math.inf,
    }

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def look(self, record: Record) -> None:
        """Judge this record by those before it, then learn from it; an unusual one is not learned."""
        kept, step = self.kept, record.step
        norm, update, gradient = _norm(record), _update(record), _gradient(record)
        if not math.isfinite(update):
            return
        kept["step"] = step
        known = len(kept["updates"]) >= ENOUGH
        drift = abs(norm - kept["norm"]) / norm if math.isfinite(kept["norm"]) and norm > 0 else 0.0
        rate = largest_rate(record)
        large = update > max(LEAST_UPDATE, FACTOR * max(kept["updates"], default=math.inf))
        far = drift > max(LEAST_DRIFT, FACTOR * kept["drift"])
        fast = bool(kept["rates"]) and rate > FACTOR / 2 * max(kept["rates"])
        odd = known and (large or far or fast)
        if odd:
            kept["odd"] = step
        if known and gradient > GRADIENT * median(kept["gradients"]):
            kept["announced"] = step
        kept["norm"] = norm
        if not odd:
            kept["drift"] = max(kept["drift"], drift)
            kept["updates"].append(update)
            kept["gradients"].append(gradient)
            if math.isfinite(rate):
                kept["rates"].append(rate)

    def before(self, onset: int) -> bool | None:
        """Whether steps were unusual when a loss began to rise at this step; None where nothing is known of steps.

        A gradient that is large only after the loss rose is a consequence of it.
        """
        kept = self.kept
        if len(kept["updates"]) < ENOUGH:
            return None
        recent = onset - RECENT
        return bool(kept["odd"] >= recent or recent <= kept["announced"] < onset)


def _norm(record: Record) -> float:
    """The norm of all weights together."""
    norms = record.metrics.get("param_norm")
    return math.nan if norms is None else float(np.sqrt(np.nansum(np.square(norms))))


def _update(record: Record) -> float:
    """|dw| / |w| of all weights together; NaN where it was not measured."""
    norms, ratio = record.metrics.get("param_norm"), record.metrics.get("update_ratio")
    if norms is None or ratio is None or norms.shape != ratio.shape or bool(np.isnan(ratio).all()):
        return math.nan
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.nansum(np.square(norms * ratio)) / np.nansum(np.square(norms))))


def _gradient(record: Record) -> float:
    """The norm of all gradients together."""
    norms = record.metrics.get("param_grad_norm_raw")
    norms = record.metrics.get("param_grad_norm") if norms is None or bool(np.isnan(norms).all()) else norms
    return math.nan if norms is None else float(np.sqrt(np.nansum(np.square(norms))))
