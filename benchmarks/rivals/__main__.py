"""`python -m benchmarks.rivals [--minutes N] [--train] [--students NAME ...] [--shelves NAME ...] [--write PAGE]`.

See the package; a part that is not asked for stays on the page as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.rivals import harm, programs, table
from benchmarks.rivals.columns import CLEAN_SEEDS, COLUMNS, GOOD
from benchmarks.rivals.mutants import CLEAN, mutants
from benchmarks.rivals.reports import REPORTS
from benchmarks.rivals.score import harmful, score, truths
from benchmarks.rivals.students import STUDENTS
from benchmarks.rivals.traincheck import TRAINCHECK
from benchmarks.rivals.tuning import tuned

UNFINISHED = 3
SHELVES = {"traincheck": TRAINCHECK, "reports": REPORTS}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of --train: stop then, with status 3")
    parser.add_argument(
        "--train", action="store_true", help="make the runs, and judge nothing; else each is made as it is asked for"
    )
    parser.add_argument("--columns", nargs="*", help="parts of the names of the columns to ask; default: all")
    parser.add_argument("--students", nargs="*", default=list(STUDENTS))
    parser.add_argument("--shelves", nargs="*", default=list(SHELVES), help="programs of published reports")
    parser.add_argument("--write", type=Path, help="the page whose tables are rewritten")
    return parser.parse_args()


def jobs(names: list[str]) -> Iterator[Callable[[], object]]:
    """Yield all runs to make, each resumable."""
    for student in (STUDENTS[name] for name in names):
        for mutant in mutants(student):
            yield lambda student=student, mutant=mutant: harm.verdict(student, mutant)
        for mutant in harmful(student):
            yield lambda student=student, mutant=mutant: tuned(student, mutant, 0, watched=True)
        for seed in (*GOOD, *CLEAN_SEEDS):
            yield lambda student=student, seed=seed: tuned(student, CLEAN, seed, watched=True)


def train(names: list[str], minutes: float) -> bool:
    """Make the runs that are not there; False: there was no time for all."""
    end = time.monotonic() + 60 * minutes
    for job in jobs(names):
        if time.monotonic() > end:
            return False
        job()
    return True


def judged(names: list[str], shelves: list[str], columns: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the tables of each part."""
    for student in (STUDENTS[name] for name in names):
        counting = harmful(student)
        truth = truths(student, counting)
        scores = {column: score(student, column, counting, truth) for column in columns}
        counts = table.counted(student, harm.verdicts(student))
        yield student.name, [counts, table.of_student(student, scores), table.singly(scores)]
    for name in shelves:
        told = [one for one in SHELVES[name].told.values() if not one.reason]
        answers = {one.name: (programs.asked(one, True), programs.asked(one, False)) for one in told}
        yield name, [table.of_shelf(SHELVES[name], answers)]


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.train:
        return 0 if train(options.students, options.minutes) else UNFINISHED
    parts = options.columns or [""]
    columns = [name for name in COLUMNS if any(part in name for part in parts)]
    for name, tables in judged(options.students, options.shelves, columns):
        print(*tables, sep="\n\n", end="\n\n", flush=True)
        if options.write:
            table.write(options.write, name, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
