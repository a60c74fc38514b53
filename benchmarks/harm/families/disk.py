"""Whatever a disk does, training is bitwise the same, records stay in memory, and the file stays readable."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from unittest import mock

import torch
from torch import Tensor, nn

import flowscope
from benchmarks.harm.attack import Outcome, Plan
from flowscope.sinks import read_run

SAME = "disks: training bitwise the same, nothing raised"
KEPT = "disks: every record stays in memory"
READ = "disks: what is in the file is read"
FIRST = {SAME: (65, 65), KEPT: (65, 65), READ: (65, 65)}
CASES = 300
STEPS = 8
ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EDQUOT, errno.ESTALE, errno.EBADF)

Write = Callable[[int, bytes], int]
_write: Write = os.write


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Drawn faults of the writes, and of the folder under them."""
    bare = _train(None, lambda step: None)[0]
    for number in range(plan.count(CASES)):
        kind = plan.random.choice([*WRITES, *FOLDERS])
        with tempfile.TemporaryDirectory() as temporary:
            folder, between = Path(temporary) / "run", _nothing
            if kind in FOLDERS:
                at = plan.random.randrange(STEPS)
                between = _at(at, FOLDERS[kind], folder)
            writes = mock.patch("os.write", WRITES[kind](plan.random)) if kind in WRITES else mock.MagicMock()
            case = f"case {number}: {kind}"
            try:
                with writes:
                    trained, records = _train(folder, between)
            except Exception as error:
                yield Outcome(SAME, case, False, f"{type(error).__name__}: {error}")
                continue
            equal = all(torch.equal(a, b) for a, b in zip(bare, trained, strict=True))
            yield Outcome(SAME, case, equal)
            yield Outcome(KEPT, case, records == STEPS, f"{records} of {STEPS}")
            yield _readable(case, folder)


def _readable(case: str, folder: Path) -> Outcome:
    try:
        steps = [record.step for record in read_run(folder).records]
    except flowscope.FlowscopeError:
        return Outcome(READ, case, True)  # there is no file, and it is said
    except OSError as error:
        return Outcome(READ, case, os.geteuid() != 0, str(error))
    return Outcome(READ, case, steps == sorted(set(steps)) and set(steps) <= set(range(STEPS)), str(steps))


def _train(folder: Path | None, between: Callable[[int], object]) -> tuple[list[Tensor], int]:
    """Losses and parameters, and how many records are in memory; without a folder nobody watches."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"console": "off"}
    scope = folder and flowscope.watch(model, optimizer, log_dir=folder, every=1, config=config)
    losses = []
    for step in range(STEPS):
        between(step)
        loss = model(torch.randn(7, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if scope:
            scope.step(loss=loss)
    records = len(scope.records) if scope else 0
    if scope:
        scope.close()
    return [*losses, *(parameter.detach() for parameter in model.parameters())], records


# -- faults of the writes ---------------------------------------------------------------------------------------------


def _failing(fails: Callable[[int], bool], error: int, part: float = 0.0) -> Write:
    """Writes of which some fail, or write a part only."""
    count = 0

    def write(handle: int, data: bytes) -> int:
        nonlocal count
        count += 1
        if handle <= 2 or not fails(count):
            return _write(handle, data)
        if part:
            return _write(handle, data[: max(1, int(len(data) * part))])
        raise OSError(error, os.strerror(error))

    return write


def _from(random: Random) -> Callable[[int], bool]:
    first = random.randrange(1, 20)
    return lambda count: count >= first


def _moment(random: Random) -> Callable[[int], bool]:
    first, length = random.randrange(1, 20), random.randrange(1, 4)
    return lambda count: first <= count < first + length


def _some(random: Random) -> Callable[[int], bool]:
    chosen = {count for count in range(1, 200) if random.random() < 0.3}
    return chosen.__contains__


WRITES: dict[str, Callable[[Random], Write]] = {
    "full from a moment on": lambda random: _failing(_from(random), errno.ENOSPC),
    "an error from a moment on": lambda random: _failing(_from(random), random.choice(ERRORS)),
    "an error for a moment": lambda random: _failing(_moment(random), random.choice(ERRORS)),
    "an error now and then": lambda random: _failing(_some(random), random.choice(ERRORS)),
    "a part is written": lambda random: _failing(_moment(random), 0, random.random()),
    "parts are written now and then": lambda random: _failing(_some(random), 0, random.random()),
}


# -- faults of the folder ---------------------------------------------------------------------------------------------


def _nothing(step: int) -> None:
    """No fault of the folder."""


def _at(moment: int, change: Callable[[Path], object], folder: Path) -> Callable[[int], object]:
    return lambda step: change(folder) if step == moment and folder.exists() else None


def _replaced(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


def _truncated(folder: Path) -> None:
    for file in folder.iterdir():
        os.truncate(file, file.stat().st_size // 2)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "deleted": shutil.rmtree,
    "renamed": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "replaced by a file": _replaced,
    "truncated": _truncated,
    "without permissions": lambda folder: folder.chmod(0o000),
}
