"""What a labelled run is: a program that trains, and what is known about it beforehand.

A `Case` is fixed text; its `build(draw)` makes a `Program`, a model with an optimizer and a step, for one seed. Every
size, rate and moment of a program is asked from the `Draw`, which answers with the listed value, or, for a variation,
with one drawn by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Value = TypeVar("Value")
Score = Literal["faulty", "healthy", "apart"]


class Draw:
    """The choices of one run.

    Args:
        seed: of the weights and of the order of the data.
        variation: None for the listed run; a number for a variation drawn from it (and the case's name).
    """

    def __init__(self, seed: int = 0, variation: int | None = None, *, case: str = "") -> None:
        self.seed, self.variation = seed, variation
        entropy = [*case.encode(), variation or 0]
        self._random = None if variation is None else np.random.default_rng(entropy)
        self.taken: dict[str, Any] = {}

    def pick(self, name: str, listed: Value, *others: Value) -> Value:
        """The listed value, or one of all."""
        value = listed if self._random is None else (listed, *others)[self._random.integers(len(others) + 1)]
        self.taken[name] = value
        return value

    def factor(self, name: str, listed: float, spread: float) -> float:
        """The listed number, or one up to `spread` times larger or smaller, evenly in the logarithm."""
        if self._random is not None:
            listed *= spread ** self._random.uniform(-1, 1)
        self.taken[name] = float(f"{listed:.3g}")
        return float(self.taken[name])

    def step(self, name: str, listed: int, first: int, last: int) -> int:
        """The listed step, or one in [first, last] that is not sampled by `every=10`."""
        value = listed
        if self._random is not None:
            value = int(self._random.integers(first, last + 1))
            value += value % 10 == 0
        self.taken[name] = value
        return value


@dataclass
class Program:
    """One run, ready to start.

    Attributes:
        model, optimizer: what `watch` is given.
        step: one whole training step as a user writes it, from the step's number to the loss.
        steps: how many.
        quality: the measure that shows whether it learned (held-out accuracy, R2, or minus the loss of a model that
            has neither); None where the label is a fact of wiring.
        accuracy: whether `quality` is an accuracy (AUTOTRAINER's rules need one).
        shows: from the finished run to what contradicts its label, or None.
        first: the first step at which the fault can show.
        place: regular expression of the right places (full match); None where a place means nothing.
        watch: further arguments of `flowscope.watch`.
        epoch: steps an epoch.
    """

    model: nn.Module
    optimizer: Any
    step: Callable[[int], Tensor]
    steps: int
    quality: Callable[[], float] | None = None
    shows: Callable[[Shown], str | None] = lambda shown: None
    first: int = 0
    place: str | None = None
    accuracy: bool = True
    watch: dict[str, Any] = field(default_factory=dict)
    epoch: int = 22


@dataclass
class Shown:
    """What a run showed, for the check of its label."""

    losses: list[float]
    quality: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def last_loss(self) -> float:
        """Mean of the last ten losses."""
        return float(np.mean(self.losses[-10:]))


@dataclass(frozen=True)
class Case:
    """A labelled run.

    Attributes:
        id, title: short.
        family: cases of one kind of cause; variations are drawn per family.
        build: makes the program.
        kinds: the accepted kinds of alert; none for a healthy run.
        score: "apart" runs are reported and not counted.
        ranks: how many processes.
        varied: whether variations are drawn from it.
    """

    id: str
    title: str
    family: str
    build: Callable[[Draw], Program]
    kinds: tuple[str, ...] = ()
    score: Score = "faulty"
    ranks: int = 1
    varied: bool = True


class Catalogue:
    """Collects the cases of one module."""

    def __init__(self, family: str, *, healthy: bool = False) -> None:
        self.family, self.healthy = family, healthy
        self.cases: list[Case] = []

    def __call__(
        self, name: str, title: str, *kinds: str, score: Score | None = None, ranks: int = 1, varied: bool = True
    ) -> Callable[[Callable[[Draw], Program]], Callable[[Draw], Program]]:
        """Register the decorated builder."""

        def register(build: Callable[[Draw], Program]) -> Callable[[Draw], Program]:
            label: Score = score or ("healthy" if self.healthy else "faulty")
            self.cases.append(Case(name, title, self.family, build, kinds, label, ranks, varied))
            return build

        return register


# -- how a program is put together ------------------------------------------------------------------------------------


def batches(data: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Endless shuffled batches (x, y), the last of an epoch dropped where it is smaller."""
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(x), generator=generator)
        for start in range(0, len(x) - size + 1, size):
            index = order[start : start + size]
            yield x[index], y[index]


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Batch],
    loss_of: Loss,
    *,
    before: Callable[[int], None] | None = None,
    after_backward: Callable[[int], None] | None = None,
    alter: Callable[[int, Batch], Batch] | None = None,
) -> Callable[[int], Tensor]:
    """A training step: `before`, zero_grad, forward, backward, `after_backward`, optimizer step."""

    def step(k: int) -> Tensor:
        if before is not None:
            before(k)
        batch = next(data)
        if alter is not None:
            batch = alter(k, batch)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if after_backward is not None:
            after_backward(k)
        optimizer.step()
        return loss.detach()

    return step


def below(bar: float) -> Callable[[Shown], str | None]:
    """A failing run ends below the bar (a NaN is below any)."""
    return lambda shown: f"quality {shown.quality:.3g}, expected at most {bar}" if shown.quality > bar else None


def above(bar: float) -> Callable[[Shown], str | None]:
    """A healthy run ends above the bar."""
    return lambda shown: None if shown.quality >= bar else f"quality {shown.quality:.3g}, expected at least {bar}"


def not_finite(shown: Shown) -> str | None:
    """The run has met a loss that is no number."""
    return None if any(not math.isfinite(loss) for loss in shown.losses) else "all losses are finite"


def either(*checks: Callable[[Shown], str | None]) -> Callable[[Shown], str | None]:
    """One of the checks holds."""

    def check(shown: Shown) -> str | None:
        reasons = [reason(shown) for reason in checks]
        return None if None in reasons else "; ".join(str(reason) for reason in reasons)

    return check


def accuracy_of(model: nn.Module, data: Batch) -> Callable[[], float]:
    """Held-out accuracy in evaluation mode (one output: the sign decides)."""
    x, y = data

    @torch.no_grad()
    def measure() -> float:
        training = model.training
        model.eval()
        out = model(x)
        model.train(training)
        if not bool(torch.isfinite(out).all()):
            return math.nan
        guess = (out[:, 0] > 0).long() if out.shape[-1] == 1 else out.argmax(-1)
        return float((guess == y.view_as(guess).long()).double().mean())

    return measure


def r2_of(model: nn.Module, data: Batch) -> Callable[[], float]:
    """Held-out coefficient of determination."""
    x, y = data

    @torch.no_grad()
    def measure() -> float:
        training = model.training
        model.eval()
        out = model(x).reshape(-1)
        model.train(training)
        target = y.reshape(-1)
        return 1 - float((out - target).square().sum() / (target - target.mean()).square().sum())

    return measure


def names(*parts: str) -> str:
    """A regular expression for places: one of the parts, each with anything behind it in the path."""
    return "|".join(rf"{part}(\..*|:input)?" for part in parts)


def supervised(
    draw: Draw,
    model: nn.Module,
    split: tuple[Batch, Batch],
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    *,
    batch: int = 64,
    steps: int = 400,
    r2: bool = False,
    before: Callable[[int], None] | None = None,
    after_backward: Callable[[int], None] | None = None,
    alter: Callable[[int, Batch], Batch] | None = None,
    **known: Any,
) -> Program:
    """A program that fits the first part of `split` and is measured on the second."""
    step = plain_step(
        model,
        optimizer,
        batches(split[0], batch, draw.seed),
        loss,
        before=before,
        after_backward=after_backward,
        alter=alter,
    )
    quality = (r2_of if r2 else accuracy_of)(model, split[1])
    epoch = max(1, len(split[0][0]) // batch)
    return Program(model, optimizer, step, steps, quality, accuracy=not r2, epoch=epoch, **known)


def scheduled(draw: Draw, program: Program) -> Program:
    """The same program under linear warm-up from zero and cosine decay to zero."""
    total = program.steps
    warm = round(draw.pick("warmup", 0.15, 0.1, 0.25) * total)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        program.optimizer,
        lambda k: k / warm if k < warm else 0.5 * (1 + math.cos(math.pi * (k - warm) / (total - warm))),
    )
    plain = program.step

    def step(k: int) -> Tensor:
        loss = plain(k)
        schedule.step()
        return loss

    program.step = step
    return program
