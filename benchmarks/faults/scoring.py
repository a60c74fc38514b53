"""From runs to scores. A run is a plain dict (as it is cached), so that scoring needs no torch.

Keys of a run: `case`, `family`, `score` ("faulty", "healthy", "apart"), `kinds`, `place`, `first`, `seed`, `variation`,
`wrong` (what contradicts the label, or None), and `alarms`: detector -> [[step, kind, where, severity], ...].
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Run = dict[str, Any]
OURS = "flowscope"
LOUD = ("warning", "error")


@dataclass(frozen=True)
class Verdict:
    """What one detector made of one run.

    Attributes:
        alerted: it raised a warning or an error at the first possible step or later.
        early: it raised one before (a false alarm in a faulty run).
        kind: one of them was of an accepted kind.
        placed: one of an accepted kind named a right place; None where no place means anything.
        delay: steps from the first possible symptom to the first alert of an accepted kind (else of any).
    """

    alerted: bool
    early: bool
    kind: bool
    placed: bool | None
    delay: int | None


def judge(run: Run, detector: str = OURS) -> Verdict:
    """Return the verdict on one run."""
    loud = [alarm for alarm in run["alarms"].get(detector, []) if alarm[3] in LOUD]
    first = run["first"]
    timely = sorted((alarm for alarm in loud if alarm[0] >= first), key=lambda alarm: alarm[0])
    right = [alarm for alarm in timely if alarm[1] in run["kinds"]]
    placed = None
    if run["place"] is not None:
        placed = any(re.fullmatch(run["place"], place(alarm[2])) for alarm in right)
    chosen = (right or timely)[:1]
    delay = chosen[0][0] - first if chosen else None
    return Verdict(bool(timely), any(alarm[0] < first for alarm in loud), bool(right), placed, delay)


def place(where: str) -> str:
    """A module or parameter path as places are written: call numbers are left out."""
    return re.sub(r"\[\d+\]|#\d+", "", where)


@dataclass
class Score:
    """Counts over runs of one detector."""

    detector: str
    faulty: int = 0
    alerted: int = 0
    kind: int = 0
    placed: int = 0
    placeable: int = 0
    early: int = 0
    healthy: int = 0
    false: int = 0
    delays: tuple[int, ...] = ()

    @property
    def recall(self) -> float:
        return share(self.alerted, self.faulty)

    @property
    def right_kind(self) -> float:
        return share(self.kind, self.faulty)

    @property
    def right_place(self) -> float:
        return share(self.placed, self.placeable)

    @property
    def median_delay(self) -> float | None:
        return statistics.median(self.delays) if self.delays else None

    @property
    def precision(self) -> float:
        """Alerted faulty runs among all alerted runs."""
        return share(self.alerted, self.alerted + self.false)


def share(part: int, whole: int) -> float:
    """A ratio; NaN of nothing."""
    return part / whole if whole else float("nan")


def add_up(runs: Iterable[Run], detector: str = OURS) -> Score:
    """Score a detector over runs that show their label; those scored apart and mislabelled ones are left out.

    Right place: an alert of an accepted kind names one, out of all faulty runs that have a place.
    """
    score, delays = Score(detector), []
    for run in runs:
        if run["wrong"] or run["score"] == "apart":
            continue
        verdict = judge(run, detector)
        if run["score"] == "healthy":
            score.healthy += 1
            score.false += verdict.alerted or verdict.early
            continue
        score.faulty += 1
        score.alerted += verdict.alerted
        score.kind += verdict.kind
        score.early += verdict.early
        if verdict.placed is not None:
            score.placeable += 1
            score.placed += verdict.placed
        if verdict.delay is not None:
            delays.append(verdict.delay)
    score.delays = tuple(delays)
    return score


def by(runs: Sequence[Run], key: str) -> dict[str, list[Run]]:
    """Runs grouped by one of their keys, in order of appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run[key], []).append(run)
    return groups
