"""A run that is killed at any moment leaves a file that is read, and a folder in which the next process goes on.

A forked child trains for ever; it is killed at a drawn moment.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import flowscope
from benchmarks.harm.attack import Outcome, Plan
from flowscope.sinks import read_run

READ = "SIGKILL at a drawn moment: the file holds every step with a given loss but the newest"
GOES_ON = "SIGKILL at a drawn moment: the next process goes on in the folder"
FIRST = {READ: (100, 100), GOES_ON: (25, 25)}
KILLS = 200
AGAIN_EVERY = 4


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Kill after kill, each in a folder of its own."""
    for number in range(plan.count(KILLS)):
        with tempfile.TemporaryDirectory() as folder:
            seconds = plan.random.uniform(0.0, 1.0)
            done = _killed(Path(folder), seconds)
            case = f"kill {number} after {seconds:.2f} s and {done} steps"
            yield _whole(READ, case, Path(folder), max(0, done - 1))
            if number % AGAIN_EVERY == 0:
                written = (Path(folder) / "flowscope.jsonl").exists()  # maybe one step more than was told
                before = len(read_run(folder).records) if written else 0
                _train(Path(folder), first=before, last=before + 3)
                yield _whole(GOES_ON, case, Path(folder), before + 3)


def _whole(row: str, case: str, folder: Path, least: int) -> Outcome:
    """Whether the file has the steps from 0 on, at least so many, and at most one line that was being written."""
    if not (folder / "flowscope.jsonl").exists():
        return Outcome(row, case, least == 0, "there is no file")
    run = read_run(folder)
    steps = [record.step for record in run.records]
    held = steps == list(range(len(steps))) and len(steps) >= least and run.skipped_lines <= 1
    return Outcome(row, case, held, f"steps {steps[:3]}...{steps[-3:]}, expected {least}; {run.skipped_lines} unread")


def _killed(folder: Path, seconds: float) -> int:
    """Train in a child, kill it so long after its first step; returns how many steps it had finished."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _train(folder, told=writing)
        finally:
            os._exit(1)
    os.close(writing)
    steps = os.read(reading, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 65536):
        steps += more
    os.close(reading)
    return len(steps)


def _train(folder: Path, first: int = 0, last: int = 10**6, told: int | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flowscope.watch(model, optimizer, log_dir=folder, every=1, config={"console": "off"}) as scope:
        for step in range(first, last):
            loss = model(torch.randn(7, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss, step=step)
            if told is not None:
                os.write(told, b".")
