"""All numbers of a step side by side, so that a record is judged in a few operations.

Axis letters: N good runs, F numbers of a step (all rows of all metrics), W windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flowscope.backdrop import LOSS
from flowscope.corridor.curves import Stack, joined_rows, logs_of
from flowscope.corridor.spread import LOWEST
from flowscope.corridor.tournament import WINDOWS, Judge
from flowscope.records import Array, Record


@dataclass(frozen=True)
class Line:
    """What the numbers of one step are compared with.

    Attributes:
        number: of this step among those of each number's metric [F]; -1 where the metric has no such step.
        centre, unit: as in `Judge`, [W, N, F] in fp32; NaN where nothing is compared.
    """

    number: Array
    centre: NDArray[np.float32]
    unit: NDArray[np.float32]


class Table:
    """The judges of all metrics.

    Attributes:
        stacks: the metrics.
        rows: which of the F numbers are theirs.
        size: F.
        lowest: how far a number lies below its centre at the most, [F].
        lines: step -> what its numbers are compared with.
    """

    def __init__(self, judges: Mapping[str, Sequence[Judge]]) -> None:
        self.stacks = [first.stack for first, *_ in judges.values()]
        ends = np.cumsum([0, *(stack.values.shape[2] for stack in self.stacks)])
        self.rows = [slice(int(start), int(end)) for start, end in pairwise(ends)]
        self.size = int(ends[-1])
        self.lowest = np.concatenate(
            [np.full(s.values.shape[2], LOWEST if s.in_logs else -np.inf) for s in self.stacks]
        )
        steps = sorted({step for stack in self.stacks for step in stack.steps})
        self.lines = {step: self._line(step, list(judges.values())) for step in steps}

    def _line(self, step: int, judges: Sequence[Sequence[Judge]]) -> Line:
        runs = self.stacks[0].values.shape[0]
        centre, unit = (np.full((len(WINDOWS), runs, self.size), np.nan, np.float32) for _ in range(2))
        number = np.full(self.size, -1.0)
        for of_one, rows in zip(judges, self.rows, strict=True):
            steps = of_one[0].stack.steps
            if step not in steps:
                continue
            number[rows] = steps.index(step)
            for judge in of_one:
                ended = steps.index(step) - judge.window + 1
                if ended >= 0:
                    at = WINDOWS.index(judge.window)
                    centre[at][:, rows], unit[at][:, rows] = judge.centre[:, ended], judge.unit[:, ended]
        return Line(number, centre, unit)

    def values_of(self, record: Record) -> Array:
        """The numbers [F] of a record as they are compared, NaN where it has none."""
        values = np.full(self.size, np.nan)
        for stack, rows in zip(self.stacks, self.rows, strict=True):
            if stack.key == LOSS:
                values[rows] = np.nan if record.loss is None else record.loss
            elif (told := record.metrics.get(stack.key)) is not None:
                values[rows] = fitted(told, stack)
        return values


def fitted(values: Array, stack: Stack) -> Array | float:
    """Values [R'] at the rows of the stack: by relative depth where there is one, NaN where there is none."""
    rows, told = stack.values.shape[2], logs_of(values) if stack.in_logs else values
    if values.shape == (stack.recorded,):
        return joined_rows(told, rows)
    if not stack.per_flow or values.ndim != 1 or values.size < 2:
        return float("nan")
    laid: Array = np.interp(np.linspace(0, 1, rows), np.linspace(0, 1, values.size), told)
    return laid
