"""Which places of two runs belong together: flows by name or order, points by relative depth, parameters by name.

Axis letters: P points of one run's flow, Q of the other's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from flowscope.model.plan import display_path
from flowscope.records import FlowLayout, RunHeader


def flow_pairs(a: RunHeader, b: RunHeader) -> list[tuple[FlowLayout, FlowLayout]]:
    """The flows that two runs have in common: those of one name; of the rest those of one kind, in order."""
    named = {flow.name: flow for flow in b.flows}
    pairs = {flow.name: named.pop(flow.name) for flow in a.flows if flow.name in named}
    left = list(named.values())
    for flow in a.flows:
        alike = next((other for other in left if other.kind == flow.kind), None)
        if flow.name not in pairs and alike is not None:
            left.remove(alike)
            pairs[flow.name] = alike
    return [(flow, pairs[flow.name]) for flow in a.flows if flow.name in pairs]


def depth_pairs(a: int, b: int) -> list[tuple[int, int]]:
    """Indices of points at the same relative depth, those of the flow with fewer points each once, in depth order.

    Args:
        a: P.
        b: Q. Both ends belong together, between them the nearest.
    """
    if not a or not b:
        return []
    few, many = min(a, b), max(a, b)
    scale = (many - 1) / (few - 1) if few > 1 else 0.0
    pairs = [(i, int(i * scale + 0.5)) for i in range(few)]
    return pairs if a <= b else [(j, i) for i, j in pairs]


def parameter_pairs(a: Mapping[str, Sequence[int]], b: Mapping[str, Sequence[int]]) -> list[tuple[str, str]]:
    """The parameters of two runs that belong together, in the order of the first.

    Those of one name and shape; of the rest, where modules were renamed, those whose shapes follow one another alike.

    Args:
        a: name -> shape of the first run's, in module order.
        b: likewise of the second.
    """
    plain = {display_path(name): name for name in b}
    pairs = {
        name: plain[own] for name in a if (own := display_path(name)) in plain and same_shape(a[name], b[plain[own]])
    }
    rest = [name for name in a if name not in pairs]
    others = [name for name in b if name not in set(pairs.values())]
    first, second = [tuple(a[name]) for name in rest], [tuple(b[name]) for name in others]
    for i, j, size in difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        pairs.update(zip(rest[i : i + size], others[j : j + size], strict=True))
    return [(name, pairs[name]) for name in a if name in pairs]


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes are one."""
    return tuple(a) == tuple(b)


def parameters_of(header: RunHeader) -> Mapping[str, Any]:
    """Name -> shape of a run's parameters; {} where its header does not say."""
    told: Mapping[str, Any] = header.setup.get("parameters", {})
    return told
