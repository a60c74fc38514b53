"""`python -m benchmarks.parting [--minutes N] [--write docs/reference.md] [NAME ...]`: see the package.

What was judged is kept with its commit in `runs/parting`: a call goes on where the last one of this commit ended.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import flowscope
from benchmarks.parting.pairs import EQUAL, FAULTS, Pair
from benchmarks.parting.programs import train
from flowscope.parting.bisection import Parting

KEPT = Path("runs/parting")
BEGIN, END = "<!-- tables: written by python -m benchmarks.parting -->", "<!-- end of tables -->"


@dataclass(frozen=True)
class Answer:
    """What bisect said of a pair, and whether step and phase, and the place too, are right."""

    step: int | None
    phase: str | None
    where: str
    message: str
    right: bool
    placed: bool


def judged(pair: Pair, folder: Path) -> Parting:
    """Record both runs, and the rounding of the good one where sums may come in another order."""
    good, bad = folder / "good", folder / "bad"
    train(good, pair.good, pair.kind)
    if pair.rounding:
        train(good / "rounding", replace(pair.good, fault=""), pair.kind, config={"nudge": True})
    train(bad, pair.bad, pair.kind)
    return flowscope.bisect(good, bad)


def answered(pair: Pair) -> Answer:
    """Record the pair anew and ask."""
    with tempfile.TemporaryDirectory() as folder:
        found = judged(pair, Path(folder))
    right = (found.step, found.phase) == (pair.step, pair.phase)
    placed = right and (pair.phase is None or at_place(pair, found.where))
    return Answer(found.step, found.phase, found.where, found.message, right, placed)


def at_place(pair: Pair, where: str) -> bool:
    """Whether the place is one of those that are right."""
    return any(fnmatch.fnmatchcase(where, place) for place in pair.places or ("",))


# -- tables -----------------------------------------------------------------------------------------------------------


def totals(answers: Mapping[str, Answer]) -> str:
    """The shares of both kinds of pairs."""
    faulty, same = ([answers[pair.name] for pair in pairs if pair.name in answers] for pairs in (FAULTS, EQUAL))
    lines = [
        "| pairs | judged | step and phase right | place right too |",
        "|---|---|---|---|",
        f"| faulty | {len(faulty)} of {len(FAULTS)} | {sum(one.right for one in faulty)} | "
        f"{sum(one.placed for one in faulty)} |",
        f"| equal | {len(same)} of {len(EQUAL)} | {sum(one.right for one in same)} | |",
    ]
    return "\n".join(lines)


def singly(answers: Mapping[str, Answer]) -> str:
    """Each faulty pair, and each equal one that was called parted."""
    lines = ["| pair | told | |", "|---|---|---|"]
    for pair in (*FAULTS, *EQUAL):
        if (one := answers.get(pair.name)) is not None and not (pair.phase is None and one.right):
            mark = "" if one.placed else "place" if one.right else "wrong"
            told = ", ".join(str(x) for x in (one.step, one.phase, one.where) if x not in (None, "")) or "equal"
            lines.append(f"| {pair.name} | {told} | {mark} |")
    return "\n".join(lines)


def kinds() -> str:
    """The equal pairs by their names without the seeds."""
    names = list(dict.fromkeys(pair.name.partition(", seed")[0] for pair in EQUAL))
    count = {name: sum(pair.name.partition(", seed")[0] == name for pair in EQUAL) for name in names}
    return "Equal pairs: " + ", ".join(f"{name} ({count[name]})" for name in names) + "."


def report(answers: Mapping[str, Answer], version: str) -> str:
    """All of it, with the commit it was measured on."""
    return "\n\n".join([f"Measured on {version}.", totals(answers), kinds(), singly(answers)])


# -- command ----------------------------------------------------------------------------------------------------------


def commit() -> str:
    """The checkout's, with "+" where something is not committed."""
    told = [
        subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "flowscope", "benchmarks/parting"))
    ]
    return f"commit {told[0]}{'+' * bool(told[1])}" if told[0] else f"version {flowscope.__version__}"


def kept(file: Path) -> dict[str, Answer]:
    """What was judged before."""
    told = json.loads(file.read_text()) if file.exists() else {}
    return {name: Answer(**answer) for name, answer in told.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge what was not judged yet; 0: the marks are met, 1: they are not, 3: there is more to do."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parting", description=__doc__)
    parser.add_argument("names", nargs="*", help="pairs, in the place of all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further pair after so long")
    parser.add_argument("--write", type=Path, help="the page whose tables are rewritten")
    options = parser.parse_args(arguments)
    version, end = commit(), time.monotonic() + 60 * options.minutes
    file = KEPT / f"{version.replace(' ', '_')}.json"
    answers = {} if options.names else kept(file)
    for pair in (*FAULTS, *EQUAL):
        if pair.name in answers or (options.names and pair.name not in options.names):
            continue
        if time.monotonic() > end:
            return 3
        answers[pair.name] = one = answered(pair)
        mark = "right" if one.placed else "place" if one.right else "WRONG"
        print(f"{mark:6s} {pair.name}: {one.step} {one.phase} {one.where!r} {one.message}", flush=True)
        if not options.names:
            KEPT.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({name: asdict(answer) for name, answer in answers.items()}, indent=1))
    text = report(answers, version)
    print(text)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        told = f"{BEGIN}\n\n{text}\n\n{END}"
        options.write.write_text(
            re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: told, page, flags=re.S), encoding="utf-8"
        )
    faulty, same = ([answers[pair.name] for pair in pairs if pair.name in answers] for pairs in (FAULTS, EQUAL))
    met = (
        all(one.right for one in same)
        and sum(one.right for one in faulty) >= 0.95 * len(faulty)
        and sum(one.placed for one in faulty) >= 0.9 * len(faulty)
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
