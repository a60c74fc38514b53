"""The figure of a comparison: losses by step, and loss against the time of a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flowscope.comparing.verdict import ConnectionComparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING = 20
"""A curve is the mean over a 20th of its steps."""


def draw(comparison: ConnectionComparison, path: str | Path | None) -> Figure:
    """Return the figure; one colour a candidate, a thin line a seed, a thick one their mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curves, costs = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, row in enumerate(comparison.rows):
        colour = f"C{number}"
        lines = [smooth(np.array(o.losses)) for o in comparison.of(row.label) if o.losses]
        for line in lines:
            curves.plot(np.arange(len(line)) + comparison.steps - len(line), line, color=colour, lw=0.6, alpha=0.5)
        if lines and len({len(line) for line in lines}) == 1:
            mean = np.mean(lines, axis=0)
            start = comparison.steps - len(mean)
            curves.plot(np.arange(len(mean)) + start, mean, color=colour, lw=1.8, label=row.label)
        costs.errorbar(row.step_seconds * 1e3, row.loss, yerr=row.spread, fmt="o", color=colour, capsize=3)
        costs.annotate(row.label, (row.step_seconds * 1e3, row.loss), xytext=(5, 5), textcoords="offset points")
    curves.set(xlabel="step", ylabel="loss (smoothed)")
    curves.legend(frameon=False)
    costs.set(
        xlabel="time of a step (ms)", ylabel="loss of the last tenth", title=f"recommended: {comparison.recommended}"
    )
    if path is not None:
        figure.savefig(path)
    return figure


def smooth(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the running mean."""
    width = max(1, len(losses) // SMOOTHING)
    return np.convolve(losses, np.full(width, 1 / width), "valid")
