"""`loss_spike`: what the losses of all steps say, unsampled ones too (`step_losses`), of a loss that jumped.

What a jump means depends on what happened. Where steps were larger than they ever were, where the optimizer's state
began anew, or where the loss is far beyond all it ever was, it is told at once. Where all else is calm, the data or the
target changed (a copied target net, a next stage, an adversary): such a jump is watched for some dozen steps, and what
comes back by itself is an info.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flowscope.detectors.detector import Array, Detector, Finding, said
from flowscope.detectors.rates import largest_rate
from flowscope.detectors.strain import Strain
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
LATE_LOST = 0.1
"""Late in training less is much: this share, where the loss stands at a multiple of its level ..."""
LATE_FACTOR = 10.0
"""... by this factor."""
SPAN = 5
"""A spike holds for more than half of this many steps."""
LOUD = 5.0
"""A loss above the largest the run ever had by this factor is no other batch and no other target."""
RESTART = 2.0
"""A learning rate above the window's least by this factor, within its earlier peak, was raised by its schedule."""
CALM_WAIT = 60
"""Steps that a jump has to come back in, where nothing but the loss is unusual; longer while it falls."""
STRAINED_WAIT = 20
"""The same for a late jump of less than half of what was learned, where steps were unusual too."""
STILL_RISES = 2
"""So many times as long where it still rises: only behind its top can it come back."""
LONGEST_WAIT = 400
"""However slowly it falls."""
BACK = 0.5
"""Having come back means: by half of the jump."""
PARTLY_BACK = 0.75
"""And more than a quarter of it back is a new level that the run learns on."""
TOLD_AT_MOST = 2
"""Of one cause a run is told so often: what recurs (a target copied each thousand steps) is known by then."""
PLAYERS = 3
"""So many records with a second loss show that there are several players."""
AFTER_RESTART = 100
"""Steps after an optimizer's state began anew in which any rise beyond noise is due to it."""


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
    """One step: the level before it, how far five losses may rise above it and do, the window's largest rise, size.

    `late`: beyond the limit only because the level is so low.
    """

    level: float
    rise: float
    above: float
    highest: float
    size: int
    late: bool


class _Jump(NamedTuple):
    """The worst of the steps of one record that were beyond the limit."""

    value: float
    judged: _Judged
    ago: int
    """How many steps before the record's the worst was."""
    onset: int
    """The step at which it began."""


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
        "largest": 0.0,
        "strain": Strain.begins_with,
        # a jump that is watched: the step it began at, its level and height, how many steps it has; and its losses
        "waiting": {},
        "after": deque(maxlen=LONGEST_WAIT),
        "told": {},
        "standing": "",
        "rivals": 0,
        "judged": False,
        "optimizer": {},
    }

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run, and one where the optimizer's state began anew."""
        del header
        anew = self._began_anew(record)
        yield from said(anew)
        losses = losses_of(record)
        if losses.size == 0:
            yield self.unseen()
            return
        self.state["rivals"] = min(self.state["rivals"] + ("other_losses" in record.metrics), PLAYERS)
        self.state["judged"] = "" in record.metric_labels.get("trained_through", ())
        restarted, strain = self._rate_rose(record), Strain(self.state["strain"])
        strain.look(record)
        last, first = self.state["last"], self.state["first"]
        recent = [*last, *losses.tolist()]
        # the median of five: one or two odd batches are no spike
        missing = SPAN - 1 - len(last)
        padded = [recent[0]] * missing + recent
        smooth = [median(padded[i : i + SPAN]) for i in range(losses.size)]
        # a loss joins the window when it leaves the five: then it is known whether it began a spike
        leaving = padded[: losses.size]
        last.extend(losses.tolist())
        first.extend(losses.tolist()[: SPAN - len(first)])
        lately = record.step - self.state["optimizer"].get("anew", -math.inf) <= AFTER_RESTART
        # what only fills up the first five was no loss of its own
        judged = [None if i < missing else self._judge(leaving[i], value, lately) for i, value in enumerate(smooth)]
        jump = None if restarted else self._jump(record, smooth, judged)
        finding = self._meaning(record, losses, jump, strain, lately=lately)
        self.state["largest"] = max(self.state["largest"], *smooth)
        self.state["standing"] = finding.cause or "jump" if finding is not None and finding.level == "beyond" else ""
        if finding is None and not self.state["waiting"]:
            known = [one for one in judged if one is not None]
            close = any(one.above > one.rise / self.config.release_factor for one in known)
            yield from said(self.near(bool(close)))
        yield from said(finding)

    @property
    def _rivals(self) -> bool:
        """Whether this loss is one of several, each of another optimizer: it is no measure of progress."""
        return bool(self.state["rivals"] >= PLAYERS)

    # -- one step after the other -------------------------------------------------------------------------------------

    def _judge(self, leaving: float, smooth: float, lately: bool) -> _Judged | None:
        """Judge one step by what came before it, however many of them a record brings; then learn from it."""
        window, rises = self.state["window"], self.state["rises"]
        if len(rises) < ENOUGH // 2:
            self._add(leaving)
            return None
        level = median(list(window)[-ENOUGH:])
        spread = deviation(rises, median(rises))
        highest = max(0.0, *rises)
        progress = median(self.state["first"]) - level
        least = max(NOISE * spread, self.config.loss_spike * highest, LEAST_RISE * abs(level), 1e-12)
        usual = max(least, LEAST_LOST * progress)
        late = max(least, LATE_LOST * progress, (LATE_FACTOR - 1) * level) if level > 0 else math.inf
        rise = least if lately else min(usual, late)
        judged = _Judged(level, rise, smooth - level, highest, len(window), smooth - level <= usual and not lately)
        self._learn(leaving, usual=judged.above <= rise)
        return judged

    def _learn(self, leaving: float, *, usual: bool) -> None:
        """Add what was no spike to the window; a level that lasts for ten windows becomes the usual one."""
        self.state["outside"] = 0 if usual else self.state["outside"] + 1
        if self.state["outside"] > 10 * WINDOW:
            self._begin_again()
            usual = True
        if usual:
            self._add(leaving)

    def _begin_again(self) -> None:
        """The level that is now is the usual one."""
        self.state["window"].clear()
        self.state["rises"].clear()
        self.state["outside"] = 0

    def _add(self, loss: float) -> None:
        """Add a loss to the window, with how far it rose above the ten before it."""
        window = self.state["window"]
        if len(window) >= ENOUGH // 2:
            self.state["rises"].append(loss - median(list(window)[-(ENOUGH // 2) :]))
        window.append(loss)

    @staticmethod
    def _jump(record: Record, smooth: Sequence[float], judged: Sequence[_Judged | None]) -> _Jump | None:
        beyond = [(i, one) for i, one in enumerate(judged) if one is not None and one.above > one.rise]
        if not beyond:
            return None
        i, worst = max(beyond, key=lambda pair: pair[1].above)
        newest = len(smooth) - 1
        # the median of five is high when the third of them is
        return _Jump(smooth[i], worst, newest - i, record.step - (newest - beyond[0][0]) - SPAN // 2)

    # -- what it means ------------------------------------------------------------------------------------------------

    def _meaning(
        self, record: Record, losses: Array, jump: _Jump | None, strain: Strain, *, lately: bool
    ) -> Finding | None:
        if self.state["waiting"]:
            return self._watched(record, losses)
        if jump is None:
            return None
        standing, strained = self.state["standing"] == "jump", strain.before(jump.onset)
        # without numbers of the steps nothing says that all else is calm
        own = strained is not False and not self._rivals and not jump.judged.late
        loud = jump.value > LOUD * self.state["largest"] > 0
        if standing or lately or own or (loud and strained is not False):
            return self._told(record, jump, lately=lately)
        self.state["waiting"] = {
            "since": jump.onset,
            "level": jump.judged.level,
            "top": jump.value,
            "largest": self.state["largest"],
            "wait": STRAINED_WAIT if strained and not self._rivals else CALM_WAIT,
            # in the units of a net that learns itself a loss may come to any height
            "free": float(self.state["judged"] and strained is False),
        }
        self.state["after"].clear()
        self.state["after"].extend(losses.tolist()[-1 - jump.ago :])
        return self._watched(record, losses[:0])

    def _watched(self, record: Record, losses: Array) -> Finding | None:
        """A jump that waits: whether it came back, falls, or stays."""
        waiting, after = self.state["waiting"], self.state["after"]
        after.extend(losses.tolist())
        level, height = waiting["level"], waiting["top"] - waiting["level"]
        seen = list(after)
        now = median(seen[-2 * SPAN :])
        back = len(seen) >= 2 * SPAN and now <= level + (1 - BACK) * height
        since, top, strained = int(waiting["since"]), waiting["top"], waiting["wait"] == STRAINED_WAIT
        falls = _falls(seen[-CALM_WAIT:]) or _falls(seen[-CALM_WAIT // 2 :])
        rises = _falls(seen[: -CALM_WAIT - 1 : -1])
        climbs = rises and not (strained or self._rivals) and len(seen) < STILL_RISES * CALM_WAIT
        moves = (falls and len(seen) < LONGEST_WAIT) or climbs
        if not back and (len(seen) < waiting["wait"] or moves):
            return None
        self.state["waiting"] = {}
        stays = not back and (strained or now > level + PARTLY_BACK * height)
        if stays and not (self._rivals and (now < LOUD * waiting["largest"] or waiting.get("free"))):
            message = (
                f"the loss rose from a level of {level:.3g} to {top:.3g} at step {since} and has not come back: "
                f"{now:.3g} after {record.step - since} steps"
            )
            return self._counted("jump", self.found("", now, level, message, immediate=True))
        self._begin_again()
        end = "came back by itself" if back else "goes on from a new level"
        message = (
            f"the loss rose from {level:.3g} to {top:.3g} at step {since} while steps were as usual, and {end} "
            f"({now:.3g} at step {record.step}): other data, another target or an adversary, no fault of the steps"
        )
        advice = "nothing to do if data or targets change there; else look at the batches of these steps"
        calm = self.found("", top, level, message, advice=advice, severity="info", immediate=True, cause="calm")
        return self._counted("calm", calm)

    def _told(self, record: Record, jump: _Jump, *, lately: bool) -> Finding | None:
        worst, limit = jump.judged, jump.judged.level + jump.judged.rise
        message = (
            f"the loss rose to {jump.value:.3g} (the median of five steps, up to {jump.ago} steps before "
            f"step {record.step}) from a level of {worst.level:.3g}; in the {worst.size} steps before, single losses "
            f"rose by {worst.highest:.3g} at most (limit {limit:.3g})"
        )
        advice = ""
        if lately:
            message += f"; the optimizer's state began anew at step {int(self.state['optimizer']['anew'])}"
            advice = (
                "load the optimizer's state with the model's (optimizer.load_state_dict), or warm the rate up again"
            )
        return self._counted("jump", self.found("", jump.value, limit, message, advice=advice, immediate=True))

    def _counted(self, cause: str, finding: Finding) -> Finding | None:
        """The finding, unless the run was told of this cause often enough."""
        told = self.state["told"]
        if self.state["standing"] != cause:
            if told.get(cause, 0) >= TOLD_AT_MOST:
                return None
            told[cause] = told.get(cause, 0) + 1
        return finding

    # -- what else happened -------------------------------------------------------------------------------------------

    def _began_anew(self, record: Record) -> Finding | None:
        """Adam counts its steps: a count that fell while the scope went on means that its state was lost."""
        counted, kept = record.metrics.get("optimizer_steps"), self.state["optimizer"]
        if counted is None or not bool(np.isfinite(counted).all()):
            return None
        count, before = float(counted[0]), kept.get("count", -math.inf)
        if count < before:
            kept.update(anew=record.step - count + 1, held=before, until=record.step)
        kept["count"] = count
        if "anew" not in kept or record.step > kept["until"] + AFTER_RESTART:
            return None
        message = (
            f"the optimizer's state began anew at step {int(kept['anew'])}: it has counted {int(count)} steps by now, "
            f"and had counted {int(kept['held'])} before"
        )
        advice = "in a resumed run load the optimizer's state with the model's (optimizer.load_state_dict)"
        return self.found(
            "", count, kept["held"], message, advice=advice, severity="info", immediate=True, cause="anew"
        )

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


def _falls(losses: Sequence[float]) -> bool:
    """Whether the second half of some losses is clearly below the first."""
    half = len(losses) // 2
    early, late = losses[:half], losses[half:]
    if not half:
        return False
    error = math.hypot(float(np.std(early)), float(np.std(late))) / math.sqrt(half)
    return fmean(early) - fmean(late) > 2 * error
