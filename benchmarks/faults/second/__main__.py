"""`python -m benchmarks.faults.second`: run the programs, print the table, keep one line of JSON a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from .program import Program
from .running import import_from, programs, run_all
from .score import judge, table


def chosen(known: dict[str, Program], names: list[str] | None) -> list[Program]:
    """The programs whose id is, or begins with, one of `names`; all of them without names."""
    picked = [p for p in known.values() if not names or any(p.id.startswith(name) for name in names)]
    if not picked:
        raise SystemExit(f"no program begins with {', '.join(names or [])}; there are {', '.join(known)}")
    return picked


def forms(picked: list[Program], seeds: list[int], only: str | None) -> Iterator[tuple[Program, bool, int]]:
    """Seed by seed, so that an interrupted run has seen every program."""
    for seed in seeds:
        for program in picked:
            for faulty in (False, True) if program.fault else (False,):
                if only is None or (only == "faulty") == faulty:
                    yield program, faulty, seed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.second", description=__doc__)
    parser.add_argument("--programs", nargs="+", metavar="ID", help="ids, or beginnings of ids (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--form", choices=("healthy", "faulty"), help="only this form")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bare", action="store_true", help="no monitor: proves the labels")
    parser.add_argument("--package", metavar="PATH", help="take flowscope from this folder")
    parser.add_argument("--out", type=Path, default=Path("runs/second"))
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a run is ended")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.bare:
        import_from(options.package)
    known = programs()
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    wanted = list(forms(chosen(known, options.programs), seeds, options.form))
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (options.out / ("bare.jsonl" if options.bare else "rows.jsonl")).open("w", encoding="utf-8") as file:
        for row in run_all(wanted, options.out, workers=options.workers, bare=options.bare, limit_s=options.limit):
            rows.append(row)
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            (judged,) = judge(known, [row])
            print(f"{judged.line()}  [{row.seconds:.1f} s{'' if judged.held else ', LABEL DOES NOT HOLD'}]", flush=True)
    print("\n".join(["", *table(judge(known, rows))]))


if __name__ == "__main__":
    main()
