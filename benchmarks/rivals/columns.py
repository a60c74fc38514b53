"""The columns of the table: each a way of asking about one kept run of a student, with all it needs.

    column(name, student)(mutant, seed) -> Answer

A column is asked about every harmful mutant and about clean runs of other seeds than those it learned from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.rivals import answers, diagnoser, harm, published
from benchmarks.rivals.answers import Answer
from benchmarks.rivals.mutants import CLEAN, Mutant
from benchmarks.rivals.students import FOLDER, RATE, STEPS, STUDENTS, Student, batches, beginner
from benchmarks.rivals.tuning import folder_of, probes, tuned

Column = Callable[[Mutant, int], Answer]
GOOD = range(100, 112)
"""The seeds of the clean runs that a corridor is made of."""
CLEAN_SEEDS = range(112, 118)
"""Clean runs that no column learned from: what is found in them is false."""
FIRST_STEPS = 4
"""Paired records need no more: a mutant is one from the first step."""


def watched(student: Student, mutant: Mutant, seed: int) -> Path:
    """Return the folder of a run with its records and probes; made where it is not there."""
    tuned(student, mutant, seed, watched=True)
    return folder_of(student, mutant, seed)


def limits(student: Student) -> Column:
    """`flowscope.watch` at its defaults."""
    return lambda mutant, seed: answers.limits(watched(student, mutant, seed))


def check(student: Student) -> Column:
    """`flowscope.check` before the first step; kept, as it takes seconds."""

    def asked(mutant: Mutant, seed: int) -> Answer:
        model = beginner(student, seed)
        with nullcontext() if mutant == CLEAN else mutant.injector(model):
            optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), RATE)
            return answers.checked(model, lambda m, b: m(**b).loss, batches(student.tuning, seed), optimizer)

    return kept(student, "check", asked)


def corridor(student: Student, runs: int, notes: bool = False) -> Column:
    """A group of clean runs of other seeds."""
    group = answers.group_of([watched(student, CLEAN, seed) for seed in GOOD[:runs]])
    return lambda mutant, seed: answers.corridor(group, watched(student, mutant, seed), notes=notes)


def paired(student: Student) -> Column:
    """The clean twin of the same seed; a clean run is compared with itself, made again."""

    def asked(mutant: Mutant, seed: int) -> Answer:
        for one, suffix in ((CLEAN, "-twin"), (mutant, "-paired")):
            tuned(student, one, seed, watched=True, steps=FIRST_STEPS, suffix=suffix)
        good, bad = (
            folder_of(student, CLEAN, seed, suffix="-twin"),
            folder_of(student, mutant, seed, suffix="-paired"),
        )
        return answers.paired(good, bad)

    return asked


def ruled(student: Student, name: str) -> Column:
    """A published rule set."""
    return lambda mutant, seed: published.ruled(name, probes(watched(student, mutant, seed)), STEPS)


def deepfd(student: Student) -> Column:
    """DeepFD, taught by the other student's runs."""
    runs, faulty = [], []
    for other in STUDENTS.values():
        if other != student:
            harmful = [one for one, verdict in harm.verdicts(other).items() if verdict == "harmful"]
            clean = [watched(other, CLEAN, seed) for seed in GOOD]
            folders = [*(watched(other, one, 0) for one in harmful), *clean]
            runs += [probes(folder) for folder in folders]
            faulty += [True] * len(harmful) + [False] * len(clean)
    judge = published.DeepFD(runs, faulty)
    return lambda mutant, seed: judge(probes(watched(student, mutant, seed)))


def own(student: Student) -> Column:
    """The diagnoser that comes with the operators."""
    return lambda mutant, seed: diagnoser.diagnosed(student, diagnoser.features(student, mutant, seed))


def kept(student: Student, name: str, asked: Column) -> Column:
    """The same column, each answer made once."""

    def answer(mutant: Mutant, seed: int) -> Answer:
        path = Path(folder_of(student, mutant, seed, FOLDER)) / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(asked(mutant, seed))))
        return Answer(**json.loads(path.read_text()))

    return answer


COLUMNS: dict[str, Callable[[Student], Column]] = {
    "flowscope, limits": limits,
    "flowscope, `check`": check,
    "flowscope, corridor of 5, notes": lambda student: corridor(student, 5, notes=True),
    "flowscope, corridor of 5": lambda student: corridor(student, 5),
    "flowscope, corridor of 12": lambda student: corridor(student, 12),
    "flowscope, paired": paired,
    "AUTOTRAINER": lambda student: ruled(student, "AUTOTRAINER"),
    "DeepDiagnosis": lambda student: ruled(student, "DeepDiagnosis"),
    "DeepFD, taught by the other program": deepfd,
    "the operators' own diagnoser": own,
}
