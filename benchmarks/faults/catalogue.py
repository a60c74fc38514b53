"""All cases in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.faults import (
    collapse,
    controls,
    flows,
    gradients,
    numbers,
    ranks,
    transformers,
    units,
    updates,
    wiring,
)
from benchmarks.faults.case import Case, Draw

CASES: tuple[Case, ...] = (
    *gradients.case.cases,
    *numbers.case.cases,
    *units.case.cases,
    *collapse.case.cases,
    *updates.case.cases,
    *wiring.case.cases,
    *transformers.case.cases,
    *flows.case.cases,
    *ranks.case.cases,
    *gradients.healthy.cases,
    *numbers.healthy.cases,
    *collapse.healthy.cases,
    *updates.healthy.cases,
    *controls.case.cases,
    *transformers.healthy.cases,
    *flows.healthy.cases,
    *ranks.healthy.cases,
)

VARIATIONS = 20
"""Per family, spread over its cases."""


def by_prefix(prefixes: Sequence[str]) -> list[Case]:
    """The cases whose id starts with one of the prefixes; all without any."""
    return [case for case in CASES if not prefixes or case.id.startswith(tuple(prefixes))]


def listed(cases: Sequence[Case], seeds: int) -> list[tuple[Case, Draw]]:
    """Each case with each seed."""
    return [(case, Draw(seed)) for seed in range(seeds) for case in cases]


def variations(cases: Sequence[Case], count: int) -> list[tuple[Case, Draw]]:
    """`count` runs a family, its cases in turn, each with a number of its own that draws its sizes."""
    families: dict[str, list[Case]] = {}
    for case in cases:
        if case.varied and case.ranks == 1:
            families.setdefault(case.family, []).append(case)
    return [
        (case, Draw(100 + number, number, case=case.id))
        for family in families.values()
        for number in range(1, count + 1)
        for case in [family[(number - 1) % len(family)]]
    ]
