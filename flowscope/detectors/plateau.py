"""`loss_plateau`: a loss that stays at what guessing gives, one that never falls, one that is given the wrong thing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors.detector import OUTCOME, WIRING, Array, Detector, Finding, said
from flowscope.detectors.losses import PLAYERS, losses_of
from flowscope.detectors.rates import updates_of, working
from flowscope.records import Record, RunHeader

WINDOW = 200
"""How many of the last losses tell a plateau from slow progress."""
CHANCE_ABOVE = 0.5
"""Further above the level of guessing, a loss is no cross-entropy at chance but something else (or diverges)."""
FALLING = 0.01
"""Less than this share of the level of guessing in a hundred steps (or than noise) is not falling: so slowly falls a
network that learns shuffled labels by heart."""
SURE_STEPS = 300
"""By so many steps noise is no excuse: before, a fall that is only likely counts as one."""
BEGINNING = 20
"""The first losses of a run, against which one that has no level of guessing is measured."""
FLAT = 0.02
"""Where the means are known better than to this share, a loss that fell by less than it has not fallen."""
CREEPS = 0.01
"""Weights that hardly move move a loss by less than this share; a small rate that teaches moves it by more."""

MIXED = 0.1
"""Choices whose levels of guessing differ by this share are several tasks (a last batch may hold fewer samples)."""

SLOW = 1e-4
"""Weights that never move by more than this share of their norm a step are a tenth as fast as slow training is."""


class _Course(NamedTuple):
    """The losses of a run from its start: the mean of the first, that of the latest, and the error of both."""

    size: int
    late: int
    start: float
    level: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether they are known so well that a fall by `FLAT` would show."""
        return 2 * self.error <= FLAT * self.start

    @property
    def words(self) -> str:
        """Where it began, and where it is."""
        return f"{self.start:.4g} in the first {self.size} steps, {self.level:.4g} in the last {self.late}"


def _learn(state: dict[str, Any], record: Record, losses: Array) -> None:
    """Keep the first and the latest losses, whether the run was seen from its start, and what they choose among."""
    if state["fresh"] is None:
        state["fresh"] = float(record.step == 0)
    known = record.metrics.get("loss_classes")
    if known is not None and known.size == 1:
        cost = math.log(max(2.0, float(known[0]))) if math.isfinite(known[0]) else 0.0
        first = state["choice"] = cost if state["choice"] is None else state["choice"]
        state["mixed"] |= abs(cost - first) > MIXED * first
    state["window"].extend(losses.tolist())
    state["first"].extend(losses.tolist()[: BEGINNING - len(state["first"])])


def _course(state: dict[str, Any]) -> _Course | None:
    """None where a loss is not positive: shares of it say nothing."""
    window, first = np.array(state["window"]), np.array(state["first"])
    if not bool((window > 0).all()):
        return None
    late = window[-len(window) // 2 :]
    error = math.hypot(float(first.std()) / math.sqrt(first.size), float(late.std()) / math.sqrt(late.size))
    return _Course(first.size, late.size, float(first.mean()), float(late.mean()), error)


class _Chance(NamedTuple):
    """A choice among classes near what guessing costs: the mean of its losses, the limit, whether they stay there."""

    level: float
    limit: float
    stays: bool
    words: str


def _chance(state: dict[str, Any], record: Record, config: WatchConfig) -> _Chance | None:
    """None where the loss chooses among no classes, or is far from the level of guessing."""
    classes, window = classes_of(record), np.array(state["window"])
    if not math.isfinite(classes) or window.size < 2 or state["mixed"]:
        return None  # of tasks in turn each has a level of its own
    chance, tolerance = math.log(max(2.0, classes)), config.plateau_drop
    early, late = np.array_split(window, 2)
    level, noise = float(window.mean()), 2 * float(window.std()) / math.sqrt(window.size)
    if level < (1 - config.release_factor * tolerance) * chance or level > (1 + CHANCE_ABOVE) * chance:
        return None
    sure = state["seen"] >= SURE_STEPS
    least = max(FALLING * chance * window.size / WINDOW, 2 * noise) if sure else noise / 2
    limit = (1 - tolerance) * chance
    words = (
        f"the mean loss of the last {window.size} steps is {level:.3g} and does not fall: guessing among "
        f"{classes:.0f} classes gives {chance:.3g} (limit {limit:.3g})"
    )
    return _Chance(level, limit, bool(level >= limit and early.mean() - late.mean() <= least), words)


class TooSlow(Detector):
    """The loss is where it began, and no step has ever moved the weights as far as training does.

    Far larger than what changes nothing at all (`UpdateTooSmall`), so it needs the loss for a witness.
    """

    kind, level = "update_too_small", OUTCOME
    yields_to = frozenset({"update_too_small", "representation_collapse", "rank_collapse", "constant_output"})
    shown_by = ("update_ratio",)
    begins_with: ClassVar[dict[str, Any]] = {
        "window": deque(maxlen=WINDOW),
        "first": deque(),
        "best": 0.0,
        "course": {},
        "fresh": None,
        "choice": None,
        "mixed": False,
        "seen": 0,
    }

    @property
    def name(self) -> str:
        """Beside the detectors of updates alone."""
        return "too_slow"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        losses, state = losses_of(record), self.state
        _learn(state, record, losses)
        state["seen"] = min(state["seen"] + losses.size, max(SURE_STEPS, self.config.plateau_steps))
        updates = updates_of(record, state["course"])
        if updates is not None:
            state["best"] = max(state["best"], updates.overall, updates.usual)
        few = state["seen"] < self.config.plateau_steps or len(state["first"]) < BEGINNING
        if updates is None or losses.size == 0 or few or not state["fresh"]:
            yield self.unseen(cause="plateau")
        elif state["best"] < SLOW and (words := self._stays(record)):
            yield from said(self._flat(words, steady=updates.working))

    def _stays(self, record: Record) -> str:
        """What the loss does where it does not fall, from its start or from what guessing costs; "" where it falls."""
        course, chance = _course(self.state), _chance(self.state, record, self.config)
        if course is not None and course.flat and course.level >= (1 - CREEPS) * course.start:
            return f"the loss has not fallen: {course.words}"
        return chance.words if chance is not None and chance.stays else ""

    def _flat(self, words: str, *, steady: bool) -> Finding | None:
        if not steady:
            return self.near(True, cause="plateau")
        best = self.state["best"]
        message = (
            f"no step has changed the weights by more than {best:.2g} of their norm (limit {SLOW:.2g}; about 1e-3 is "
            f"usual), and {words}"
        )
        advice = "raise the learning rate, or look at what scales the loss or its gradient down (a temperature, a clip)"
        return self.found("", best, SLOW, message, advice=advice, cause="plateau")


class LossPlateau(Detector):
    """The loss stays at what guessing gives, or where it began.

    A loss that chooses among classes has a level of guessing, the log of their number. What converged is below that
    level, what still learns falls. Any other loss is measured by the run's own start and its noise.
    """

    kind, level = "loss_plateau", OUTCOME
    yields_to = frozenset({"update_too_small", "representation_collapse", "rank_collapse", "constant_output"})
    advice = (
        "look at what the loss compares: whether inputs and labels still belong together, whether the loss takes "
        "logits (no softmax before cross_entropy); then try a lower learning rate or larger batches"
    )
    begins_with: ClassVar[dict[str, Any]] = {
        "window": deque(maxlen=WINDOW),
        "first": deque(),
        "lowest": math.inf,
        "rate": {},
        "seen": 0,
        "fresh": None,
        "choice": None,
        "mixed": False,
        "rivals": 0,
    }

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        losses, state = losses_of(record), self.state
        _learn(state, record, losses)
        state["rivals"] = min(state["rivals"] + ("other_losses" in record.metrics), PLAYERS)
        steady = working(record, state["rate"])
        seen = state["seen"] = min(state["seen"] + losses.size, max(SURE_STEPS, self.config.plateau_steps))
        if losses.size == 0 or seen < self.config.plateau_steps:
            yield self.unseen()
            return
        classes = classes_of(record)
        if state["rivals"] >= PLAYERS:
            yield self.unseen()  # two players near their equilibrium guess
        elif math.isfinite(classes):
            chance = _chance(state, record, self.config)
            yield from said(None if chance is None else self._at_chance(chance, record, steady=steady))
        elif "loss_classes" in record.metrics:
            yield from said(self._at_start(record, steady=steady))
        else:
            yield self.unseen()

    def _at_chance(self, chance: _Chance, record: Record, *, steady: bool) -> Finding | None:
        if not (chance.stays and steady):
            return self.near(True)
        return self.found("", chance.level, chance.limit, f"{chance.words}; {_steps(record)}")

    def _at_start(self, record: Record, *, steady: bool) -> Finding | None:
        """A loss without a level of guessing, which has never fallen though its noise would show it."""
        state, course = self.state, _course(self.state)
        if course is None or not state["fresh"] or course.size < BEGINNING:
            return self.unseen()
        start, level = course.start, course.level
        state["lowest"] = min(state["lowest"], level)
        if state["lowest"] < (1 - FLAT) * start or not course.flat or level > (1 + CHANCE_ABOVE) * start:
            return None
        if not steady or start - level > course.error:
            return self.near(True)
        limit = (1 - FLAT) * start
        message = f"the loss has not fallen since the start: {course.words} (limit {limit:.4g}); {_steps(record)}"
        advice = (
            "look whether the loss depends on what the model answers (masks, weights of its terms, second derivatives "
            "through ReLU are 0); then try another learning rate"
        )
        return self.found("", level, limit, message, advice=advice)


class LossMisfit(Detector):
    """A loss of a choice among classes is given what it does not take, which its graph shows."""

    kind, level = "loss_plateau", WIRING
    begins_with: ClassVar[dict[str, Any]] = {}

    @property
    def name(self) -> str:
        """Apart from the rule on the loss itself."""
        return "loss_misfit"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        code = record.metrics.get("loss_misfit")
        if code is None or code.size == 0 or np.isnan(code[0]):
            yield self.unseen(cause="misfit")
        elif told := MISFITS.get(code.item(0)):
            message, advice = told
            yield self.found("", float(code[0]), 0.0, message, advice=advice, cause="misfit")


MISFITS: dict[float, tuple[str, str]] = {
    1: (
        "a sigmoid (or softmax) stands before binary_cross_entropy_with_logits, which applies one itself: it then sees "
        "probabilities between 0.5 and 0.73 only, and the loss cannot fall far",
        "give the loss the logits: leave the sigmoid out of the model while training",
    ),
    2: (
        "a softmax stands before cross_entropy, which applies one itself: the loss cannot fall far, and its gradient "
        "is small",
        "give the loss the logits: leave the softmax out of the model while training",
    ),
    3: (
        "a sigmoid stands before cross_entropy, which takes logits of any size: the loss cannot fall far",
        "give the loss the logits: leave the sigmoid out of the model while training",
    ),
    4: (
        "the softmax before the loss runs along another axis than the classes (over the samples of a batch, or over "
        "positions): a sample's probabilities do not add up to 1",
        "softmax over the class axis: dim=1 of [B, C] and [B, C, ...]",
    ),
}
"""`loss_misfit` -> message and advice."""


def classes_of(record: Record) -> float:
    """The number of classes the loss chooses among, NaN where it is no such choice.

    Records made before the loss's graph was read have the width of the output alone.
    """
    known: Array | None = record.metrics.get("loss_classes", record.metrics.get("output_width"))
    return float(known[0]) if known is not None and known.size == 1 else math.nan


def _steps(record: Record) -> str:
    """What gradients and updates were in this record."""
    gradients, updates = (record.metrics.get(name) for name in ("param_grad_norm", "update_ratio"))
    if gradients is not None and not bool((gradients > 0).any()):
        return "no parameter has a gradient"
    if updates is not None and not bool((updates > 0).any()):
        return "no weight moves"
    if gradients is None or updates is None:
        return "nothing else is known of the steps"
    return "gradients arrive and weights move"
