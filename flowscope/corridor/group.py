"""A group of good runs, and another run followed beside it, record by record.

Axis letters: N good runs, K steps, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flowscope.corridor.curves import PHASES, Stack, curves_of, joined_rows, numbers_of, stacked
from flowscope.corridor.tournament import WINDOWS, Bounds, Judge, judge_of, whole_score
from flowscope.detectors.rows import labels_of
from flowscope.errors import FlowscopeError
from flowscope.records import Array, FlowLayout, Record, Run, RunHeader
from flowscope.sinks import read_run
from flowscope.sinks.jsonl import FILE_NAME

LEAST_RUNS = 3
"""A group of fewer has no spread to speak of."""
RATE = 0.01
"""A departure that happens to more than one in a hundred good runs is a note."""
BAND = (0.1, 0.5, 0.9)
"""The quantiles over runs that are drawn."""


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
        return f"{sure}; by the model (log scores normal, t with {self.runs - 1} degrees of freedom) {self.chance:.1g}"


class Corridor:
    """N good runs of one recipe.

    Attributes:
        name: for people.
        header: what the recipe was: of the first run, without the set-up that differs between the good runs (seeds).
        judges: metric -> how it is judged, at the steps and rows that the runs share.
        bounds: what the scores of a run are compared with.
    """

    def __init__(self, name: str, header: RunHeader, stacks: Sequence[Stack]) -> None:
        self.name, self.header = name, header
        self.judges: dict[str, list[Judge]] = {}
        for stack in stacks:
            judges = [judge for window in WINDOWS if (judge := judge_of(stack, window)) is not None]
            if judges:
                self.judges[stack.key] = judges
        if not self.judges:
            raise FlowscopeError(f"{name}: the good runs share no metric at any step; expected runs of one recipe.")
        every = [judge for judges in self.judges.values() for judge in judges]
        self.bounds = Bounds(np.array([whole_score(every, run) for run in range(len(every[0].centre))]))

    @classmethod
    def of_runs(cls, name: str, runs: Sequence[Run]) -> Corridor:
        """The corridor of finished runs.

        Raises:
            FlowscopeError: fewer than `LEAST_RUNS`, or they have nothing in common.
        """
        read = [run for run in runs if run.records]
        if len(read) < LEAST_RUNS:
            raise FlowscopeError(f"{name}: got {len(read)} runs with records, expected {LEAST_RUNS} at least.")
        header = recipe_of([run.header or RunHeader() for run in read])
        return cls(name, header, stacked([curves_of(run.records) for run in read], header.metrics))

    @property
    def stacks(self) -> list[Stack]:
        """What is judged."""
        return [judges[0].stack for judges in self.judges.values()]

    @property
    def runs(self) -> int:
        """How many good runs."""
        return len(self.bounds.of_good)

    @cached_property
    def steps(self) -> frozenset[int]:
        """The steps at which anything is judged."""
        return frozenset(step for stack in self.stacks for step in stack.steps)

    def band(self, key: str) -> tuple[tuple[int, ...], Array]:
        """The steps [K] of a metric and its quantiles `BAND` over the runs, [3, K, R], as the metric is recorded."""
        stack = self.judges[key][0].stack
        quantiles: Array = np.quantile(stack.values, BAND, axis=0)
        return stack.steps, np.exp(quantiles) if stack.in_logs else quantiles

    def judge(self, records: Iterable[Record]) -> Departure | None:
        """What a finished run does; None: it stays with its group."""
        follower = Follower(self)
        for record in records:
            follower.look(record)
        return follower.departure


def recipe_of(headers: Sequence[RunHeader]) -> RunHeader:
    """The first header, with what all of them say of their set-up."""
    first, *others = headers
    setup = {name: said for name, said in first.setup.items() if all(one.setup.get(name) == said for one in others)}
    return replace(first, setup=setup)


class Follower:
    """A run beside its group, record by record.

    Args:
        corridor: the group.
        state: empty at first; all that is remembered, as plain numbers, words and arrays.
    """

    def __init__(self, corridor: Corridor, state: dict[str, Any] | None = None) -> None:
        self.corridor = corridor
        self.state = {} if state is None else state
        self.state.setdefault("beyond", {})
        self.state.setdefault("recent", {})

    def look(self, record: Record) -> None:
        """Judge one more record."""
        if record.step not in self.corridor.steps:
            return
        for key, values in numbers_of(record).items():
            judges = self.corridor.judges.get(key)
            if judges is None or record.step not in judges[0].stack.steps:
                continue
            fitted = _fitted(values, judges[0].stack)
            if fitted is not None:
                self._metric(record, judges, fitted)

    def _metric(self, record: Record, judges: Sequence[Judge], values: Array) -> None:
        stack = judges[0].stack
        number = stack.steps.index(record.step)
        kept = self.state["recent"].get(stack.key)
        follows = kept is not None and kept["number"] == number - 1
        rows = np.vstack([kept["rows"], values])[-max(WINDOWS) :] if follows else values[None]
        self.state["recent"][stack.key] = {"number": number, "rows": rows}
        for judge in judges:
            if len(rows) >= judge.window:
                means = rows[-judge.window :].mean(axis=0)
                self._beyond(record, stack, judge.deviations(means, number - judge.window + 1))

    def _beyond(self, record: Record, stack: Stack, found: Array) -> None:
        """Note a metric of which a row lies beyond all the good runs' limits, once, and once more when it is sure."""
        bounds, known = self.corridor.bounds, self.state["beyond"].get(stack.key)
        times = bounds.beyond(found)
        rows = np.flatnonzero(times > 1)
        if not rows.size or (known is not None and known["chance"] <= RATE):
            return
        farthest = int(np.argmax(times))
        chance = bounds.chance_of(found[:, farthest])
        if known is not None and chance > RATE:
            return
        row = farthest if not stack.per_flow else int(rows[-1 if stack.phase == "backward" else 0])
        where, phase = stack.labels[row] if row < len(stack.labels) else "", stack.phase
        if phase == "output":
            where = behind_all(record, self.corridor.header)
        if phase == "state" and record.step > min(stack.steps):
            phase = "backward"  # by now weights are what updates made of them
        self.state["beyond"][stack.key] = {
            "step": record.step if known is None else known["step"],
            "where": where,
            "depth": depth_of(where, self.corridor.header.flows),
            "times": float(times[farthest]),
            "chance": chance,
            "phase": phase,
        }

    @property
    def departure(self) -> Departure | None:
        """What has been found so far."""
        found = [Beyond(key, **told) for key, told in self.state["beyond"].items()]
        return Departure(tuple(sorted(found, key=lambda one: one.order)), self.corridor.runs) if found else None


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


def _fitted(values: Array, stack: Stack) -> Array | None:
    """Values [R'] at the rows of the stack: by relative depth where there is one, None where there is none."""
    rows = stack.values.shape[2]
    if values.size == stack.recorded:
        return joined_rows(values, rows)
    if not stack.per_flow or values.size < 2:
        return None
    fitted: Array = np.interp(np.linspace(0, 1, rows), np.linspace(0, 1, values.size), values)
    return fitted


def read_group(path: str | Path) -> Corridor:
    """The corridor of a folder that holds runs.

    Raises:
        FlowscopeError: it holds fewer than `LEAST_RUNS` runs, or they have nothing in common.
    """
    folders = runs_below(path)
    if len(folders) < LEAST_RUNS:
        raise FlowscopeError(
            f"{path}: got {len(folders)} runs below it, expected a folder of at least {LEAST_RUNS} good runs of one "
            "recipe (each the log_dir of flowscope.watch), or a golden profile (flowscope golden list)."
        )
    return Corridor.of_runs(str(path), [read_run(folder) for folder in folders])


def runs_below(path: str | Path) -> list[Path]:
    """The folders of the runs below a folder, the folder itself left out."""
    return sorted(file.parent for file in Path(path).glob(f"*/**/{FILE_NAME}")) if Path(path).is_dir() else []
