"""Paired, interleaved timing: every variant steps once in each round, so that a slow moment hits all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Times = NDArray[np.float64]
Clock = Callable[[], float]

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


class Runner:
    """One variant: a model and an optimizer of its own, and whatever watches them.

    Args:
        name: of the variant.
        model: trained by this variant alone; all variants start from equal weights.
        optimizer: of that model.
        loss: the forward.
        attach: starts watching and returns what to call with the loss after each optimizer step (or None). It puts
            what is to be undone on `stack`, and may replace `forward_backward` for tools that take these over.
    """

    clock: Clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        attach: Callable[[Runner], Callable[[Tensor], object] | None] | None = None,
    ) -> None:
        self.name, self.model, self.optimizer, self.loss = name, model, optimizer, loss
        self.stack = ExitStack()
        self.forward_backward: Callable[[nn.Module, Batch], Tensor] = self._plain
        self.after = attach(self) if attach else None

    def _plain(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = self.loss(model, batch)
        loss.backward()
        return loss

    def step(self, batch: Batch) -> float:
        """One training step; returns its seconds."""
        start = self.clock()
        self.optimizer.zero_grad()
        loss = self.forward_backward(self.model, batch)
        self.optimizer.step()
        if self.after is not None:
            self.after(loss)
        return self.clock() - start

    def close(self) -> None:
        self.stack.close()


def interleave(runners: Sequence[Runner], data: Iterator[Batch], pairs: int, warmup: int = 20) -> dict[str, Times]:
    """Seconds per step of each variant, [pairs], after `warmup` unmeasured rounds, then close the runners.

    The order rotates from round to round, with changing strides: each variant stands in each place equally often, and
    behind each other variant (whoever follows a heavy one finds a cold cache).
    """
    count = len(runners)
    strides = [stride for stride in range(1, max(count, 2)) if math.gcd(stride, count) == 1]
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    try:
        for k in range(warmup + pairs):
            batch = next(data)
            stride = strides[k % len(strides)]
            for runner in (runners[(k + place * stride) % count] for place in range(count)):
                seconds = runner.step(batch)
                if k >= warmup:
                    times[runner.name].append(seconds)
    finally:
        for runner in runners:
            runner.close()
    return {name: np.array(values) for name, values in times.items()}


@dataclass
class Ratio:
    """Median and quartiles of one variant's step over the bare step of the same round."""

    name: str
    values: Times
    added: float
    note: str = ""
    limit: float | None = None
    goal: float | None = None
    quartiles: tuple[float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        low, middle, high = np.percentile(self.values, [25, 50, 75])
        self.quartiles = float(low), float(middle), float(high)

    def row(self) -> str:
        low, middle, high = self.quartiles
        verdict = "" if self.limit is None else ("yes" if middle <= self.limit else "**no**")
        limit = "" if self.limit is None else f"{self.limit:.2f}" + (f" ({self.goal:.2f})" if self.goal else "")
        cells = (self.name, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{1e3 * self.added:+.2f}", len(self.values))
        return "| " + " | ".join(map(str, (*cells, limit, verdict, self.note))) + " |"


RATIO_HEAD = (
    "| variant | median ratio | quartiles | added ms a step | n | budget (goal) | met | note |\n"
    "|---|---|---|---|---|---|---|---|"
)


def ratio(name: str, watched: Times, bare: Times, *, window: int = 1, **labels: object) -> Ratio:
    """The ratios of paired steps; with `window`, of the sums over so many rounds in a row (for sparse sampling)."""
    if window > 1:
        count = len(bare) // window
        watched, bare = (t[: count * window].reshape(count, window).sum(axis=1) for t in (watched, bare))
    added = float(np.median(watched - bare)) / window
    return Ratio(name, watched / bare, added, **labels)  # type: ignore[arg-type]
