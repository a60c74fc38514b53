"""Run trainings one after the other, each in a process of its own, with a line that says how far they are."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowscope.comparing.outcomes import Candidate, Outcome, Store
from flowscope.terminal import shown, tell

WIDTH = 24
POLL = 0.1

Train = Callable[[Candidate, int, Callable[[int, float], None]], Outcome]
"""Makes one training: `train(candidate, seed, progress)`."""


class Bar:
    """A line on stderr, where that is a terminal: which training runs, how far all are, how long they will take.

    Attributes:
        total: trainings to make.
        steps: of each.
        done: trainings made.
    """

    def __init__(self, total: int, steps: int, show: bool) -> None:
        self.total, self.steps, self.done = total, steps, 0
        self._show = show and sys.stderr is not None and sys.stderr.isatty()
        self._begin = time.monotonic()

    def draw(self, label: str, seed: int, step: int, loss: float) -> None:
        """Show how far a training is."""
        if not self._show:
            return
        share = (self.done + min(step / self.steps, 1)) / self.total
        spent = time.monotonic() - self._begin
        left = f", about {spent / share - spent:.0f} s left" if share > 0.02 else ""
        bar = "#" * round(share * WIDTH)
        line = f"[{bar:{WIDTH}}] {self.done + 1}/{self.total} {label}, seed {seed}: step {step}, loss {loss:.4g}{left}"
        self._write(f"\r\x1b[K{shown(line)}")

    def clear(self) -> None:
        """Take the line away."""
        if self._show:
            self._write("\r\x1b[K")

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def run_all(
    candidates: Sequence[Candidate], seeds: Sequence[int], steps: int, train: Train, store: Store, *, progress: bool
) -> list[Outcome]:
    """Return the outcome of each candidate and seed, those of the store first taken from there.

    Seeds are the outer loop, so that an interrupted comparison has all candidates of the first seeds.

    Raises:
        KeyboardInterrupt: interrupted; what ended is in the store.
    """
    found = {(c.label, seed): store.find(c.label, seed) for seed in seeds for c in candidates}
    bar = Bar(sum(outcome is None for outcome in found.values()), steps, progress)
    try:
        for seed in seeds:
            for candidate in candidates:
                label = candidate.label
                if found[label, seed] is None:
                    bar.draw(label, seed, 0, float("nan"))
                    outcome = train(candidate, seed, functools.partial(bar.draw, label, seed))
                    found[label, seed] = outcome
                    store.keep(outcome)
                    bar.done += 1
    except KeyboardInterrupt:
        made = sum(outcome is not None for outcome in found.values())
        kept = f"kept in {store.folder}: the same call goes on from there" if store.folder else "lost (no folder)"
        bar.clear()
        tell(f"flowscope: interrupted; {made} of {len(found)} trainings ended, {kept}")
        raise
    bar.clear()
    return [outcome for outcome in found.values() if outcome is not None]


def in_process(arguments: Sequence[str], told: Path, progress: Callable[[int, float], None]) -> subprocess.Popen[bytes]:
    """Run a Python program to its end and return the ended process, its stderr as `stderr_text`.

    What it writes to the file `told` is passed on as progress; what it prints is dropped. It ends with us.
    """
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), here]))
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        while True:
            try:
                _, errors = process.communicate(timeout=POLL)
                process.stderr_text = errors.decode(errors="replace")  # type: ignore[attr-defined]
                return process
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError, ValueError):
                    now = json.loads(told.read_text())
                    progress(now["step"], now["loss"])
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def ended(process: Any) -> str:
    """Say how a process ended that left no outcome: its last line, or the signal."""
    lines = process.stderr_text.strip().splitlines()
    return f"its process ended with status {process.returncode}" + (f": {lines[-1]}" if lines else "")
