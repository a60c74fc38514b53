"""What there is to say of a run that left the corridor: when, where, in which metrics, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowscope.corridor.curves import PHASES
from flowscope.corridor.tournament import freedom
from flowscope.detectors.rows import labels_of
from flowscope.records import FlowLayout, Record, RunHeader

RATE = 0.01
"""A departure that happens to more than one in a hundred good runs is a note."""


@dataclass(frozen=True)
class Beyond:
    """One metric that left the corridor.

    Attributes:
        metric: its key.
        step: the first step at which it lay beyond.
        where: the path of its row: of a depth axis the first in the order of the pass, else the farthest.
        depth: the number of that place in its flow, counted from the input; infinite where it lies in none.
        times: how many times as far off as the nearest of the good runs' limits, the farthest of its rows.
        chance: of that by the model.
        phase: one of `PHASES`.
    """

    metric: str
    step: int
    where: str
    depth: float
    times: float
    chance: float
    phase: str

    @property
    def order(self) -> tuple[int, int, float]:
        """By step, in a step by phase, in a phase the farthest first."""
        return self.step, PHASES.index(self.phase), -self.times


@dataclass(frozen=True)
class Departure:
    """A run has parted from its group.

    Attributes:
        beyond: the metrics, as they left the corridor.
        runs: how many good runs there are.
        chance: with which this happens to a good run, over the whole run and all metrics: 1 / (runs + 1) without an
            assumption, or less by the model.
        certain: whether the chance is `RATE` or less.
    """

    beyond: tuple[Beyond, ...]
    runs: int

    @property
    def step(self) -> int:
        """The first step."""
        return self.beyond[0].step

    @property
    def where(self) -> str:
        """The place that comes first: of the first step's first phase that has one.

        Weights and settings: the farthest off. Hidden states: the first from the input, and of two of which one holds
        the other the inner. Gradients and updates: of flows the first from the output, else the farthest.
        """
        placed = [one for one in self.beyond if one.step == self.step and one.where]
        first = min((PHASES.index(one.phase) for one in placed), default=None)
        found = [one for one in placed if PHASES.index(one.phase) == first]
        if not found:
            return ""
        if PHASES[first or 0] == "forward":
            return min(found, key=lambda one: (one.depth, -one.where.count("."), -one.times)).where
        return max(found, key=lambda one: one.times).where

    @property
    def certified(self) -> float:
        """The chance that needs no assumption."""
        return 1 / (self.runs + 1)

    @property
    def chance(self) -> float:
        """The least chance by the model of any metric so far."""
        return min(one.chance for one in self.beyond)

    @property
    def certain(self) -> bool:
        """Whether a good run parts so with a chance of `RATE` at most."""
        return min(self.certified, self.chance) <= RATE

    def __str__(self) -> str:
        """The sentence."""
        names = list(dict.fromkeys(one.metric for one in self.beyond))
        then = "".join(f", then {name}" for name in names[1:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        at = f" at {self.where}" if self.where else ""
        return f"parts from its group of {self.runs} runs at step {self.step}{at}, first in {names[0]}{then}{more}"

    @property
    def odds(self) -> str:
        """How often a good run does so."""
        sure = f"1 of {self.runs + 1} good runs does so at most"
        if self.certified <= RATE:
            return sure
        model = f"log scores normal, t with {freedom(self.runs)} degrees of freedom"
        return f"{sure}; by the model ({model}) {self.chance:.1g}"


def depth_of(where: str, flows: Sequence[FlowLayout]) -> float:
    """The number of a place in the flow that holds it: a block is behind its input; infinite where no flow holds it."""
    path, _, side = where.partition(":")
    path = path.partition("#")[0]
    for flow in flows:
        for number, block in enumerate(flow.blocks):
            if path == block or path.startswith(f"{block}."):
                return float(number if side else number + 1)
        if path in flow.points:
            return float(flow.points.index(path))
    return math.inf


def behind_all(record: Record, header: RunHeader) -> str:
    """The module of the last parameter, where it lies behind the blocks: the head; else ""."""
    labels = labels_of(record, header, "param_norm")
    module = labels[-1].rpartition(".")[0] if labels else ""
    return module if math.isinf(depth_of(module, header.flows)) else ""
