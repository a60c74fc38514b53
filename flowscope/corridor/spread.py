"""How far runs of one recipe usually lie apart in one metric, from as few as two of them.

Axis letters: N runs, K steps, R rows.
"""

from __future__ import annotations

import math

import numpy as np

from flowscope.records import Array

STEADY = 0.02
"""Two per cent (of a logarithm, or of the largest value) are a deviation of one at most, however equal good runs are:
counts and shares are 0 in most runs, and one dead unit in another is no fault."""
BESIDE = 1
"""A step's variance is pooled with so many steps on either side."""
LOWEST = -math.log(5)
"""A logarithm counts as no farther below the centre than that of a fifth: that of a number which passes zero (the norm
of a bias that has one entry, a largest logit) has no lower end, and few runs do not show how long that tail is."""
PRIOR = 4.0
"""The variance of all steps counts as so many further numbers in each step's."""


def away(values: Array, centre: Array, in_logs: bool) -> Array:
    """How far values [..., K, R] lie from a centre [K, R]; logarithms `LOWEST` at the least."""
    off: Array = values - centre
    if in_logs:
        off = np.maximum(off, LOWEST)
    return off


def usual(values: Array, unit: float | None = None, in_logs: bool = False) -> tuple[Array, Array]:
    """Centre and scale of a group of runs.

    The centre is the median over runs. A variance of so few runs says little, so it is pooled: s^2(k, r) is the product
    of the row's mean variance over all steps and the step's mean variance over all rows (and the steps beside it), over
    the mean of all. For N = 5, K = 20, R = 4 that is a row's variance from 80 and a step's from 48 numbers, not 4.

    Args:
        values: [N, K, R], N >= 2; NaN where a run did not see a row.
        unit: what `STEADY` is a share of; None: the largest centre.
        in_logs: whether the values are logarithms.

    Returns:
        centre and scale, both [K, R]; the scale is infinite where a run is missing, so that nothing lies far off there.
    """
    runs = values.shape[0]
    ordered = np.sort(values, axis=0)  # seven times faster than np.median of few
    with np.errstate(invalid="ignore"):
        centre: Array = (ordered[(runs - 1) // 2] + ordered[runs // 2]) / 2
        variance = away(values, centre, in_logs).var(axis=0, ddof=1)
    seen = np.isfinite(values).all(axis=0)
    if not seen.any():
        return centre, np.full_like(centre, np.inf)
    variance = np.where(seen, variance, 0.0)
    overall = variance.sum() / seen.sum()
    rows = variance.sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
    sums, counts = _beside(variance.sum(axis=1)), _beside(seen.sum(axis=1).astype(float))
    steps = (sums + PRIOR * overall) / (counts + PRIOR)
    pooled = np.outer(steps, rows) / overall if overall > 0 else np.zeros_like(variance)
    floor = STEADY * (unit or float(np.abs(centre[seen]).max()) or 1.0)
    return centre, np.where(seen, np.sqrt(pooled + floor**2), np.inf)


def _beside(sums: Array) -> Array:
    """Each entry of [K] plus its neighbours."""
    window = np.ones(min(2 * BESIDE + 1, 2 * len(sums) - 1))
    joined: Array = np.convolve(sums, window, mode="full")
    start = len(window) // 2
    return joined[start : start + len(sums)]


def trailing(values: Array, window: int) -> Array:
    """Means over the last `window` steps, [..., K - window + 1, R]; of fewer steps than that there is none."""
    steps = values.shape[-2]
    if steps < window:
        return values[..., :0, :]
    last = steps - window + 1
    means: Array = np.mean([values[..., n : n + last, :] for n in range(window)], axis=0)
    return means
