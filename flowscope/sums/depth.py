"""Statistics between neighbouring points on the host, computed for many points at once.

On the CPU a dozen small operations a block cost more than the arithmetic in them. So a point's forward only copies its
sampled positions; the rows of a run of points are computed together, when the first of their gradients arrives.

Axis letters: G points of one run, N positions, D features, T tokens of a sequence.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from flowscope.records import Array
from flowscope.sums import statistics as s
from flowscope.sums.statistics import BUCKETS, Positions, full_precision

MOST_ENTRIES = 1 << 20
"""Copied positions wait for at most this many fp32 entries; then their rows are computed at once."""


class DepthRow:
    """The columns TO_INPUT .. end of one point's row: `read` computes them, with those of the points beside it."""

    def __init__(self, run: DepthRows) -> None:
        self._run = run
        self.values: Array | None = None

    def read(self) -> Array:
        """Return the columns."""
        if self.values is None:
            self._run.compute()
        assert self.values is not None
        return self.values


class DepthRows:
    """The points of one flow whose rows have not been computed yet, in the order in which they ran."""

    def __init__(self) -> None:
        self._before: Positions | None = None
        self._origin: Positions | None = None
        self._points: list[Positions] = []
        self._rows: list[weakref.ref[DepthRow]] = []
        self._lock = threading.RLock()
        """Gradients of one model may arrive in several threads."""

    def add(self, before: Positions | None, now: Positions, origin: Positions | None) -> DepthRow:
        """Return the row of a point `now` that follows `before` (arguments as for `statistics.depth_statistics`)."""
        with self._lock:
            return self._added(before, now, origin)

    def _added(self, before: Positions | None, now: Positions, origin: Positions | None) -> DepthRow:
        previous = self._points[-1] if self._points else None
        joins = previous is not None and before is previous and origin is self._origin
        if not joins or (len(self._points) + 1) * now.values.numel() > MOST_ENTRIES:
            self.compute()
        if not self._points:
            self._before, self._origin = before, origin
        row = DepthRow(self)
        self._points.append(now)
        self._rows.append(weakref.ref(row))
        return row

    def compute(self) -> None:
        """Compute the rows that are still wanted, and begin a new run."""
        with self._lock:
            self._compute()

    def _compute(self) -> None:
        rows, points = [row() for row in self._rows], self._points
        before, origin = self._before, self._origin
        self._points, self._rows, self._before, self._origin = [], [], None, None
        if any(row is not None for row in rows):
            with full_precision(points[0].values):
                computed = run_statistics(before, points, origin)
            for row, values in zip(rows, computed, strict=True):
                if row is not None:
                    row.values = values


def run_statistics(before: Positions | None, points: list[Positions], origin: Positions | None) -> Array:
    """Return [G, columns]: `statistics.depth_statistics` of every point, each following the one before it.

    Args:
        before: the point before the first, or None.
        points: G points of equal places and width.
        origin: x_0, or None.
    """
    chain = points if before is None else [before, *points]
    states = torch.stack([point.values for point in chain])
    norms = s.lengths(states)
    first = len(chain) - len(points)
    now, inverse = states[first:], norms[first:].reciprocal()
    out = np.zeros((len(points), s.COLUMNS))
    with np.errstate(all="ignore"):
        if origin is not None:
            cosine = torch.linalg.vecdot(now, origin.values) * (inverse / origin.norm)
            out[:, s.TO_INPUT], out[:, s.TO_INPUT_COUNT] = _seen_sum(cosine.numpy())
        if sequences := points[0].sequences:
            tokens = now.shape[1] // sequences
            means = s.token_cosines(now.reshape(-1, tokens, now.shape[-1]), norms[first:].reshape(-1, tokens))
            out[:, s.TOKEN], out[:, s.TOKEN_COUNT] = _seen_sum(means.view(len(points), sequences).numpy())
        if points[0].samples > 1:
            cosine = s.sample_cosines(now, points[0].samples)
            out[:, s.SAMPLE], out[:, s.SAMPLE_COUNT] = _seen_sum(cosine[:, None].numpy())
        if len(chain) > 1:
            difference = states[1:] - states[:-1]
            square = torch.linalg.vecdot(difference, difference).numpy()
            length = norms.numpy()
            gap = length[1:] - length[:-1]
            one_minus_cosine = (square - gap * gap) / (2.0 * length[1:] * length[:-1])
            # without a point before the first, the first has no neighbour
            where = slice(1 - first, None)
            out[where, s.BRANCH_SQUARE], out[where, s.CARRY_SQUARE] = square.sum(1), (length[:-1] * length[:-1]).sum(1)
            out[where, s.HISTOGRAM :] = _bucket_rows(one_minus_cosine)
    return out[:, s.TO_INPUT :]


def _seen_sum(values: NDArray[np.float32]) -> tuple[Array, Array]:
    """Sums and counts of the finite entries of each row."""
    valid = np.isfinite(values)
    return np.where(valid, values, 0.0).sum(1, dtype=np.float64), valid.sum(1).astype(np.float64)


def _bucket_rows(one_minus_cosine: NDArray[np.float32]) -> Array:
    """`statistics.cosine_buckets` of each row."""
    if len(one_minus_cosine) == 1:
        return np.asarray(s.cosine_buckets(one_minus_cosine[0]), dtype=np.float64)[None]
    index = s.bucket_index(one_minus_cosine)
    index += np.arange(len(index))[:, None] * (BUCKETS + 1)
    counts = np.bincount(index.ravel(), minlength=len(index) * (BUCKETS + 1))
    return counts.reshape(len(index), BUCKETS + 1)[:, :BUCKETS].astype(np.float64)
