"""What `make depth-study` runs: every connection mode at depths 8 to 1,024, watched, and one page of figures.

A decoder of width 32 on real text, the same for every mode but for its connections. The initial state of every mode and
depth; then training, from shallow to deep, as far as the time budget goes. Results are kept as JSON below --out, so a
study that was stopped goes on where it was; what was not run is said on the page (depth_study.html).

    python examples/depth_study.py                      the study, within 40 minutes on two cores
    python examples/depth_study.py --smoke              the same, small: under two minutes
    python examples/depth_study.py --claim bias         one claim of docs/claims.md, repeated (--claim list: which)
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import depth_claims
from depth_cells import DEPTHS, STEPS, VARIANTS, Cell, cached, last_gain, verdict
from depth_page import write_page

OUT = Path("runs/depth_study")
ORDER = (
    *("post-ln", "post-keel", "pre-ln", "keel-postln", "deepnorm", "pre-keel", "post-highway"),
    *("dhc", "shc", "post-keel+2", "mhc"),
)
"""Within a depth the variants are trained in this order: what most claims need first, the slowest last."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    options = parser().parse_args(arguments)
    if options.claim:
        return depth_claims.run(options.claim, options.out)
    initial, trained = plan(options)
    started = time.perf_counter()
    missing = [] if options.page_only else run(initial + trained, options.out, options.jobs, 60 * options.minutes)
    page = write_page(initial, trained, options.out)
    print(f"\n{time.perf_counter() - started:.0f} s, {len(missing)} cells left out; look at {page}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--smoke", action="store_true", help="two depths, a few steps: under two minutes")
    made.add_argument("--minutes", type=float, default=36.0, help="no cell is begun that would end later")
    made.add_argument("--jobs", type=int, default=2, help="processes; 1: in this one (default: %(default)s)")
    made.add_argument("--out", type=Path, default=OUT, help="where results are kept (default: %(default)s)")
    made.add_argument("--depths", type=int, nargs="+", help="blocks (default: 8 to 1,024)")
    made.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), help="default: all")
    made.add_argument("--steps", type=int, help="training steps at every depth (default: 300 at 8 to 40 at 1,024)")
    made.add_argument("--page-only", action="store_true", help="draw what there is, run nothing")
    made.add_argument("--claim", metavar="NAME", help="repeat one claim of docs/claims.md; 'list' names them")
    return made


def plan(options: argparse.Namespace) -> tuple[list[Cell], list[Cell]]:
    """The cells of the initial state and those of training, in the order in which they are run."""
    depths = options.depths or ((8, 16) if options.smoke else DEPTHS)
    steps = options.steps or (10 if options.smoke else None)
    chosen = [name for name in ORDER if name in (options.variants or VARIANTS)]
    initial = [Cell(name, depth, 1) for depth in depths for name in chosen]
    trained = [Cell(name, depth, steps or STEPS.get(depth, 120)) for depth in depths for name in chosen]
    return initial, trained


# -- running cells in processes


_progress: Any = None


def begin_worker(progress: Any) -> None:
    """In each process: the shared count of work done; one thread, as the other process has the other core."""
    global _progress
    _progress = progress
    os.environ["OMP_NUM_THREADS"] = "1"


def work(cell: Cell, folder: Path) -> tuple[Cell, dict[str, Any], float]:
    """Run one cell in a process of the pool; how long it took by the clock."""
    started = time.perf_counter()

    def tick(steps: int) -> None:
        if _progress is not None:
            with _progress.get_lock():
                _progress.value += cell.work * steps / cell.steps

    return cell, cached(cell, folder, tick), time.perf_counter() - started


def run(cells: Sequence[Cell], folder: Path, jobs: int, seconds: float) -> list[Cell]:
    """Run cells until all are there or the time is over; return those that were left out."""
    done = {path.stem for path in (folder / "cells").glob("*.json")}
    waiting = [cell for cell in cells if cell.name not in done]
    if len(waiting) < len(cells):
        print(f"{len(cells) - len(waiting)} of {len(cells)} cells are there already ({folder / 'cells'})")
    pace = Pace(time.perf_counter() + seconds)
    left_out: list[Cell] = []
    bar = Bar(sum(cell.work for cell in waiting))
    for cell, result, _ in results(waiting, folder, jobs, pace, bar, left_out):
        if cell.steps > 1:
            bar.say(f"{cell.depth:>5} blocks  {cell.variant:<13} {last_gain(result):+.3f} nats  {verdict(result)}")
    bar.close()
    return left_out


def results(
    waiting: list[Cell], folder: Path, jobs: int, pace: Pace, bar: Bar, left_out: list[Cell]
) -> Iterator[tuple[Cell, dict[str, Any], float]]:
    """Results as they come, in this process or from a pool; cells that do not fit the time any more are left out."""
    if jobs == 1:
        for cell in waiting:
            if pace.fits(cell):
                yield pace.note(work(cell, folder))
                bar.advance(cell.work)
            else:
                left_out.append(cell)
        return
    spawn = multiprocessing.get_context("spawn")
    progress = spawn.Value("d", 0.0)
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=begin_worker, initargs=(progress,)) as pool:
        running: set[Future[Any]] = set()
        queue = list(waiting)
        while queue or running:
            while queue and len(running) < jobs:
                cell = queue.pop(0)
                if pace.fits(cell):
                    running.add(pool.submit(work, cell, folder))
                else:
                    left_out.append(cell)
            finished, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            bar.reach(progress.value)
            for future in finished:
                yield pace.note(future.result())


class Pace:
    """Whether a cell still fits, from how long the cells before it took beside what was expected of them."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.expected = self.measured = 1.0

    def fits(self, cell: Cell) -> bool:
        """Whether the cell would end in time at the pace so far."""
        return time.perf_counter() + cell.work * self.measured / self.expected < self.deadline

    def note(self, result: tuple[Cell, dict[str, Any], float]) -> tuple[Cell, dict[str, Any], float]:
        """Learn from a finished cell."""
        self.expected += result[0].work
        self.measured += result[2]
        return result


class Bar:
    """tqdm where it is installed, else a line now and then. The unit is a second of expected work."""

    def __init__(self, total: float) -> None:
        self.total, self.at, self.said = max(total, 1e-9), 0.0, 0.0
        try:
            from tqdm import tqdm
        except ImportError:
            self.tqdm: Any = None
        else:
            self.tqdm = tqdm(
                total=round(total, 1), unit="s", bar_format="{percentage:3.0f}%|{bar:30}| {elapsed}<{remaining}"
            )

    def advance(self, amount: float) -> None:
        """Some more is done."""
        self.reach(self.at + amount)

    def reach(self, at: float) -> None:
        """This much is done."""
        if self.tqdm is not None:
            self.tqdm.update(max(0.0, min(at, self.tqdm.total) - self.tqdm.n))
        elif at - self.said > self.total / 50:
            self.said = at
            print(f"{100 * at / self.total:3.0f} %", flush=True)
        self.at = at

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self.tqdm is not None:
            self.tqdm.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """No more to come."""
        if self.tqdm is not None:
            self.tqdm.close()


if __name__ == "__main__":
    raise SystemExit(main())
