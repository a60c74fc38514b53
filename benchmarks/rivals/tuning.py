"""One tuning run, kept: its records, what the other rules look at, and the measure that decides harm.

    runs/rivals/STUDENT/MUTANT/seedN/  run.json  probes.json  flowscope.jsonl

`run.json` is written last and says that the run is complete; a run that is there is not trained again.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flowscope
from benchmarks.faults.case import Program
from benchmarks.faults.numbers_seen import Probe, Spectator, pack, unpack
from benchmarks.rivals.mutants import CLEAN, Mutant
from benchmarks.rivals.students import FOLDER, RATE, STEPS, Student, batches, beginner, measures
from flowscope.sinks import JsonlSink

Run = dict[str, Any]


def folder_of(student: Student, mutant: Mutant, seed: int, root: Path = FOLDER, suffix: str = "") -> Path:
    """Return where a run is kept."""
    return root / student.name / mutant.name / f"seed{seed}{suffix}"


def fingerprint(model: nn.Module) -> str:
    """Return a hash of all weights, to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def tuned(
    student: Student,
    mutant: Mutant,
    seed: int,
    *,
    watched: bool,
    root: Path = FOLDER,
    steps: int = STEPS,
    suffix: str = "",
) -> Run:
    """Return what a run showed: made once, unless it is wanted watched and was made without."""
    folder = folder_of(student, mutant, seed, root, suffix)
    if (folder / "run.json").exists():
        run = json.loads((folder / "run.json").read_text())
        if run["watched"] or not watched:
            return run
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = mutated(student, mutant, seed, folder if watched else None, steps, root)
    run |= {"student": student.name, "mutant": mutant.name, "seed": seed, "watched": watched}
    run["seconds"] = round(time.perf_counter() - started, 2)
    (folder / "run.json").write_text(json.dumps(run))
    return run


def mutated(student: Student, mutant: Mutant, seed: int, folder: Path | None, steps: int, root: Path) -> Run:
    """Return the run under its mutation; one that cannot be placed, or cannot run, says why."""
    model = beginner(student, seed, root)
    try:
        with nullcontext() if mutant == CLEAN else mutant.injector(model):
            optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), RATE)
            losses = train(student, model, optimizer, seed, folder, steps)
            return {"losses": losses, "weights": fingerprint(model), **measures(student, model)}
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def train(
    student: Student, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, folder: Path | None, steps: int
) -> list[float]:
    """Tune, watched at flowscope's defaults if there is a folder, and return the losses."""
    stream = batches(student.tuning, seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / steps)
    losses = []
    with watching(student, model, optimizer, folder, steps) as (scope, spectator):
        for k in range(steps):
            spectator.begin(k)
            loss = model(**next(stream)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            scope.step(loss=loss)
            spectator.end(k, loss.detach())
            losses.append(float(loss.detach()))
    return losses


class Nobody:
    """Neither watches nor collects."""

    def begin(self, step: int) -> None: ...

    def end(self, step: int, loss: Tensor) -> None: ...

    def step(self, loss: Tensor) -> None: ...


@contextmanager
def watching(
    student: Student, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None, steps: int
) -> Iterator[tuple[Any, Any]]:
    """Yield flowscope's scope and the spectator of the other rules."""
    if folder is None:
        yield Nobody(), Nobody()
        return
    program = Program(model, optimizer, lambda k: torch.zeros(()), steps, lambda: measures(student, model)["accuracy"])
    config = {"console": "off"}
    with flowscope.watch(model, optimizer, sinks=[JsonlSink(folder)], config=config) as scope:
        spectator = Spectator(program)
        try:
            yield scope, spectator
        finally:
            spectator.close()
            (folder / "probes.json").write_text(json.dumps(pack(spectator.probes)))


def probes(folder: Path) -> list[Probe]:
    """Return what the other rules look at."""
    return unpack(json.loads((folder / "probes.json").read_text()))


def finite(run: Run) -> bool:
    """Return whether a run ended with a measure."""
    return "error" not in run and math.isfinite(run["loss"])
