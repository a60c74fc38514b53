"""Which mutants count: they can be placed, change the result, and do harm on each of five seeds.

Harm is shown by a sign test against the clean twin of the same seed: one-sided, worse on five of five, p = 1/32. A
mutant that is once no worse cannot pass any more and is not trained further. A mutation after which the weights of the
whole run are bitwise those of the twin is no mutation; one without a finite result is left out, as in its own package.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.rivals.mutants import CLEAN, Mutant, mutants
from benchmarks.rivals.students import FOLDER, Student, quality
from benchmarks.rivals.tuning import finite, tuned

SEEDS = range(5)
VERDICTS = ("harmful", "harmless", "without effect", "without a result", "not placed")


def verdict(student: Student, mutant: Mutant, root: Path = FOLDER) -> str:
    """Return one of `VERDICTS`, training what is not there."""
    for seed in SEEDS:
        clean = tuned(student, CLEAN, seed, watched=False, root=root)
        run = tuned(student, mutant, seed, watched=False, root=root)
        if "error" in run:
            return "not placed" if "found no" in run["error"] or "swappable" in run["error"] else "without a result"
        if not finite(run):
            return "without a result"
        if run["weights"] == clean["weights"]:
            return "without effect"
        if not quality(student, run) < quality(student, clean):
            return "harmless"
    return "harmful"


def verdicts(student: Student, root: Path = FOLDER) -> dict[Mutant, str]:
    """Return the verdict on every mutant."""
    return {mutant: verdict(student, mutant, root) for mutant in mutants(student)}
