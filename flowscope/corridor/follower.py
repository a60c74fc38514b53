"""A run beside its group, record by record.

Axis letters: N good runs, F numbers of a step (all rows of all metrics), W windows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowscope.corridor.curves import Stack
from flowscope.corridor.departure import RATE, Beyond, Departure, behind_all, depth_of
from flowscope.corridor.table import Table
from flowscope.corridor.tournament import WINDOWS, Bounds
from flowscope.records import Array, Record, RunHeader


class Follower:
    """A run beside its group.

    Args:
        table: what each number is compared with.
        bounds: what the comparison is compared with.
        header: of the good runs.
        state: empty at first; all that is remembered, as plain numbers, words and arrays.
    """

    def __init__(self, table: Table, bounds: Bounds, header: RunHeader, state: dict[str, Any] | None = None) -> None:
        self.table, self.bounds, self.header = table, bounds, header
        self.state = {} if state is None else state
        self.state.setdefault("beyond", {})

    def look(self, record: Record) -> None:
        """Judge one more record."""
        line = self.table.lines.get(record.step)
        if line is None:
            return
        recent = self._recent(self.table.values_of(record), line.number)
        for window, centre, unit in zip(WINDOWS, line.centre, line.unit, strict=True):
            with np.errstate(invalid="ignore"):
                found = np.abs(np.maximum(recent[-window:].mean(axis=0) - centre, self.table.lowest)) * unit
                times = self.bounds.beyond(found)
            if bool((times > 1).any()):  # what is NaN was not seen, and is beyond nothing
                for stack, rows in zip(self.table.stacks, self.table.rows, strict=True):
                    self._beyond(record, stack, found[:, rows], times[rows])

    def _recent(self, values: Array, number: Array) -> Array:
        """The last numbers of each row [W, F], this step's at the end; NaN before a step that was left out."""
        if self.state.get("recent") is None or self.state["recent"].shape[1] != values.size:
            self.state["recent"] = np.full((max(WINDOWS), values.size), np.nan)
            self.state["number"] = np.full(values.size, -2.0)
        recent, last, due = self.state["recent"], self.state["number"], number >= 0
        recent[:-1, due] = np.where(number[due] == last[due] + 1, recent[1:, due], np.nan)
        recent[-1] = values
        last[due] = number[due]
        kept: Array = recent
        return kept

    def _beyond(self, record: Record, stack: Stack, found: Array, times: Array) -> None:
        """Note a metric of which a row lies beyond all the good runs' limits, once, and once more when it is sure."""
        rows, known = np.flatnonzero(times > 1), self.state["beyond"].get(stack.key)
        if not rows.size or (known is not None and known["chance"] <= RATE):
            return
        farthest = int(rows[np.argmax(times[rows])])
        chance = self.bounds.chance_of(found[:, farthest])
        if known is not None and chance > RATE:
            return
        row = farthest if not stack.per_flow else int(rows[-1 if stack.phase == "backward" else 0])
        where, phase = stack.labels[row] if row < len(stack.labels) else "", stack.phase
        if phase == "output":
            where = behind_all(record, self.header)
        if phase == "state" and record.step > min(stack.steps):
            phase = "backward"  # by now weights are what updates made of them
        self.state["beyond"][stack.key] = {
            "step": record.step if known is None else known["step"],
            "where": where,
            "depth": depth_of(where, self.header.flows),
            "times": float(times[farthest]),
            "chance": chance,
            "phase": phase,
        }

    @property
    def departure(self) -> Departure | None:
        """What has been found so far."""
        found = [Beyond(key, **told) for key, told in self.state["beyond"].items()]
        return Departure(tuple(sorted(found, key=lambda one: one.order)), len(self.bounds.of_good)) if found else None
