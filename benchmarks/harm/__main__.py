"""`python -m benchmarks.harm [--only FAMILY ...] [--seed N] [--share S] [--write]`: see the package."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.harm.attack import Family, Outcome, Score, found_families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "promises.md"
BEGIN, END = "<!-- tables: written by python -m benchmarks.harm --write -->\n", "<!-- end of tables -->\n"
HEAD = ("| attack | tried | held | first: tried | held |", "|---|---|---|---|---|")
TOLD = 5
"""How many failures of a row are printed."""


def main(arguments: list[str]) -> int:
    """Try the families; the status is 1 where a promise was broken."""
    families = found_families()
    parser = argparse.ArgumentParser("benchmarks.harm")
    parser.add_argument("--only", nargs="+", choices=[family.name for family in families], metavar="FAMILY")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of a full run")
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.name}")
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}, share {given.share:g}", flush=True)
    logging.getLogger("flowscope").addHandler(logging.NullHandler())
    chosen = [family for family in families if not given.only or family.name in given.only]
    scores = {family: _tried(family, given.seed, given.share) for family in chosen}
    if given.write:
        run = f"seed {given.seed}, share {given.share:g}, {time.strftime('%Y-%m-%d')}"
        before = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(before, {family.name: table(family, run, rows) for family, rows in scores.items()}))
    return int(any(held < tried for rows in scores.values() for tried, held in rows.values()))


def _tried(family: Family, seed: int, share: float) -> dict[str, Score]:
    """Row -> score; failures are printed as they come."""
    begin, failures = time.monotonic(), 0
    print(f"{family.name}: {family.promise}", flush=True)
    outcomes: list[Outcome] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on what the attacks do on purpose
        for outcome in family.tried(seed, share):
            outcomes.append(outcome)
            failures += not outcome.held
            if not outcome.held and failures <= TOLD:
                print(f"  BROKEN {outcome.row}: {outcome.case}: {outcome.note}"[:600], flush=True)
    scores = scored(outcomes)
    for row, (tried, held) in scores.items():
        print(f"  {held} of {tried}: {row}", flush=True)
    print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    return scores


def scored(outcomes: Iterable[Outcome]) -> dict[str, Score]:
    """Row -> how many were tried, and how many held."""
    scores: dict[str, Score] = {}
    for outcome in outcomes:
        tried, held = scores.get(outcome.row, (0, 0))
        scores[outcome.row] = tried + 1, held + outcome.held
    return scores


def table(family: Family, run: str, scores: Mapping[str, Score]) -> str:
    """A row per attack: what was tried and held in this run, and at first."""
    lines = [f"### {family.name}", "", f"{family.promise} ({run})", "", *HEAD]
    for row, (tried, held) in scores.items():
        before = family.first.get(row)
        first = f"{before[0]:,} | {before[1]:,}" if before else "- | -"
        lines.append(f"| {row} | {tried:,} | {held:,} | {first} |")
    return "".join(f"{line}\n" for line in lines)


def written(page: str, tables: Mapping[str, str]) -> str:
    """The page with the tables of these families between its marks; those of others stay."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    known = {text.partition("\n")[0]: f"### {text.strip()}\n" for text in old.split("### ")[1:]}
    parts = (text for _, text in sorted({**known, **tables}.items()))
    return f"{before}{BEGIN}\n{chr(10).join(parts)}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
