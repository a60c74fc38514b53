"""One run of a program: in a process of its own, with every alert and the final figure kept in a row."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .program import Program, Watch, no_watch


def programs() -> dict[str, Program]:
    """All programs of the modules beside this one that have a list `PROGRAMS`, by id."""
    found: dict[str, Program] = {}
    here = str(Path(__file__).parent)
    for module in pkgutil.iter_modules([here]):
        if module.name == "__main__":
            continue
        for program in getattr(importlib.import_module(f"{__package__}.{module.name}"), "PROGRAMS", []):
            if program.id in found:
                raise ValueError(f"two programs are called {program.id}")
            found[program.id] = program
    return found


@dataclass
class Row:
    """What one run gave; `seconds` of CPU time. `figure` is None where the run did not end: `error` says why."""

    program: str
    faulty: bool
    seed: int
    figure: float | None = None
    steps: int = 0
    seconds: float = 0.0
    alerts: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def watching(folder: Path, row: Row, scopes: list[Any]) -> Watch:
    """`flowscope.watch` as the program would call it, which also writes records to `folder` and alerts to `row`."""
    import flowscope

    def keep(alert: Any) -> None:
        if alert.state == "raised" and alert.severity in ("warning", "error"):
            row.alerts.append({name: getattr(alert, name) for name in ("kind", "severity", "where", "step", "message")})

    def watch(*args: Any, **kwargs: Any) -> Any:
        own = kwargs.pop("on_alert", None) or []
        sink = flowscope.sinks.JsonlSink(folder / f"watch{len(scopes)}")
        kwargs["sinks"] = [*kwargs.get("sinks", ()), sink]
        scopes.append(flowscope.watch(*args, on_alert=[keep, *(own if isinstance(own, list) else [own])], **kwargs))
        return scopes[-1]

    return watch


def run(program: Program, row: Row, folder: Path, bare: bool) -> None:
    """Train once, filling `row`; what the run prints goes to a file in `folder`."""
    import torch

    torch.set_num_threads(1)
    scopes: list[Any] = []
    began = time.process_time()
    with (folder / "output.txt").open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            watch = no_watch if bare else watching(folder, row, scopes)
            row.figure = float(program.train(row.seed, row.faulty, watch))
        except Exception:
            row.error = traceback.format_exc()
        for scope in scopes:
            scope.close()
    row.seconds = time.process_time() - began
    row.steps = max((scope.records[-1].step + 1 for scope in scopes if scope.records), default=0)


def in_process(program: Program, row: Row, folder: Path, bare: bool) -> None:
    """The body of a worker: run, then leave the row as JSON in `folder`."""
    run(program, row, folder, bare)
    text = json.dumps({**asdict(row), "figure": None if row.figure is None else repr(row.figure)})
    (folder / "row.json").write_text(text, encoding="utf-8")


def read_row(folder: Path, row: Row) -> Row:
    """The row that a worker left, or `row` with the news that it left none."""
    try:
        data = json.loads((folder / "row.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        row.error = row.error or "the process ended without a result"
        return row
    data["figure"] = None if data["figure"] is None else float(data["figure"])
    return Row(**data)


def import_from(package: str | None) -> None:
    """Make `flowscope` the one in the folder `package`, whatever else is installed."""
    if package:
        sys.path.insert(0, str(Path(package).resolve()))
    import flowscope
    import flowscope.sinks

    if package and Path(package).resolve() not in Path(flowscope.__file__).resolve().parents:
        raise SystemExit(f"flowscope was imported from {flowscope.__file__}, not from {package}")


def warm() -> None:
    """Import, before the workers fork, what the first step of any optimizer and the first look at data import."""
    import torch

    from .toys import digits

    torch.set_num_threads(1)
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.ones(2)
    for kind in (torch.optim.SGD, torch.optim.Adam):
        kind([weight], lr=0.1).step()
    digits()


def run_all(
    wanted: Iterable[tuple[Program, bool, int]], folder: Path, *, workers: int, bare: bool, limit_s: float
) -> Iterator[Row]:
    """Rows as the runs end, `workers` at a time, each in a forked process that is ended after `limit_s` seconds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warm()
    context = multiprocessing.get_context("fork")
    waiting = list(wanted)[::-1]
    active: list[tuple[BaseProcess, Row, Path, float]] = []
    while waiting or active:
        while waiting and len(active) < workers:
            program, faulty, seed = waiting.pop()
            row = Row(program.id, faulty, seed)
            place = folder / f"{program.id}-{'faulty' if faulty else 'healthy'}-{seed}"
            place.mkdir(parents=True, exist_ok=True)
            for old in place.rglob("*.json*"):
                old.unlink()
            process = context.Process(target=in_process, args=(program, row, place, bare))
            process.start()
            active.append((process, row, place, time.perf_counter()))
        active[0][0].join(timeout=0.05)
        for entry in list(active):
            process, row, place, began = entry
            if process.is_alive() and time.perf_counter() - began > limit_s:
                row.error = f"ended after {limit_s:g} s"
                process.kill()
                process.join()
            if not process.is_alive():
                active.remove(entry)
                yield read_row(place, row)


def figure_text(figure: float | None) -> str:
    """A figure for people."""
    return "none" if figure is None else "nan" if math.isnan(figure) else f"{figure:.4g}"
