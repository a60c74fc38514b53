"""The command: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.faults import catalogue, table
from benchmarks.faults.case import Draw
from benchmarks.faults.runner import FOLDER, folder_of, quiet_torch, replay, run_case
from benchmarks.faults.scoring import Run

Job = tuple[str, int, int | None]


def work(job: Job) -> Run | str:
    """One run, in a worker; a run that fails is a sentence."""
    quiet_torch()
    name, seed, variation = job
    case = next(case for case in catalogue.CASES if case.id == name)
    draw = Draw(seed, variation, case=name)
    try:
        return run_case(case, draw)
    except Exception as error:
        if os.environ.get("FAULTS_RAISE"):
            raise
        return f"{name} seed {seed} variation {variation}: {type(error).__name__}: {error}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--cases", nargs="*", default=[], help="ids or beginnings of ids")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variations", type=int, default=catalogue.VARIATIONS, help="per family; 0: none")
    parser.add_argument("--quick", action="store_true", help="one seed, no variations")
    parser.add_argument("--fresh", action="store_true", help="train again what runs/faults has")
    parser.add_argument("--replay", action="store_true", help="ask today's detectors about the records kept")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path, help="the page whose table is rewritten")
    return parser.parse_args()


def main() -> None:
    options = parse()
    seeds, count = (1, 0) if options.quick else (options.seeds, options.variations)
    cases = catalogue.by_prefix(options.cases)
    chosen = catalogue.listed(cases, seeds) + catalogue.variations(cases, count)
    if options.fresh:
        for case, draw in chosen:
            shutil.rmtree(folder_of(case, draw), ignore_errors=True)
    started = time.perf_counter()
    jobs: list[Job] = [(case.id, draw.seed, draw.variation) for case, draw in chosen]
    runs: list[Run] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for answer in pool.map(work, jobs):
            if isinstance(answer, str):
                print(answer, file=sys.stderr)
                continue
            runs.append(answer)
            print(table.line(answer), flush=True)
    if options.replay:
        folders = {(case.id, draw.seed, draw.variation): folder_of(case, draw) for case, draw in chosen}
        runs = [replay(run, folders[run["case"], run["seed"], run["variation"]]) for run in runs]
    print(table.whole(runs, time.perf_counter() - started))
    if options.write:
        table.write(options.write, runs)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "last.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
