"""A group of good runs: from a folder of them, or from their records.

Axis letters: N good runs, K steps, R rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowscope.corridor.curves import Stack, curves_of, stacked
from flowscope.corridor.departure import Departure
from flowscope.corridor.follower import Follower
from flowscope.corridor.table import Table
from flowscope.corridor.tournament import WINDOWS, Bounds, judge_of, whole_score
from flowscope.errors import FlowscopeError
from flowscope.records import Array, Record, Run, RunHeader
from flowscope.sinks import read_run
from flowscope.sinks.jsonl import FILE_NAME

LEAST_RUNS = 3
"""A group of fewer has no spread to speak of."""
BAND = (0.1, 0.5, 0.9)
"""The quantiles over runs that are drawn."""


class Corridor:
    """N good runs of one recipe.

    Attributes:
        name: for people.
        header: what the recipe was: of the first run, without the set-up that differs between the good runs (seeds).
        stacks: metric -> its values in the good runs, at the steps and rows that they share.
        table: what the numbers of each step are compared with.
        bounds: what the scores of a run are compared with.
    """

    def __init__(self, name: str, header: RunHeader, stacks: Sequence[Stack]) -> None:
        self.name, self.header = name, header
        known = {stack.key: [j for w in WINDOWS if (j := judge_of(stack, w)) is not None] for stack in stacks}
        judges = {key: found for key, found in known.items() if found}
        if not judges:
            raise FlowscopeError(f"{name}: the good runs share no metric at any step; expected runs of one recipe.")
        every = [judge for found in judges.values() for judge in found]
        self.stacks = {key: first.stack for key, (first, *_) in judges.items()}
        self.table = Table(judges)
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
    def runs(self) -> int:
        """How many good runs."""
        return len(self.bounds.of_good)

    @property
    def steps(self) -> Collection[int]:
        """The steps at which anything is judged."""
        return self.table.lines.keys()

    def band(self, key: str) -> tuple[tuple[int, ...], Array]:
        """The steps [K] of a metric and its quantiles `BAND` over the runs, [3, K, R], as the metric is recorded."""
        stack = self.stacks[key]
        quantiles: Array = np.quantile(stack.values, BAND, axis=0)
        return stack.steps, np.exp(quantiles) if stack.in_logs else quantiles

    def judge(self, records: Iterable[Record]) -> Departure | None:
        """What a finished run does; None: it stays with its group."""
        follower = self.follow()
        for record in records:
            follower.look(record)
        return follower.departure

    def follow(self, state: dict[str, Any] | None = None) -> Follower:
        """One that judges a run record by record, and remembers in `state`."""
        return Follower(self.table, self.bounds, self.header, state)


def recipe_of(headers: Sequence[RunHeader]) -> RunHeader:
    """The first header, with what all of them say of their set-up."""
    first, *others = headers
    setup = {name: said for name, said in first.setup.items() if all(one.setup.get(name) == said for one in others)}
    return replace(first, setup=setup)


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
