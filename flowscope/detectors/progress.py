"""Whether a run makes progress: a symptom of a run that learns is a note, of one that does not a warning.

Dead units, saturated activations, samples that look alike are found in healthy runs too, and pass. What tells a fault
from a phase is the loss (AUTOTRAINER, Zhang et al. 2021, alarms on a symptom only where the run does badly).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import fmean, median, pstdev
from typing import Any

from flowscope.detectors.detector import SIGNAL, Detector, Finding, pack, unpack
from flowscope.detectors.losses import PLAYERS, RESTART, losses_of
from flowscope.detectors.rates import largest_rate
from flowscope.records import Record

WINDOW = 60
"""So many of the last losses tell whether the loss falls or rises: their later half against their earlier one."""
LONG = 200
"""So many tell whether one falls that has a high floor beneath it (an image's own entropy), below all of its noise.

A choice among classes has none."""
FEW = 20
"""With fewer losses nothing speaks against progress"""
EARLY = 0.05
"""but that they rose by this share, or stand exactly still."""
FELL = 0.2
"""A run has learned something where its loss once was below its start by this share;"""
KEPT = 0.5
"""it still knows it where the loss has given back less than this share of that."""
HARMLESS = 0.02
"""A rise by less than this share of all that was learned (a target copied after it was met) is no loss of it."""
RECENT = 20
"""So many records back a schedule's restart is looked for."""
SURE = 2.0
"""Standard errors by which two means differ."""


class Progress:
    """The course of a run's losses.

    Attributes:
        state: what is known of it, of the kinds of `Detector.state`.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"best": math.inf, "count": 0, "rivals": 0, "classes": math.nan}
        self.state |= {"first": deque(maxlen=FEW // 4), "last": deque(maxlen=LONG), "rates": deque(maxlen=RECENT)}

    def look(self, record: Record) -> None:
        """Learn from one more record."""
        state, losses = self.state, losses_of(record).tolist()
        if math.isfinite(rate := largest_rate(record)):
            state["rates"].append(rate)
        first, last = state["first"], state["last"]
        first.extend(losses[: first.maxlen - len(first)])
        last.extend(losses)
        state["count"] = min(state["count"] + len(losses), WINDOW)
        state["rivals"] = min(state["rivals"] + ("other_losses" in record.metrics), PLAYERS)
        classes = record.metrics.get("loss_classes", record.metrics.get("output_width"))
        if classes is not None and classes.size == 1:
            state["classes"] = float(classes[0])
        if losses and state["count"] >= FEW:
            state["best"] = min(state["best"], median(list(last)[-FEW // 2 :]))

    @property
    def made(self) -> bool | None:
        """Whether the run makes progress, or has and keeps it; None where no loss tells.

        A choice among classes has taught nothing while it costs more than guessing. Among several players (GAN, actor
        and critic) a loss is no measure.
        """
        first, last = list(self.state["first"]), list(self.state["last"])
        if not last or self.state["rivals"] >= PLAYERS:
            return None
        if self.state["count"] < FEW:
            return bool(last[-1] != first[0] and median(last[-3:]) - first[0] <= EARLY * abs(first[0]))
        (fall, error), now = _fall(last[-WINDOW:]), median(last[-WINDOW // 2 :])
        guessing = math.log(max(2.0, self.state["classes"])) if math.isfinite(self.state["classes"]) else math.inf
        if now > guessing:
            return False
        # to come down to guessing from a first loss far above it is no learning
        start, best = min(fmean(first), guessing), self.state["best"]
        learned = start - best > FELL * abs(start) and start - now > KEPT * (start - best)
        if not learned and len(last) > 2 * WINDOW and math.isnan(self.state["classes"]):
            slow, noise = _fall(last)
            learned = slow > 2 * noise
        harmless = max(error, HARMLESS * (start - best))
        return bool(fall > error or (learned and (-fall <= harmless or self._restarted())))

    def _restarted(self) -> bool:
        """Whether the schedule has raised the rate again: the loss rises with it."""
        rates = list(self.state["rates"])
        least = rates.index(min(rates)) if rates else 0
        return bool(rates) and max(rates[least:]) > RESTART * rates[least]

    def judge(self, findings: list[Finding], detector: Detector) -> list[Finding]:
        """The findings of a detector: a symptom's warnings are notes where the run makes progress.

        So are its signals (not outcomes) among several players, whose nets are strained by each other's play.
        """
        if not any(f.severity == "warning" and f.level == "beyond" for f in findings):
            return findings
        return [self._noted(f, f.symptom or detector.symptom, detector) for f in findings]

    def _noted(self, finding: Finding, symptom: str, detector: Detector) -> Finding:
        if not symptom or finding.severity != "warning":
            return finding
        if symptom == "at first":
            excused = self.state["count"] < FEW and self.made
        else:
            excused = self.made or (detector.level == SIGNAL and self.state["rivals"] >= PLAYERS)
        return replace(finding, severity="info") if excused else finding

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: pack(value) for name, value in self.state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, value in state.items():
            self.state[name] = unpack(value, self.state.get(name))


def _fall(losses: list[float]) -> tuple[float, float]:
    """By how much the later half of some losses lies below the earlier one, and `SURE` standard errors of that."""
    early, late = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    return fmean(early) - fmean(late), SURE * math.hypot(pstdev(early), pstdev(late)) / math.sqrt(len(early))
