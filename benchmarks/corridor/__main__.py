"""`python -m benchmarks.corridor [--parts good changes] [--write docs/corridor.md]`.

Trains what is missing, judges, prints the tables.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.corridor import runs as kept_runs
from benchmarks.corridor.programs import CHANGES, DEVELOPED, HELD_OUT
from flowscope.corridor import Corridor, Departure
from flowscope.sinks import Run, read_run

BEGIN, END = "<!-- {}: written by python -m benchmarks.corridor -->", "<!-- end of {} -->"
JUDGED = 5
"""So many seeds of a program are judged by each of its groups."""
SIZES = (5, 19)
GROUPS = {5: 4, 19: 1}
"""Of each size so many a program: those of 19 are all the same but for the seeds they judge."""


@dataclass(frozen=True)
class Pair:
    """One run judged by one group."""

    program: str
    runs: int
    departure: Departure | None

    @property
    def word(self) -> str:
        """What was said of it."""
        return "silent" if self.departure is None else "warning" if self.departure.certain else "note"


@lru_cache(maxsize=64)
def run_of(program: str, seed: int, change: str = "") -> Run:
    return read_run(kept_runs.kept(program, seed, change))


@lru_cache(maxsize=4)
def group_of(program: str, seeds: tuple[int, ...]) -> Corridor:
    return Corridor.of_runs(program, [run_of(program, seed) for seed in seeds])


def judged(program: str, seeds: Sequence[int], seed: int, change: str = "") -> Pair:
    corridor = group_of(program, tuple(seeds))
    return Pair(program, corridor.runs, corridor.judge(run_of(program, seed, change).records))


def healthy(program: str, runs: int, number: int) -> list[Pair]:
    """Seeds judged by a group of others; each `number` has another group and other seeds."""
    known = list(range(kept_runs.SEEDS))
    turned = known[-JUDGED * (number + 1) :] + known[: -JUDGED * (number + 1)]
    seeds, rest = turned[:JUDGED], turned[JUDGED:]
    return [judged(program, rest[:runs], seed) for seed in seeds]


def changed(program: str, runs: int) -> Iterator[tuple[str, list[Pair]]]:
    """Change -> what the group says of each of its seeds."""
    for change in CHANGES[program]:
        seeds = range(100, 100 + kept_runs.CHANGED_SEEDS)
        yield change, [judged(program, range(runs), seed, change) for seed in seeds]


# -- tables -----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates(programs: Sequence[str]) -> str:
    """False alarms of good runs: stated and measured."""
    pairs = [
        pair for one in programs for runs in SIZES for n in range(GROUPS[runs]) for pair in healthy(one, runs, n)
    ]  # program by program, so that each run is read once
    rows = []
    for runs in SIZES:
        said = [pair.word for pair in pairs if pair.runs == runs]
        rows.append(
            [str(runs), "note or warning", f"1/{runs + 1} = {1 / (runs + 1):.3f}", share(said, ("note", "warning"))]
        )
        rows.append([str(runs), "warning", "0.010", share(said, ("warning",))])
    loud = [f"{one.program} by {one.runs} ({place_of([one])})" for one in pairs if one.word == "warning"]
    told = f"Warnings: {'; '.join(loud) or 'none'}."
    return "\n\n".join([table(["good runs", "said", "stated, at most", "measured"], rows), told])


def share(said: Sequence[str], words: Sequence[str]) -> str:
    count = sum(word in words for word in said)
    return f"{count} of {len(said)} = {count / len(said):.3f}"


def powers(programs: Sequence[str]) -> str:
    """What is told of each change."""
    rows = []
    for program in programs:
        told = [dict(changed(program, runs)) for runs in SIZES]
        for change in CHANGES[program]:
            words = [", ".join(count_of(of[change])) for of in told]
            rows.append([program, change, *words, place_of(told[0][change])])
    return table(["program", "change", *(f"by {runs} good runs" for runs in SIZES), "step, place, first metrics"], rows)


def count_of(pairs: Sequence[Pair]) -> Iterator[str]:
    for word in ("warning", "note", "silent"):
        if count := sum(pair.word == word for pair in pairs):
            yield f"{count} {word}"


def place_of(pairs: Sequence[Pair]) -> str:
    """Of the first seed that is told: where, and in what."""
    departure = next((pair.departure for pair in pairs if pair.departure is not None), None)
    if departure is None:
        return ""
    metrics = ", ".join(one.metric for one in departure.beyond[:3])
    return f"{departure.step}, {departure.where or 'the model'}: {metrics}"


def total(programs: Sequence[str]) -> str:
    """How many changes are told in all seeds and at all sizes."""
    parts = []
    for runs in SIZES:
        pairs = [pair for program in programs for _, found in changed(program, runs) for pair in found]
        warned, noted = (sum(pair.word == word for pair in pairs) for word in ("warning", "note"))
        parts.append(f"by {runs} good runs {warned} warnings and {noted} notes of {len(pairs)} changed runs")
    return "; ".join(parts)


def good_runs() -> Iterator[str]:
    yield (
        f"**Good runs**: {JUDGED} seeds of {len(HELD_OUT)} programs that no number was chosen on, each judged by a "
        "group of its program:"
    )
    yield rates(HELD_OUT)


def changed_runs() -> Iterator[str]:
    developed, others = [[name for name in CHANGES if (name in DEVELOPED) == known] for known in (True, False)]
    yield f"**Changes**, held out ({', '.join(others)}): {total(others)}."
    yield powers(others)
    yield f"**Changes**, looked at while the rules were made ({', '.join(developed)}): {total(developed)}."
    yield powers(developed)


PARTS = {"good": good_runs, "changes": changed_runs}
"""The parts of the page, each between marks of its name."""


def write(page: Path, name: str, text: str) -> None:
    """Put one part between its marks on a page."""
    begin, end = (mark.format(name) for mark in (BEGIN, END))
    told = f"{begin}\n\n{text}\n\n{end}"
    known = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: told, known, flags=re.S), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corridor", description=__doc__)
    parser.add_argument("--write", type=Path, help="the page whose tables are rewritten")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="the others stay as they are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.parts:
        text = "\n\n".join(PARTS[name]())
        print(text, end="\n\n", flush=True)
        if options.write:
            write(options.write, name, text)


if __name__ == "__main__":
    main()
