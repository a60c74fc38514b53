"""The good runs as they are drawn behind a run: the one as a line, several as the band of their quantiles.

Axis letters: N good runs, Q lines, K steps, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowscope.backdrop import Behind, packed
from flowscope.corridor.curves import LEAST, MOST, Stack, curves_of, stacked, thinned
from flowscope.corridor.group import BAND
from flowscope.records import Run, RunHeader

MOST_CHARACTERS = 50_000
"""Of the numbers of a backdrop, in the header."""
SIZES = ((128, 64), (64, 64), (48, 32), (32, 32), (32, 16), (16, 16), (8, 8), (4, 4))
"""Steps and rows of each metric, tried until they fit."""


def of_run(name: str, run: Run) -> dict[str, Any]:
    """The entry of the header for one good run."""
    return of_stacks(name, stacked([curves_of(run.records)], (run.header or RunHeader()).metrics))


def of_stacks(name: str, stacks: Sequence[Stack]) -> dict[str, Any]:
    """The same for good runs, thinned until it fits; {} where nothing does. Of three and more the quantiles `BAND`."""
    for steps, rows in SIZES:
        # rows that are no depth axis are not joined: a mean of other parameters is none of theirs
        held = [thinned(s, steps, rows) for s in stacks if s.per_flow or s.recorded <= min(rows, s.values.shape[2])]
        curves = {stack.key: Behind(stack.steps, _lines(stack)) for stack in held}
        found = packed(name, len(stacks[0].values) if stacks else 0, curves, [s.key for s in held if s.in_logs])
        if len(found["data"]) <= MOST_CHARACTERS:
            return found
    return {}


def _lines(stack: Stack) -> Any:
    """[Q, K, R], as the metric is recorded."""
    values = stack.values if len(stack.values) == 1 else np.quantile(stack.values, BAND, axis=0)
    if not stack.in_logs:
        return values
    least, most = values <= np.log(LEAST), values >= np.log(MOST)  # what a logarithm was not taken of
    return np.where(least, 0.0, np.where(most, np.inf, np.exp(values)))
