"""`python -m benchmarks.parting [--equal] [NAME ...]`: see the package."""

from __future__ import annotations

import fnmatch
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import flowscope
from benchmarks.parting.pairs import EQUAL, FAULTS, Pair
from benchmarks.parting.programs import train
from flowscope.parting.bisection import Parting

NUDGED: dict[object, Path] = {}


def judged(pair: Pair, folder: Path) -> Parting:
    """Record both runs, and the rounding of the good one where sums may come in another order."""
    good, bad = folder / "good", folder / "bad"
    train(good, pair.good, pair.kind)
    if pair.rounding:
        train(good / "rounding", replace(pair.good, fault=""), pair.kind, config={"nudge": True})
    train(bad, pair.bad, pair.kind)
    return flowscope.bisect(good, bad)


def at_place(pair: Pair, where: str) -> bool:
    """Whether the place is one of those that are right."""
    return any(fnmatch.fnmatchcase(where, place) for place in pair.places or ("",))


def main(arguments: list[str]) -> int:
    """Judge the pairs named, or all; the status says whether the marks are met."""
    equal = "--equal" in arguments
    names = [one for one in arguments if not one.startswith("--")]
    pairs = [pair for pair in (EQUAL if equal else FAULTS) if not names or pair.name in names]
    right = placed = 0
    for pair in pairs:
        with tempfile.TemporaryDirectory() as folder:
            found = judged(pair, Path(folder))
        step = (found.step, found.phase) == (pair.step, pair.phase)
        place = step and (pair.phase is None or at_place(pair, found.where))
        right, placed = right + step, placed + place
        mark = "right" if place else "place" if step else "WRONG"
        print(f"{mark:6s} {pair.name}: {found.step} {found.phase} {found.where!r} {found.message}", flush=True)
    print(f"{len(pairs)} pairs: step and phase {right}, place {placed}")
    return 0 if right >= 0.95 * len(pairs) and placed >= 0.9 * len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
