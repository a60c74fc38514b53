"""`bisect`: the first step, phase and place at which two runs part, and what that means."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from flowscope.errors import FlowscopeError
from flowscope.parting.differences import differences, other_weights
from flowscope.parting.distances import distance
from flowscope.parting.looks import RANDOM, Look, Phase, Sides, draws, looks, parameter_rows, told_to_the_bit
from flowscope.parting.matching import flow_pairs, parameters_of, same_shape
from flowscope.parting.meaning import explained
from flowscope.parting.naming import main_part, shared_module
from flowscope.parting.rounding import Rounding, epsilon_of, excuses, excuses_of, measured, steps_of
from flowscope.records import Record, Run, RunHeader
from flowscope.sinks import read_run
from flowscope.sinks.jsonl import FILE_NAME
from flowscope.sinks.reading import file_of

Source = Run | str | os.PathLike[str]
Found = tuple[int, Phase, str, str, float, float]
"""Step, phase, place, message, distance and limit."""
ROUNDING = "rounding*"
"""Folders of this name in that of a run hold runs that show the size of rounding."""


@dataclass(frozen=True)
class Parting:
    """Where two runs part.

    Attributes:
        step: the first step whose numbers differ beyond rounding; None where none does.
        phase: "setup", "input", "forward", "loss", "backward" or "update"; None where the runs are equal.
        where: the module or parameter, by the first run's names; "" for the whole model.
        message: what that means, in a sentence or two.
        distance: the relative size of the difference; 0 where there is none.
        limit: the size of rounding that it is beyond; 0 where every bit counts.
        differs: what the runs were set up with differently.
        compared: so many steps.
    """

    step: int | None
    phase: Phase | None
    where: str
    message: str
    distance: float = 0.0
    limit: float = 0.0
    differs: list[str] = field(default_factory=list)
    compared: int = 0

    def __str__(self) -> str:
        """For people: where, what it means, and what differs."""
        lines = [f"equal: {self.message}"]
        if self.phase is not None:
            lines = [f"part at step {self.step}, {self.phase}, {self.where or 'the model'}", f"  {self.message}"]
        heading = "what differs, good -> bad:" if self.differs else "nothing differs in how they were set up"
        return "\n".join([*lines, heading, *(f"  {line}" for line in self.differs)])

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)


def bisect(good: Source, bad: Source, *, rounding: Sequence[Source] = ()) -> Parting:
    """Return where two runs of one recipe part: the first step, phase and place that differ beyond rounding.

    Where nothing in the runs' set-ups lets sums come in another order, every bit counts. Else the size of rounding is
    that of the runs in `rounding`, and in the folders `rounding*` of the good run; without any it is assumed.

    Args:
        good: a run, its `log_dir`, or its `flowscope.jsonl`.
        bad: the other.
        rounding: runs that differ from the good one by rounding alone, as `flowscope run --rounding` makes them.

    Raises:
        FlowscopeError: one cannot be read, or they have no step in common that was recorded to the bit.
    """
    first, second = _opened(good), _opened(bad)
    pairs = _comparable(steps_of(first, second))
    headers = first.header or RunHeader(), second.header or RunHeader()
    differs = differences(*headers)
    size = measured(first, [*map(_opened, rounding), *beside(good)])
    size.epsilon = epsilon_of(headers)
    found = Search(size).parting([Sides(headers, pair) for pair in pairs])
    return Parting(*found, differs=differs, compared=len(pairs))


def _opened(source: Source) -> Run:
    return source if isinstance(source, Run) else read_run(source)


def beside(good: Source) -> Iterator[Run]:
    """The runs that show the rounding of this one."""
    if not isinstance(good, Run):
        found = sorted(file_of(good).parent.glob(f"{ROUNDING}/{FILE_NAME}"))
        yield from map(read_run, found)


def _comparable(pairs: Sequence[tuple[Record, Record]]) -> list[tuple[Record, Record]]:
    if not pairs:
        raise FlowscopeError(
            "bisect(good, bad): the runs have no sampled step in common; expected two runs that were recorded from "
            "their first step on, by the same schedule."
        )
    if not any(all(map(told_to_the_bit, pair)) for pair in pairs[:1]):
        raise FlowscopeError(
            "bisect(good, bad): no step of both was recorded to the bit; expected runs of this version, recorded from "
            "their first step on with WatchConfig.exact_steps > 0 (10 by default)."
        )
    return list(pairs)


class Search:
    """Goes through steps and places in order, and remembers since when bits differ.

    Attributes:
        since: the step at which bits first differed within rounding; None while all are equal.
        first: that place.
    """

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding
        self.since: int | None = None
        self.first: Look | None = None
        self._options: set[str] | None = None

    def parting(self, steps: Sequence[Sides]) -> tuple[int | None, Phase | None, str, str, float, float]:
        """The fields of a `Parting` up to its limit."""
        if (unlike := set_up(steps[0], self.rounding)) is not None:
            where, message = unlike
            return steps[0].records[0].step, "setup", where, message, 0.0, 0.0
        for sides in steps:
            found = self.of_step(sides)
            if found is not None:
                return found
        return None, None, "", explained_equal(self, len(steps)), 0.0, 0.0

    def of_step(self, sides: Sides) -> Found | None:
        """Where this step parts."""
        step = sides.records[0].step
        if not all(map(told_to_the_bit, sides.records)) and (self.since is not None or excuses(sides)):
            return None  # how far rounding has grown by now is not known
        before = self.since
        other: Found | None = None
        if changed := self._changed(sides):
            words = f"the optimizer's {changed[0]} is another from this step on"
            other = step, "update", changed[0], words, 0.0, 0.0
        for look in looks(sides):
            if look.phase != "update":
                before = self.since  # what an update is given is the same for all parameters
            elif other is not None:
                return other
            if not look.distance:
                continue
            limit = self._limit(step, look, sides, before)
            if look.distance > limit:
                phase = "update" if clipped(look, sides) else look.phase
                look = self._named(look, sides, limit)
                words = explained(look, phase, sides, limit, before)
                return step, phase, look.where, words, look.distance, limit
            if self.since is None:
                self.since, self.first = step, look
        return other

    def _limit(self, step: int, look: Look, sides: Sides, since: int | None) -> float:
        if look.phase == "input" or (since is None and not excuses_of(look.phase, sides)):
            return 0.0
        return self.rounding.limit(step, look, since=since)

    def _named(self, look: Look, sides: Sides, limit: float) -> Look:
        """The same, at what the modules that differ at once have in common."""
        rows = sides.rows("exact_modules") if look.kind == "modules" else None
        shared = shared_module(rows, limit) if rows is not None else ""
        blocks = [block for flow in sides.headers[0].flows for block in flow.blocks]
        if not look.where.startswith(f"{shared}.") or any(block.startswith(f"{shared}.") for block in blocks):
            return look
        return replace(look, where=shared, kind="shared")

    def _changed(self, sides: Sides) -> list[str]:
        """The options that are others than in the good run from this step on."""
        rows = sides.rows("optimizer_options")
        if rows is None:
            return []
        first, second = rows
        now = {name for name in first.keys() & second.keys() if not _near(first[name], second[name])}
        before, self._options = self._options, now
        return [] if before is None else sorted(now - before)


def _near(a: Any, b: Any) -> bool:
    return bool(a == b or abs(a - b) <= 1e-9 * max(abs(a), abs(b)))


def clipped(look: Look, sides: Sides) -> bool:
    """Whether only the gradients that the optimizer used differ: those that backward had left are equal."""
    if look.kind != "parameters" or look.phase != "backward":
        return False
    rows = sides.rows("param_grad_norm_raw")
    if rows is None or look.where not in rows[0] or look.where not in rows[1]:
        return False
    first, second = float(rows[0][look.where]), float(rows[1][look.where])
    return bool(abs(first - second) <= 1e-6 * abs(first))


def explained_equal(search: Search, steps: int) -> str:
    """Why the runs are called equal."""
    if search.first is None:
        return f"equal to the last bit in {steps} steps"
    size = "the measured size of rounding" if search.rounding.measured else "what rounding is assumed to make"
    return (
        f"equal up to rounding in {steps} steps: bits differ first at step {search.since}, {search.first.phase}, "
        f"{search.first.where or 'the model'} (by {search.first.distance:.2g}), and stay within {size}"
    )


# -- set-up -----------------------------------------------------------------------------------------------------------


def set_up(sides: Sides, rounding: Rounding) -> tuple[str, str] | None:
    """(place, sentence) where initial weights, seeds or shapes make the first steps incomparable."""
    a, b = sides.headers
    shapes = parameters_of(a), parameters_of(b)
    for name in shapes[0]:
        if name in shapes[1] and not same_shape(shapes[0][name], shapes[1][name]):
            return name, f"{name} has another shape: {tuple(shapes[0][name])} and {tuple(shapes[1][name])}"
    for first, second in flow_pairs(a, b):
        if len(first.points) != len(second.points):
            return (
                first.name,
                f"{first.name} has {len(first.blocks)} blocks in one run, {len(second.blocks)} in the other",
            )
    if (unlike := _weights(sides, rounding)) is not None:
        return unlike
    return _seeds(sides)


def _weights(sides: Sides, rounding: Rounding) -> tuple[str, str] | None:
    if sides.both("exact_weights") is None:
        names = other_weights(*sides.headers)
    else:
        limit = rounding.epsilon if excuses_of("setup", sides) else 0.0
        names = [x for x, p, q in parameter_rows(sides, "exact_weights") if distance(p, q) > limit]
    if not names:
        return None
    told, part = main_part(names, sides.headers[0])
    most = f", most of what differs lies in {part}" if part else ""
    return told[0], f"the runs begin with other weights: {names[0]} is the first of {len(names)}{most}"


def _seeds(sides: Sides) -> tuple[str, str] | None:
    states = sides.both("random_state")
    if states is None or not (draws(states[0]) or draws(states[1])):
        return None
    seeds = [header.setup.get("seeds", {}).get("torch") for header in sides.headers]
    if not sides.same_world:
        return RANDOM, "the forward draws random numbers, which are others on another number of processes"
    if seeds[0] != seeds[1] and np.isfinite([states[0][0], states[1][0]]).all() and states[0][0] != states[1][0]:
        return RANDOM, f"the forward draws random numbers, and torch's seeds differ ({seeds[0]} and {seeds[1]})"
    return None
