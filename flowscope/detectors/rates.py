"""What detectors of updates share: the parameters that are being trained at one record, and the learning rate's course.

A small update is no fault while the learning rate warms up from zero or decays to zero: what a step should change is
judged only where the rate stands still or falls, and is not far below its own peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowscope.detectors.detector import Array, Flags, pack, unpack
from flowscope.records import Record

RISING = 1.001
"""A rate above the last record's by this factor is in its warm-up (or a restart)."""
FAR_BELOW_PEAK = 0.1
"""A rate below this share of its peak has decayed: small updates are what the schedule wants."""


@dataclass(frozen=True)
class Updates:
    """The parameters of a record that an optimizer changes: they got a gradient and their rate is not zero.

    Attributes:
        ratio: update_ratio [P]; norm: param_norm [P]; rate: param_lr [P], NaN where unknown.
        trained: which parameters are judged [P].
    """

    ratio: Array
    norm: Array
    rate: Array
    trained: Flags

    @property
    def overall(self) -> float:
        """|dw| / |w| over all trained parameters together: zero-initialised biases weigh what they are."""
        norm, ratio = self.norm[self.trained], self.ratio[self.trained]
        with np.errstate(over="ignore"):
            return float(np.sqrt(np.square(norm * ratio).sum() / np.square(norm).sum()))

    @property
    def usual(self) -> float:
        """The median of |dw| / |w| over the trained parameters: one huge embedding does not decide it."""
        return float(np.median(self.ratio[self.trained]))


def updates_of(record: Record) -> Updates | None:
    """The record's updates, or None where they were not measured or nothing was trained."""
    ratio, norm = record.metrics.get("update_ratio"), record.metrics.get("param_norm")
    gradient = record.metrics.get("param_grad_norm")
    if ratio is None or norm is None or gradient is None or not ratio.shape == norm.shape == gradient.shape:
        return None
    unknown = np.full(ratio.shape, np.nan)
    rate = _like(record.metrics.get("param_lr"), unknown)
    held = _like(record.metrics.get("param_optimized"), unknown)
    trainable = _like(record.metrics.get("param_trainable"), unknown)
    trained = (gradient > 0) & np.isfinite(ratio) & np.isfinite(norm) & (norm > 0)
    trained &= (rate != 0) & (held != 0) & (trainable != 0)
    return Updates(ratio, norm, rate, trained) if bool(trained.any()) else None


def _like(values: Array | None, default: Array) -> Array:
    return values if values is not None and values.shape == default.shape else default


class RateCourse:
    """The peak and the last value of each parameter's learning rate [P]."""

    def __init__(self) -> None:
        self._peak: Array | None = None
        self._last: Array | None = None

    def working(self, updates: Updates) -> bool:
        """Whether the trained parameters' rates stand still or fall, near their peak; and learn this record's rates.

        Unknown rates count as such. The first record knows no course yet, and counts as standing still.
        """
        rate, peak, last = updates.rate, self._peak, self._last
        if peak is None or last is None or peak.shape != rate.shape:
            peak, last = rate, rate
        self._peak, self._last = np.fmax(peak, rate), rate
        with np.errstate(invalid="ignore"):
            off = (rate > RISING * last) | (rate < FAR_BELOW_PEAK * self._peak)
        return 2 * int((off & updates.trained).sum()) < int(updates.trained.sum())

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: None if v is None else pack(v) for name, v in (("peak", self._peak), ("last", self._last))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._peak, self._last = (None if state[k] is None else unpack(state[k]) for k in ("peak", "last"))
