"""Whether a run parts from its group, at a rate that is known. See the package's docstring for the proof.

Axis letters: N good runs, K steps, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtri, stdtr  # scipy.stats takes a second to import

from flowscope.corridor.curves import Stack
from flowscope.corridor.spread import away, trailing, usual
from flowscope.records import Array

WINDOWS = (1, 4)
"""A metric is judged step by step, and by its means over the last four: what is a little off for long is off."""
QUIET = 0.05
"""The farthest deviation of a metric is taken to be no less than a normal variable's that is exceeded so often."""
LEAST_SCORE = 0.1
"""Good runs score at least this: few of them may happen to be alike."""
USUAL_SPREAD, USUAL_RUNS = 0.5, 4
"""The deviation of log scores that is assumed before any run is seen, worth so many runs. In most recipes it is .2 to
.4; the tail above is longer than a normal variable's, which this has to make up for."""


@dataclass(frozen=True)
class Judge:
    """One metric at one window, as each group without one run sees it.

    Attributes:
        stack: the metric.
        window: means of so many steps in a row.
        centre: [N, K - window + 1, R], by the run that is left out.
        unit: one over the deviation of 1, of the same shape: the scale times the farthest that the group itself goes.
    """

    stack: Stack
    window: int
    centre: Array
    unit: Array


def judge_of(stack: Stack, window: int) -> Judge | None:
    """The judge of a metric; None where it has fewer steps than the window, or was never seen by all runs."""
    values = trailing(stack.values, window)
    runs = values.shape[0]
    if not values.shape[1] or not np.isfinite(values).all(axis=0).any():
        return None
    centres, units = zip(*(_unit(np.delete(values, left_out, axis=0), stack) for left_out in range(runs)), strict=True)
    return Judge(stack, window, np.stack(centres), np.stack(units))


def _unit(values: Array, stack: Stack) -> tuple[Array, Array]:
    """Centre [K, R] of a group and one over what counts as a deviation of 1 there."""
    runs = values.shape[0]
    centre, scale = usual(values, stack.unit, stack.in_logs)
    with np.errstate(invalid="ignore"):
        off = np.abs(away(values, centre, stack.in_logs)) / scale
    # a run that is no member lies farther from the centre than the members do
    farthest = float(np.nanmax(off, initial=0.0)) * math.sqrt((runs + 1) / (runs - 1))
    numbers = max(int(np.isfinite(scale).sum()), 1)
    return centre, 1 / (scale * max(farthest, float(-ndtri(QUIET / (2 * numbers)))))


def whole_score(judges: Sequence[Judge], run: int) -> float:
    """The score of a good run over its whole length, by the group without it."""
    score = 0.0
    for judge in judges:
        values = trailing(judge.stack.values[run], judge.window)
        with np.errstate(invalid="ignore"):
            off = np.abs(away(values, judge.centre[run], judge.stack.in_logs)) * judge.unit[run]
        score = max(score, float(np.nan_to_num(off, nan=0.0, posinf=0.0).max()))
    return score


def freedom(runs: int) -> int:
    """The degrees of freedom of the model for so many good runs."""
    return runs - 1 + USUAL_RUNS


@dataclass
class Bounds:
    """What the scores [N] of a run are compared with: the whole-run score of each good run by the group without it."""

    of_good: Array
    spread: float = field(init=False)

    def __post_init__(self) -> None:
        self.of_good = np.maximum(self.of_good, LEAST_SCORE)
        own, known = len(self.of_good) - 1, float(np.log(self.of_good).var(ddof=1))
        self.spread = math.sqrt((own * known + USUAL_RUNS * USUAL_SPREAD**2) / (own + USUAL_RUNS))

    def beyond(self, scores: Array) -> Array:
        """How many times as far off as the nearest good run's bound, [...]; more than 1: certified.

        Args:
            scores: [N, ...], of the same number or run by each group that leaves one good run out.
        """
        times: Array = (scores.T / self.of_good).T.min(axis=0)
        return times

    def chance_of(self, scores: Array) -> float:
        """The model: logarithms of whole-run scores are normal, so that those of one more run follow Student's t.

        With the good runs' mean, sqrt(1 + 1/N) for the mean's own error, their variance moderated by what is usual
        (`USUAL_SPREAD`), and N - 1 + `USUAL_RUNS` degrees of freedom.
        """
        runs = len(self.of_good)
        with np.errstate(divide="ignore"):
            above = float(np.median(np.log(scores)) - np.log(self.of_good).mean())
        return float(stdtr(freedom(runs), -above / (self.spread * math.sqrt(1 + 1 / runs))))
