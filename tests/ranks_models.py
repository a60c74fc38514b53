"""Models, data and loops that the ranks of tests/ranks_program.py and the one process of the test have in common.

Axis letters: B batch, T tokens, D features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from watch_models import Block, D, Stack, data

import flowscope

Batch = tuple[Tensor, Tensor]
SAMPLES = 6


class PostBlock(nn.Module):
    """norm(x + fc2(relu(fc1(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.fc2(self.fc1(x).relu()))


class Scaled(Stack):
    """A stack with a parameter of one entry (an empty shard on every rank but one), and layers that may stay unused."""

    def __init__(self, depth: int, block: Callable[[], nn.Module], *, branches: bool) -> None:
        super().__init__(depth, block)
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.branch = nn.Linear(D, D) if branches else None
        self.never = nn.Linear(D, 3) if branches else None

    def forward(self, x: Tensor, taps: list[Tensor] | None = None, *, branch: bool = False) -> Tensor:
        x = self.embed(x) * self.scale
        if branch and self.branch is not None:
            x = x + self.branch(x)
        if taps is not None:
            taps.append(x)
        for block in self.blocks:
            x = block(x)
            if taps is not None:
                taps.append(x)
        return self.head(x).clone()


def build(depth: int = 4, *, post: bool = False, branches: bool = False) -> Scaled:
    torch.manual_seed(0)
    return Scaled(depth, PostBlock if post else lambda: Block(nn.ReLU), branches=branches)


def batches(count: int = 4) -> list[Batch]:
    return [data(seed, SAMPLES) for seed in range(count)]


def share(whole: Sequence[Batch], rank: int) -> list[Batch]:
    half = slice(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2)
    return [(x[half], y[half]) for x, y in whole]


def plain(model: nn.Module, whole: Sequence[Batch]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in whole:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {}


def train(
    model: nn.Module,
    whole: Sequence[Batch],
    *,
    watch: nn.Module | None = None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    micro: bool = False,
    quiet: Callable[[], Any] = contextlib.nullcontext,
    loss_first: bool = False,
    call: Callable[[Tensor, int], Tensor] | None = None,
    before_step: Callable[[nn.Module], Any] | None = None,
    after_step: Callable[[flowscope.Scope, int], None] | None = None,
    extra: dict[str, Any] | None = None,
    foreach: bool | None = None,
    desync_every: int = 5,
    every: Any = 1,
    **options: Any,
) -> dict[str, Any]:
    """Train with SGD while watching, and return the records as plain numbers."""
    config = {"console": "off", "desync_every": desync_every}
    scope = None
    if prepare is not None:
        scope = flowscope.watch(model, every=every, config=config, **options)
        model = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=foreach)
    if scope is None:
        scope = flowscope.watch(model if watch is None else watch, optimizer, every=every, config=config, **options)
    stopped = None
    try:
        for step, (x, y) in enumerate(whole):
            optimizer.zero_grad()
            loss = torch.zeros(())
            parts = [(x[:1], y[:1]), (x[1:], y[1:])] if micro else [(x, y)]
            for number, (a, b) in enumerate(parts):
                with quiet() if number < len(parts) - 1 else contextlib.nullcontext():
                    out = call(a, step) if call is not None else model(a, **(extra or {}))
                    part = nn.functional.mse_loss(out, b) * (len(a) / len(x))
                    part.backward()
                loss = loss + part.detach()
            if before_step is not None:
                before_step(model)
            if loss_first and not scope.closed:
                scope.step(loss=loss)
            optimizer.step()
            if not loss_first and not scope.closed:
                scope.step(loss=loss)
            if after_step is not None:
                after_step(scope, step)
    except flowscope.StopTraining:
        stopped = step
    scope.close()
    return {"records": [plainly(record) for record in scope.records], "stopped": stopped}


def plainly(record: flowscope.Record) -> dict[str, Any]:
    """A record as JSON can hold it, to the last digit."""
    return {
        "step": record.step,
        "loss": record.loss,
        "flags": list(record.flags),
        "notes": list(record.notes),
        "metrics": {key: values.tolist() for key, values in record.metrics.items()},
        "labels": {key: record.metric_labels.get(key, ()) for key in record.metrics},
    }
