"""Depth made to fit a width, and the scale of what is drawn: the shared steps of sparklines, charts and images."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def log10(values: ArrayLike) -> NDArray[np.float64]:
    """Log10 without warnings: 0 gives -inf, negative numbers and NaN give NaN; any shape."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log10(np.asarray(values, dtype=np.float64))


def extent(values: NDArray[np.float64], default: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
    """The least and the largest finite value; `default` where none is finite."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else default


def bin_means(values: NDArray[np.float64], bins: int) -> NDArray[np.float64]:
    """Means over `bins` consecutive, nearly equal stretches of the first axis.

    Args:
        values: [L, ...]; NaN is left out of a mean, and a bin of nothing but NaN is NaN.
        bins: how many rows may come out; fewer rows than that come back unchanged.

    Returns:
        [min(L, bins), ...].
    """
    length = values.shape[0]
    if length <= bins:
        return values
    starts, seen = np.arange(bins) * length // bins, ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        sums = np.add.reduceat(np.where(seen, values, 0.0), starts)
        means: NDArray[np.float64] = sums / np.add.reduceat(seen, starts, dtype=np.int64)
    return means


def shortened(name: str, most: int = 28) -> str:
    """The end of a long module path, which is what tells neighbours apart."""
    return name if len(name) <= most else f"...{name[3 - most :]}"
