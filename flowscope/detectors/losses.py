"""`loss_spike` and `loss_plateau`: what the losses of all steps say, unsampled ones too (`step_losses`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flowscope.detectors.detector import OUTCOME, Array, Detector, Finding, said
from flowscope.detectors.rates import largest_rate, working
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
    advice = (
        "lower the learning rate and clip gradients (clip_grad_norm_); if the loss does not come back, go on from the "
        "last checkpoint before it"
    )
    begins_with: ClassVar[dict[str, Any]] = {
        "window": deque(maxlen=WINDOW),
        # how far single losses usually rise above the ten before them; while the loss falls, not at all
        "rises": deque(maxlen=WINDOW - ENOUGH // 2),
        "last": deque(maxlen=SPAN - 1),
        "first": deque(),
        "rates": deque(maxlen=WINDOW // 10),
        "peak": 0.0,
        "outside": 0,
    }

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        losses = losses_of(record)
        if losses.size == 0:
            yield self.unseen()
            return
        raised, last, first = self._rate_rose(record), self.state["last"], self.state["first"]
        recent = [*last, *losses.tolist()]
        # the median of five: one or two odd batches are no spike
        missing = SPAN - 1 - len(last)
        padded = [recent[0]] * missing + recent
        smooth = [median(padded[i : i + SPAN]) for i in range(losses.size)]
        # a loss joins the window when it leaves the five: then it is known whether it began a spike
        leaving = padded[: losses.size]
        last.extend(losses.tolist())
        first.extend(losses.tolist()[: SPAN - len(first)])
        # what only fills up the first five was no loss of its own
        judged = [None if i < missing else self._judge(leaving[i], value) for i, value in enumerate(smooth)]
        yield from self._found(record, smooth, judged, restarted=raised)

    def _judge(self, leaving: float, smooth: float) -> _Judged | None:
        """Judge one step by what came before it, however many of them a record brings; then learn from it."""
        window, rises = self.state["window"], self.state["rises"]
        if len(rises) < ENOUGH // 2:
            self._add(leaving)
            return None
        level = median(list(window)[-ENOUGH:])
        spread = deviation(rises, median(rises))
        highest = max(0.0, *rises)
        progress = median(self.state["first"]) - level
        least = max(LEAST_RISE * abs(level), LEAST_LOST * progress, 1e-12)
        rise = max(NOISE * spread, self.config.loss_spike * highest, least)
        judged = _Judged(level, rise, smooth - level, highest, len(window))
        self._learn(leaving, usual=judged.above <= rise)
        return judged

    def _found(
        self, record: Record, smooth: Sequence[float], judged: Sequence[_Judged | None], *, restarted: bool
    ) -> Iterable[Finding]:
        known = [(i, one) for i, one in enumerate(judged) if one is not None]
        beyond = [(i, one) for i, one in known if one.above > one.rise]
        if not beyond or restarted:
            close = beyond or any(one.above > one.rise / self.config.release_factor for _, one in known)
            yield from said(self.near(bool(close)))
            return
        i, worst = max(beyond, key=lambda pair: pair[1].above)
        limit = worst.level + worst.rise
        message = (
            f"the loss rose to {smooth[i]:.3g} (the median of five steps, up to {len(smooth) - 1 - i} steps before "
            f"step {record.step}) from a level of {worst.level:.3g}; in the {worst.size} steps before, single losses "
            f"rose by {worst.highest:.3g} at most (limit {limit:.3g})"
        )
        yield self.found("", smooth[i], limit, message, immediate=True)

    def _learn(self, leaving: float, *, usual: bool) -> None:
        """Add what was no spike to the window; a level that lasts for ten windows becomes the usual one."""
        self.state["outside"] = 0 if usual else self.state["outside"] + 1
        if self.state["outside"] > 10 * WINDOW:
            self.state["window"].clear()
            self.state["rises"].clear()
            self.state["outside"] = 0
            usual = True
        if usual:
            self._add(leaving)

    def _add(self, loss: float) -> None:
        """Add a loss to the window, with how far it rose above the ten before it."""
        window = self.state["window"]
        if len(window) >= ENOUGH // 2:
            self.state["rises"].append(loss - median(list(window)[-(ENOUGH // 2) :]))
        window.append(loss)

    def _rate_rose(self, record: Record) -> bool:
        """Whether the schedule restarted: the rate rose again, within what it was before it fell."""
        rate = largest_rate(record)
        if not math.isfinite(rate):
            return False
        restarted, rates = False, self.state["rates"]
        if rates:
            recent = np.array(rates)
            lowest = int(recent.argmin())
            before = max(self.state["peak"], float(recent[: lowest + 1].max()))
            restarted = rate > RESTART * float(recent[lowest]) and rate <= 1.01 * before
        if len(rates) == rates.maxlen:
            self.state["peak"] = max(self.state["peak"], rates[0])
        rates.append(rate)
        return restarted


class LossPlateau(Detector):
    """The loss stays at what guessing gives, cross-entropy over as many classes as the model has outputs.

    What converged is below that level, what still learns falls; a loss without such a level (regression) is not judged.
    """

    kind, level = "loss_plateau", OUTCOME
    yields_to = frozenset({"update_too_small", "representation_collapse", "rank_collapse", "constant_output"})
    advice = (
        "look at what the loss compares: whether inputs and labels still belong together, whether the loss takes "
        "logits (no softmax before cross_entropy); then try a lower learning rate or larger batches"
    )
    begins_with: ClassVar[dict[str, Any]] = {"window": deque(maxlen=PLATEAU_WINDOW), "rate": {}, "seen": 0}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        losses, width = losses_of(record), record.metrics.get("output_width")
        self.state["window"].extend(losses.tolist())
        steady = working(record, self.state["rate"])
        seen = self.state["seen"] = min(self.state["seen"] + losses.size, self.config.plateau_steps)
        known = width is not None and width.size == 1 and bool(np.isfinite(width[0]))
        if losses.size == 0 or width is None or not known or seen < self.config.plateau_steps:
            yield self.unseen()
            return
        chance, tolerance = math.log(max(2.0, float(width[0]))), self.config.plateau_drop
        window = np.array(self.state["window"])
        early, late = np.array_split(window, 2)
        level, noise = float(window.mean()), 2 * float(window.std()) / math.sqrt(window.size)
        if level < (1 - self.config.release_factor * tolerance) * chance or level > (1 + CHANCE_ABOVE) * chance:
            return
        falling = early.mean() - late.mean() > max(FALLING * chance, 2 * noise)
        limit = (1 - tolerance) * chance
        if level < limit or falling or not steady:
            yield from said(self.near(True))
            return
        message = (
            f"the mean loss of the last {window.size} steps is {level:.3g} and does not fall: guessing among "
            f"{width[0]:.0f} outputs gives {chance:.3g} (limit {limit:.3g}), while gradients and updates look healthy"
        )
        yield self.found("", level, limit, message)
