"""Memory, handles, threads and hooks do not grow with the steps, nor with watching and closing again."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.optim import optimizer as of_torch

import flowscope
from benchmarks.harm.attack import Outcome, Plan

STEPS_ROW = "growth: the second half of a long training adds nothing (memory, objects, handles, threads)"
CYCLES_ROW = "growth: watching and closing again leaves nothing (objects, handles, threads, hooks)"
FIRST = {STEPS_ROW: (8, 8), CYCLES_ROW: (10, 9)}
STEPS, CYCLES = 20_000, 200
MB = 2.0
OBJECTS = 400
"""What lists and caches of Python itself may hold more of."""


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Long trainings of several kinds, then many short ones."""
    for kind, options in {
        "each step, files": {"every": 1, "files": True},
        "each tenth step": {"every": 10},
        "alerts at each step": {"every": 1, "bad": True},
    }.items():
        yield from _long(kind, plan.count(STEPS), **options)
    yield from _cycles("closed", plan.count(CYCLES), close=True)
    yield from _cycles("forgotten", plan.count(CYCLES), close=False)


def _long(kind: str, steps: int, *, every: int, files: bool = False, bad: bool = False) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = _made()
        config = {"console": "off", "max_records": 20, "max_alerts": 20, "slow_every": 5}
        log_dir = Path(folder) if files else None
        with flowscope.watch(model, optimizer, log_dir=log_dir, every=every, config=config) as scope:
            # what is kept is bounded: full after so many steps
            _train(model, optimizer, scope, max(60 * every, steps // 2), bad=bad)
            before = _held()
            _train(model, optimizer, scope, steps // 2, bad=bad)
            yield from _grown(STEPS_ROW, kind, before, _held())


def _cycles(kind: str, cycles: int, *, close: bool) -> Iterator[Outcome]:
    def cycle() -> None:
        model, optimizer = _made()
        scope = flowscope.watch(model, optimizer, every=1, config={"console": "off"})
        _train(model, optimizer, scope, 2)
        if close:
            scope.close()

    for _ in range(3):
        cycle()
    before = _held()
    for _ in range(cycles):
        cycle()
    yield from _grown(CYCLES_ROW, kind, before, _held())


def _grown(row: str, kind: str, before: dict[str, float], after: dict[str, float]) -> Iterator[Outcome]:
    most = {"MB": MB, "objects": OBJECTS, "handles": 0, "threads": 0, "global hooks": 0}
    for what, limit in most.items():
        grown = after[what] - before[what]
        yield Outcome(row, f"{kind}, {what}", grown <= limit, f"{grown:+g}")


def _held() -> dict[str, float]:
    gc.collect()
    return {
        "MB": _resident(),
        "objects": len(gc.get_objects()),
        "handles": len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0,
        "threads": threading.active_count(),
        "global hooks": len(of_torch._global_optimizer_pre_hooks) + len(of_torch._global_optimizer_post_hooks),
    }


def _resident() -> float:
    """MB in memory; 0 where the system does not tell."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if status.exists() else 0.0


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scope: flowscope.Scope, steps: int, *, bad: bool = False
) -> None:
    for step in range(steps):
        loss = model(torch.randn(7, 4)).square().mean() * (float("nan") if bad and step % 4 < 2 else 1)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.nan_to_num_()
        optimizer.step()
        scope.step(loss=loss)
