"""What detectors of updates share: the parameters that are being trained at one record, and the learning rate's course.

A small update is no fault while the learning rate warms up from zero or decays to zero: what a step should change is
judged only where the rate stands still or falls, and is not far below its own peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flowscope.detectors.detector import Array, Flags
from flowscope.records import Record, RunHeader

RISING = 1.001
"""A rate above the last record's by this factor is in its warm-up (or a restart)."""
FAR_BELOW_PEAK = 0.1
"""A rate below this share of its peak has decayed: small updates are what the schedule wants."""

SHRUNK, DECAY = 0.8, 0.1
"""A decay of so much that goes with weights of this share of their norm at the start is what shrinks them."""

ALMOST_ZERO = 1e-3
"""A parameter whose norm begins below this share of the median norm starts from nothing (biases, layer scales)."""


@dataclass(frozen=True)
class Updates:
    """The parameters of a record that an optimizer changes: they got a gradient and their rate is not zero.

    Attributes:
        ratio: update_ratio [P]; norm: param_norm [P]; rate: param_lr [P], NaN where unknown.
        trained: which parameters are judged [P]; those that were zero at the start, or almost, are not (|dw| / |w| is
            large there for long, and says nothing).
        working: whether most of their rates stand still or fall, near their peak.
    """

    ratio: Array
    norm: Array
    rate: Array
    trained: Flags
    working: bool

    @property
    def overall(self) -> float:
        """|dw| / |w| over all trained parameters together."""
        norm, ratio = self.norm[self.trained], self.ratio[self.trained]
        with np.errstate(over="ignore"):
            return float(np.sqrt(np.square(norm * ratio).sum() / np.square(norm).sum()))

    @property
    def usual(self) -> float:
        """The median of |dw| / |w| over the trained parameters: one huge embedding does not decide it."""
        return float(np.median(self.ratio[self.trained]))


def updates_of(record: Record, kept: dict[str, Array]) -> Updates | None:
    """The record's updates, or None where they were not measured or nothing was trained.

    A rate that is not known counts as standing still, as every rate does at the first record.

    Args:
        record: the one to read; records come in order.
        kept: empty at first; holds the rates' peak and last value, and where weights began.
    """
    ratio, norm = record.metrics.get("update_ratio"), record.metrics.get("param_norm")
    gradient = record.metrics.get("param_grad_norm")
    if ratio is None or norm is None or gradient is None or not ratio.shape == norm.shape == gradient.shape:
        return None
    unknown = np.full(ratio.shape, np.nan)
    rate = _like(record.metrics.get("param_lr"), unknown)
    held = _like(record.metrics.get("param_optimized"), unknown)
    trainable = _like(record.metrics.get("param_trainable"), unknown)
    last, peak, zero = (_like(kept.get(key), unknown) for key in ("last", "peak", "zero_start"))
    new = np.isnan(zero) & ~np.isnan(norm)
    if new.any():
        zero = np.where(new, norm <= ALMOST_ZERO * float(np.nanmedian(norm)), zero)
    peak = np.fmax(peak, rate)
    kept.update(peak=peak, last=rate, zero_start=zero)
    trained = (gradient > 0) & np.isfinite(ratio) & np.isfinite(norm) & (norm > 0) & (zero == 0)
    trained &= (rate != 0) & (held != 0) & (trainable != 0)
    if not trained.any():
        return None
    off = (rate > RISING * last) | (rate < FAR_BELOW_PEAK * peak)
    return Updates(ratio, norm, rate, trained, 2 * int((off & trained).sum()) < int(trained.sum()))


def largest_rate(record: Record) -> float:
    """The largest learning rate of any parameter; not finite where none is known."""
    rates = record.metrics.get("param_lr")
    return -math.inf if rates is None else float(np.max(rates, initial=-math.inf, where=~np.isnan(rates)))


def working(record: Record, kept: dict[str, float | None]) -> bool:
    """Whether the largest rate stands still or falls, near its peak; one that is not known does.

    `kept` is empty at first, and holds its peak and last value.
    """
    rate = largest_rate(record)
    if not math.isfinite(rate):
        return True
    peak, last = max(kept.get("peak") or 0.0, rate), kept.get("last")
    kept.update(peak=peak, last=rate)
    return (last is None or rate <= RISING * last) and rate >= FAR_BELOW_PEAK * peak


def decay_advice(record: Record, header: RunHeader, kept: dict[str, float]) -> str:
    """What to do where weight decay has shrunk the weights, "" where it has not; `kept` is empty at first."""
    norms = record.metrics.get("param_norm")
    if norms is None or bool(np.isnan(norms).all()):
        return ""
    norm = float(np.sqrt(np.nansum(np.square(norms))))
    share = norm / max(kept.setdefault("start", norm), np.finfo(np.float64).tiny)
    groups = [group for held in header.setup.get("optimizers", ()) for group in held.get("groups", ())]
    decays = [group.get("weight_decay") for group in groups]
    decay = max((float(value) for value in decays if isinstance(value, int | float)), default=0.0)
    if share > SHRUNK or decay < DECAY:
        return ""
    return f"lower weight_decay ({decay:g}): the weights have shrunk to {share:.2g} of their norm at the start"


def _like(values: Array | None, default: Array) -> Array:
    return values if values is not None and values.shape == default.shape else default
