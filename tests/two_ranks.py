"""Programs of this folder on two ranks or more, with torch's launcher or without; none outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent
RANKS = (0, 1)
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def torchrun(
    name: str, *arguments: str, limit: float, ranks: int = 2, options: Sequence[str] = (), **environment: str
) -> str:
    """Run a program to its end, for `limit` seconds at most, and return what it printed."""
    return _ended(_started(*LAUNCHER[:-1], str(ranks), *options, str(TESTS / name), *arguments, **environment), limit)


def program(name: str, *arguments: str, limit: float, **environment: str) -> str:
    """The same for a program that makes its ranks itself."""
    return _ended(_started(str(TESTS / name), *arguments, **environment), limit)


def without_launcher(program: str, *arguments: str, limit: float, **environment: str) -> list[tuple[int, str]]:
    """The same with each rank on its own (`RANK` says which): no launcher ends all with one. Exit codes and output."""
    processes = [_started(str(TESTS / program), *arguments, RANK=str(rank), **environment) for rank in RANKS]
    try:
        outputs = ["".join(process.communicate(timeout=limit)) for process in processes]
    finally:
        for process in processes:
            _end(process)
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def _started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    strict = {"OMP_NUM_THREADS": "1", "FLOWSCOPE_STRICT": "1", "PYTHONPATH": paths}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **strict, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def _ended(process: subprocess.Popen[str], limit: float) -> str:
    try:
        out, errors = process.communicate(timeout=limit)
    finally:
        _end(process)
    assert process.returncode == 0, (out + errors)[-5000:]
    return out


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
