"""`loss_spike` and `loss_plateau`: what the losses of all steps say, unsampled ones too (`step_losses`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors.detector import Array, Detector, Finding
from flowscope.detectors.rates import Rate, largest_rate
from flowscope.records import Record, RunHeader

WINDOW = 100
"""How many losses, of those that were no spike, make the level a spike is measured against."""
ENOUGH = 20
"""How many it needs before it says anything."""
SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
NOISE = 4.0
"""Standard deviations of single losses beyond the level that the median of five does not reach by noise."""
LEAST_RISE = 0.1
"""A rise by less than this share of the level is no spike, however quiet the run."""
LEAST_LOST = 0.5
"""Nor is one by less than this share of what was learned so far: near the edge of stability healthy runs lose .4."""
SPAN = 5
"""A spike holds for more than half of this many steps."""
RESTART = 2.0
"""A learning rate above the window's least by this factor, within its earlier peak, was raised by its schedule."""
PLATEAU_WINDOW = 200
"""How many of the last losses tell a plateau from slow progress."""
CHANCE_ABOVE = 0.5
"""Further above the level of guessing, a loss is no cross-entropy at chance but something else (or diverges)."""
FALLING = 0.01
"""Less than this share of the level of guessing in a hundred steps (or than noise) is not falling: so slowly falls a
network that learns shuffled labels by heart."""


def losses_of(record: Record) -> Array:
    """The finite losses since the last record, oldest first; the record's own where no others were kept."""
    losses = record.metrics.get("step_losses")
    if losses is None or losses.size == 0:
        losses = np.array([] if record.loss is None else [record.loss])
    return losses[np.isfinite(losses)]


def deviation(values: Iterable[float], level: float) -> float:
    """The standard deviation of values around their median `level`, by their median absolute deviation."""
    return SIGMA * median([abs(value - level) for value in values])


class _Judged(NamedTuple):
    """One step: the level before it, how far five losses may rise above it and do, the window's largest rise, size."""

    level: float
    rise: float
    above: float
    highest: float
    size: int


class LossSpike(Detector):
    """Three of five losses in a row stand far above what the hundred before them rose by."""

    kind = "loss_spike"

    def __init__(self, config: WatchConfig) -> None:
        super().__init__(config)
        self._window: deque[float] = deque(maxlen=WINDOW)
        # how far single losses usually rise above the ten before them; while the loss falls, not at all
        self._rises: deque[float] = deque(maxlen=WINDOW - ENOUGH // 2)
        self._last: deque[float] = deque(maxlen=SPAN - 1)
        self._first: list[float] = []
        self._rates: deque[float] = deque(maxlen=WINDOW // 10)
        self._peak = 0.0
        self._outside = 0

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        losses = losses_of(record)
        if losses.size == 0:
            yield Finding(self.kind, level="unseen")
            return
        raised = self._rate_rose(record)
        recent = [*self._last, *losses.tolist()]
        # the median of five: one or two odd batches are no spike
        missing = SPAN - 1 - len(self._last)
        padded = [recent[0]] * missing + recent
        smooth = [median(padded[i : i + SPAN]) for i in range(losses.size)]
        # a loss joins the window when it leaves the five: then it is known whether it began a spike
        leaving = padded[: losses.size]
        self._last.extend(losses.tolist())
        self._first.extend(losses.tolist()[: SPAN - len(self._first)])
        # what only fills up the first five was no loss of its own
        judged = [None if i < missing else self._judge(leaving[i], value) for i, value in enumerate(smooth)]
        yield from self._found(record, smooth, judged, restarted=raised)

    def _judge(self, leaving: float, smooth: float) -> _Judged | None:
        """Judge one step by what came before it, however many of them a record brings; then learn from it."""
        if len(self._window) < ENOUGH:
            self._add([leaving])
            return None
        level = median(list(self._window)[-ENOUGH:])
        spread = deviation(self._rises, median(self._rises))
        highest = max(0.0, *self._rises)
        progress = median(self._first) - level
        least = max(LEAST_RISE * abs(level), LEAST_LOST * progress, 1e-12)
        rise = max(NOISE * spread, self.config.loss_spike * highest, least)
        judged = _Judged(level, rise, smooth - level, highest, len(self._window))
        self._learn(leaving, usual=judged.above <= rise)
        return judged

    def _found(
        self, record: Record, smooth: Sequence[float], judged: Sequence[_Judged | None], *, restarted: bool
    ) -> Iterable[Finding]:
        known = [(i, one) for i, one in enumerate(judged) if one is not None]
        beyond = [(i, one) for i, one in known if one.above > one.rise]
        if not beyond or restarted:
            if beyond or any(one.above > one.rise / self.config.release_factor for _, one in known):
                yield Finding(self.kind, level="near")
            return
        i, worst = max(beyond, key=lambda pair: pair[1].above)
        yield Finding(
            self.kind,
            "",
            "warning",
            smooth[i],
            worst.level + worst.rise,
            f"the loss rose to {smooth[i]:.3g} (the median of five steps, up to {len(smooth) - 1 - i} steps "
            f"before step {record.step}) from a level of {worst.level:.3g}; in the {worst.size} steps before, "
            f"single losses rose by {worst.highest:.3g} at most (limit {worst.level + worst.rise:.3g})",
            "lower the learning rate and clip gradients (clip_grad_norm_); if the loss does not come back, go on from "
            "the last checkpoint before it",
            immediate=True,
        )

    def _learn(self, leaving: float, *, usual: bool) -> None:
        """Add what was no spike to the window; a level that lasts for ten windows becomes the usual one."""
        self._outside = 0 if usual else self._outside + 1
        if self._outside > 10 * WINDOW:
            self._window.clear()
            self._rises.clear()
            self._outside = 0
            usual = True
        if usual:
            self._add([leaving])

    def _add(self, losses: Iterable[float]) -> None:
        """Add losses to the window, each with how far it rose above the ten before it."""
        for loss in losses:
            if len(self._window) >= ENOUGH // 2:
                self._rises.append(loss - median(list(self._window)[-(ENOUGH // 2) :]))
            self._window.append(loss)

    def _rate_rose(self, record: Record) -> bool:
        """Whether the schedule restarted: the rate rose again, within what it was before it fell."""
        rate = largest_rate(record)
        if not math.isfinite(rate):
            return False
        restarted = False
        if self._rates:
            recent = np.array(self._rates)
            lowest = int(recent.argmin())
            before = max(self._peak, float(recent[: lowest + 1].max()))
            restarted = rate > RESTART * float(recent[lowest]) and rate <= 1.01 * before
        if len(self._rates) == self._rates.maxlen:
            self._peak = max(self._peak, self._rates[0])
        self._rates.append(rate)
        return restarted

    def state_dict(self) -> dict[str, Any]:
        """The window of usual losses, the first and the last ones, and the learning rate's recent course."""
        return {
            "window": list(self._window),
            "last": list(self._last),
            "first": list(self._first),
            "rates": list(self._rates),
            "peak": self._peak,
            "outside": self._outside,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._window.clear()
        self._rises.clear()
        self._add(state["window"])
        self._last.clear()
        self._last.extend(state["last"])
        self._first = list(state["first"])
        self._rates.clear()
        self._rates.extend(state["rates"])
        self._peak, self._outside = state["peak"], state["outside"]


class LossPlateau(Detector):
    """The loss stays at what guessing gives, cross-entropy over as many classes as the model has outputs.

    What converged is below that level, what still learns falls; a loss without such a level (regression) is not judged.
    """

    kind = "loss_plateau"
    yields_to = frozenset(
        {
            "stale_parameters",
            "parameters_not_optimized",
            "no_gradient",
            "gradient_accumulates",
            "vanishing_gradient",
            "exploding_gradient",
            "update_too_small",
            "update_too_large",
            "over_clipped",
            "dead_units",
            "saturation",
            "symmetry",
            "representation_collapse",
            "token_collapse",
            "rank_collapse",
            "constant_output",
        }
    )

    def __init__(self, config: WatchConfig) -> None:
        super().__init__(config)
        self._window: deque[float] = deque(maxlen=PLATEAU_WINDOW)
        self._rate = Rate()
        self._seen = 0

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        losses, width = losses_of(record), record.metrics.get("output_width")
        self._window.extend(losses.tolist())
        working = self._rate.working(record)
        self._seen = min(self._seen + losses.size, self.config.plateau_steps)
        known = width is not None and width.size == 1 and bool(np.isfinite(width[0]))
        if losses.size == 0 or width is None or not known or self._seen < self.config.plateau_steps:
            yield Finding(self.kind, level="unseen")
            return
        chance, tolerance = math.log(max(2.0, float(width[0]))), self.config.plateau_drop
        window = np.array(self._window)
        early, late = np.array_split(window, 2)
        level, noise = float(window.mean()), 2 * float(window.std()) / math.sqrt(window.size)
        if level < (1 - self.config.release_factor * tolerance) * chance or level > (1 + CHANCE_ABOVE) * chance:
            return
        falling = early.mean() - late.mean() > max(FALLING * chance, 2 * noise)
        if level < (1 - tolerance) * chance or falling or not working:
            yield Finding(self.kind, level="near")
            return
        yield Finding(
            self.kind,
            "",
            "warning",
            level,
            (1 - tolerance) * chance,
            f"the mean loss of the last {window.size} steps is {level:.3g} and does not fall: guessing among "
            f"{width[0]:.0f} outputs gives {chance:.3g} (limit {(1 - tolerance) * chance:.3g}), while gradients and "
            "updates look healthy",
            "look at what the loss compares: whether inputs and labels still belong together, whether the loss takes "
            "logits (no softmax before cross_entropy); then try a lower learning rate or larger batches",
        )

    def state_dict(self) -> dict[str, Any]:
        """The last losses and the learning rate's course."""
        return {"window": list(self._window), "rate": self._rate.state_dict(), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._window.clear()
        self._window.extend(state["window"])
        self._rate.load_state_dict(state["rate"])
        self._seen = state["seen"]
