"""Which of several places that differ at once is named: what they have in common, or what most of them lies in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flowscope.parting.distances import distance
from flowscope.parting.matching import parameters_of
from flowscope.records import Array, RunHeader

ANOTHER_DRAW = 0.9
"""Where so many of all numbers differ (biases and norms begin alike), the whole was drawn anew."""


def main_part(names: Sequence[str], header: RunHeader) -> tuple[list[str], str]:
    """The parameters of the part in which most numbers differ, and what it is called.

    Blocks are taken together: the parts are what lies directly in a block (its attention, its feed-forward, its norm),
    whichever block it is, and each module outside of the blocks. Weights of one part that were drawn or scaled
    otherwise are seldom alone (a rule on names fits another projection, too).

    Args:
        names: of the parameters that differ, in module order; at least one.
        header: of the run whose names they are.

    Returns:
        those in the part, in order, and the part ("mlp of the blocks", "head"); all names and "" where there is but
        one part, or where nearly all numbers of the run differ.
    """
    sizes = {name: math.prod(shape) for name, shape in parameters_of(header).items()}
    blocks = [block for flow in header.flows for block in flow.blocks]
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(part_of(name, blocks), []).append(name)
    differ = {part: sum(sizes.get(name, 1) for name in some) for part, some in parts.items()}
    if len(parts) == 1 or sum(differ.values()) > ANOTHER_DRAW * sum(sizes.values()):
        return list(names), ""
    largest = max(parts, key=differ.__getitem__)
    return parts[largest], largest


def part_of(name: str, blocks: Sequence[str]) -> str:
    """What lies directly in a block and holds a parameter; outside of the blocks its module."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return f"{name.removeprefix(f'{block}.').split('.')[0]} of the blocks"
    return name.rpartition(".")[0] or name


def shared_module(rows: tuple[Mapping[str, Array], Mapping[str, Array]], limit: float) -> str:
    """The module of which several direct parts compute something else from equal inputs; "" where there is none.

    Query, key and value that all differ at once have in common the attention they stand in: the fault is there, not in
    the one that was called first.

    Args:
        rows: label -> what went in and fingerprints of what came out, `exact_modules`, of both runs, in the order in
            which the modules returned.
        limit: the size of rounding.
    """
    first, second = rows
    differ: list[str] = []
    for label in (label for label in first if label in second):
        path, (a, b) = label.partition("#")[0], (first[label], second[label])
        # a module returns after its parts, and differs where one of them does
        within = not path or any(known == path or known.startswith(f"{path}.") for known in differ)
        if not within and a[0] == b[0] and distance(a[1:], b[1:]) > limit:
            differ.append(path)
    parents = {path.rpartition(".")[0] for path in differ}
    return parents.pop() if len(differ) > 1 and len(parents) == 1 else ""
