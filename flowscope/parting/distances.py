"""How far two fingerprints are apart: 0 where every bit is the same, else the relative size of the difference.

What a fingerprint holds is said in `flowscope.sums.fingerprints`; here only its columns are read.

Axis letters: K projections.
"""

from __future__ import annotations

import numpy as np

from flowscope.records import Array

CHECKSUM, SQUARES = 0, 1
PROJECTIONS = 4


def distance(a: Array, b: Array) -> float:
    """Return |x - y| / |x|, estimated from two fingerprints; 0 for equal bits, inf where only one is finite.

    K random projections of the difference have its size on average; norms and the samples' own projections tell where
    sums over the samples are zero by construction (batch norms).
    """
    if a[CHECKSUM] == b[CHECKSUM] and np.array_equal(a[SQUARES], b[SQUARES], equal_nan=True):
        return 0.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    largest = max(a[SQUARES], b[SQUARES])
    if largest <= 0:
        return 0.0
    end = SQUARES + 1 + PROJECTIONS
    found = [
        np.sqrt(np.mean((a[SQUARES + 1 : end] - b[SQUARES + 1 : end]) ** 2) / largest),
        _of(a[SQUARES], b[SQUARES]),
    ]
    of_samples = a[end:], b[end:]
    if of_samples[0].size and of_samples[0].all() and of_samples[1].all():
        found.append(_of(of_samples[0].sum(), of_samples[1].sum()))
    return float(max(found))


def _of(a: float, b: float) -> float:
    """The relative difference of two sums of squares, as that of their roots."""
    return abs(a - b) / (2 * max(a, b)) if max(a, b) > 0 else 0.0


def update_distance(a: tuple[Array, Array], b: tuple[Array, Array]) -> float:
    """The same of what an update changed, from the weights before and after it: projections are linear."""
    if a[1][CHECKSUM] == b[1][CHECKSUM] and a[0][CHECKSUM] == b[0][CHECKSUM]:
        return 0.0
    moves = [after[SQUARES + 1 :] - before[SQUARES + 1 :] for before, after in (a, b)]
    if not all(np.isfinite(move).all() for move in moves):
        return float("inf")
    size = max(float(np.mean(move**2)) for move in moves)
    return float(np.sqrt(np.mean((moves[0] - moves[1]) ** 2) / size)) if size > 0 else 0.0


def update_size(weights: tuple[Array, Array]) -> float:
    """|dw| / |w|, estimated; infinite for weights that are zero: there it is not rounded after it."""
    before, after = weights
    if not before[SQUARES] > 0:
        return float("inf")
    return float(np.sqrt(np.mean((after[SQUARES + 1 :] - before[SQUARES + 1 :]) ** 2) / before[SQUARES]))
