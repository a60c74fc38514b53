"""However a script ends, its status and output are its own, and every step that it finished is in the file.

Also files that fail for a moment or are deleted, and a child that is forked in the middle of a training.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import flowscope
from benchmarks.harm.attack import Outcome, Plan
from benchmarks.harm.programs import QUIET, Stack, listening, loss_of
from flowscope.sinks import read_run

ROOT = Path(__file__).resolve().parents[3]
STEPS = 6

SAME = "ends: status and output are those of the bare script"
WHOLE = "ends: every finished step is in the file"
CLEAN = "ends: no line of ours in a traceback"
GOES_ON = "ends: a file that fails for a moment goes on, without a hole"
DELETED = "ends: a deleted log_dir is said and begun again"
FORKED = "ends: a forked child that trains on writes a folder of its own"
FIRST = {SAME: (48, 48), CLEAN: (48, 48), WHOLE: (48, 28), GOES_ON: (1, 0), DELETED: (1, 0), FORKED: (1, 0)}

SCRIPT = """
import contextlib, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
import torch
from benchmarks.harm.programs import QUIET, Stack, loss_of
watched, told, within, folder = sys.argv[1] == "1", sys.argv[2] == "1", sys.argv[3] == "1", sys.argv[4]
torch.manual_seed(1)
model = Stack()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
scope = None
if watched:
    import flowscope
    scope = flowscope.watch(model, optimizer, log_dir=folder, every=1, config=QUIET)

def step(number):
    optimizer.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    optimizer.step()
    if scope is not None and told:
        scope.step(loss=loss)
    print("done", number, loss.item().hex(), flush=True)

def end():
    {end}

with scope if within and scope is not None else contextlib.nullcontext():
    for number in range({steps}):
        step(number)
    end()
"""
KILL = "os.kill(os.getpid(), signal.{name}); time.sleep(5)"
AGAIN = f"step({STEPS})"
ENDS = {
    "falls off the end": "pass",
    "sys.exit(7)": "sys.exit(7)",
    "os._exit(5)": "os._exit(5)",
    "an exception": "raise KeyError('mine')",
    "SIGTERM": KILL.format(name="SIGTERM"),
    "SIGINT": KILL.format(name="SIGINT"),
    "SIGHUP": KILL.format(name="SIGHUP"),
    "a handler that exits": "signal.signal(signal.SIGTERM, lambda *a: sys.exit(9)); " + KILL.format(name="SIGTERM"),
    "an exception in a forward": f"model.blocks[0].forward = lambda x: 1 / 0; {AGAIN}",
    "an exception in a backward": f"model.blocks[0].norm.weight.register_hook(lambda g: 1 / 0); {AGAIN}",
    "no memory": f"model.blocks[0].forward = lambda x: bytearray(1 << 62); {AGAIN}",
    "abort": "os.abort()",
    "exit beside a thread": "threading.Thread(target=time.sleep, args=(0.2,)).start(); sys.exit(0)",
    "recursion": "end()",
    "exit in an optimizer's hook": f"optimizer.register_step_post_hook(lambda *a: sys.exit(4)); {AGAIN}",
    "an interrupt in a forward": f"model.blocks[1].forward = lambda x: signal.raise_signal(signal.SIGINT); {AGAIN}",
}


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Ends by with and without losses and `with`; then files and forks."""
    for name in plan.some(list(ENDS)):
        yield from _ends(name)
    for attack in (_one_failed_write, _deleted, _forked):
        yield from attack(plan.random.randrange(1, STEPS - 1))


def _ends(name: str) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "script.py"
        path.write_text(SCRIPT.format(root=str(ROOT), end=ENDS[name], steps=STEPS))
        bare = _run(path, "0", "0", "0", "none")
        for told, within in ((1, 0), (0, 0), (0, 1)):
            folder = Path(place) / f"run{told}{within}"
            seen = _run(path, "1", str(told), str(within), str(folder))
            case = f"{name}, {'losses given' if told else 'no losses'}{', with' if within else ''}"
            equal = (seen.returncode, seen.stdout) == (bare.returncode, bare.stdout)
            yield Outcome(SAME, case, equal, f"{seen.returncode} {seen.stderr[-200:]}")
            steps = [record.step for record in read_run(folder).records]
            finished = seen.stdout.count("done")
            yield Outcome(WHOLE, case, steps[:finished] == [*range(finished)], f"{steps} of {finished}")
            ours = [line for line in seen.stderr.splitlines() if "/flowscope/" in line]
            yield Outcome(CLEAN, case, not ours or "hook" in name, str(ours[:2]))


def _run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def _train(folder: Path, meanwhile: Callable[[int], Any]) -> flowscope.Scope:
    torch.manual_seed(1)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with flowscope.watch(model, optimizer, log_dir=folder, every=1, config=QUIET) as scope:
        for number in range(STEPS):
            meanwhile(number)
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    return scope


@contextlib.contextmanager
def _refusing(disk: dict[str, bool]) -> Iterator[None]:
    """Writes of sinks fail while `disk["full"]`."""
    write = os.write

    def refused(handle: int, piece: bytes) -> int:
        if disk["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, piece)

    with mock.patch("flowscope.sinks.append_file.os.write", refused):
        yield


def _one_failed_write(at: int) -> Iterator[Outcome]:
    disk = {"full": False}
    with tempfile.TemporaryDirectory() as place, listening() as said, _refusing(disk):
        _train(Path(place), lambda number: disk.update(full=number == at))
        steps = [record.step for record in read_run(place).records]
    fuses = [line.split(" failed")[0] for line in said.errors]
    held = steps == [*range(STEPS)] and len(fuses) == len(set(fuses)) == 2
    yield Outcome(GOES_ON, f"the disk is full in step {at}", held, f"{steps} {said.errors}")


def _deleted(at: int) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as place, listening() as said:
        folder = Path(place) / "run"
        _train(folder, lambda number: shutil.rmtree(folder) if number == at else None)
        steps = [record.step for record in read_run(folder).records] if folder.is_dir() else []
    told = any("deleted" in line for line in said.lines)
    # what was written before is gone with the folder; the step before the deletion may have waited
    held = told and steps[-(STEPS - at) :] == [*range(at, STEPS)] and not said.errors
    yield Outcome(DELETED, f"in step {at}", held, f"{steps} {said.lines}")


def _forked(at: int) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as place:
        children: list[int] = []

        def meanwhile(number: int) -> None:
            if number == at:
                children.append(os.fork())

        parent = os.getpid()
        try:
            _train(Path(place), meanwhile)
        finally:
            if os.getpid() != parent:
                os._exit(0)
        _, status = os.waitpid(children[0], 0)
        own = [record.step for record in read_run(Path(place) / f"fork-{children[0]}").records]
        run = read_run(place)
    held = status == 0 and own == [*range(at, STEPS)] and [r.step for r in run.records] == [*range(STEPS)]
    note = f"status {status}, child {own}, parent {[r.step for r in run.records]}, superseded {run.superseded}"
    yield Outcome(FORKED, f"in step {at}", held and not run.superseded, note)
