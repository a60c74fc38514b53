"""Threads beside a watched training change nothing of it, of its records or of their own steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import flowscope
from benchmarks.harm.attack import Outcome, Plan
from benchmarks.harm.programs import IN, OUT, QUIET, D, Stack, T, in_threads, left_behind, listening, loss_of, same

TWO, BESIDE, READERS, SHARED, CLOSED = (
    "threads: two trainings at once have the records of lone runs",
    "threads: no step of another thread raises while scopes are opened and closed",
    "threads: readers of records, alerts, summary, state_dict disturb nothing",
    "threads: one model in several threads goes on, or it is said why it is not seen",
    "threads: close() in another thread stops no training",
)
FIRST = {TWO: (5, 0), BESIDE: (3, 1), READERS: (3, 1), SHARED: (3, 0), CLOSED: (1, 1)}


class Recurrent(nn.Module):
    """A recurrent layer, blocks, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rnn = nn.Linear(IN, D), nn.GRU(D, D, 2, batch_first=True)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(T), nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, OUT] of [B, T, IN]."""
        x = self.rnn(self.stem(x))[0]
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Plain(nn.Module):
    """Residual blocks without any random number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(IN, D), nn.Linear(D, OUT)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, OUT] of [B, T, IN]."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def made(kind: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with drawn weights; threads share torch's own generator."""
    model, generator = kind(), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Fifteen cases a round; how threads take turns is drawn anew by the machine each time."""
    cases: dict[str, Callable[[int], Iterator[Outcome]]] = {
        "two, plain, no slow metrics": partial(two, Plain, {"slow_every": 0}),
        "two, plain, slow metrics": partial(two, Plain, {"slow_every": 1}),
        "two, recurrent, no slow metrics": partial(two, Recurrent, {"slow_every": 0}),
        "two, recurrent, slow metrics": partial(two, Recurrent, {"slow_every": 1}),
        "two, recurrent, defaults": partial(two, Recurrent, {}),
        "scopes beside an unwatched training": partial(beside, None),
        "scopes beside a watched one": partial(beside, 1),
        "scopes beside one watched at times": partial(beside, 10),
        "one reader": partial(readers, 1),
        "three readers": partial(readers, 3),
        "reader of a closed scope": partial(readers, 1, closes=True),
        "four threads with an optimizer each": hogwild,
        "replicas of one step": replicas,
        "a second thread evaluates": evaluates,
        "closed by another thread": closes,
    }
    for name in plan.some(list(cases)):
        seed = plan.random.randrange(10**6)
        for outcome in cases[name](seed):
            yield Outcome(outcome.row, f"{name}, seed {seed}", outcome.held, outcome.note)


# -- two trainings ----------------------------------------------------------------------------------------------------

Trained = tuple[flowscope.Scope, list[Tensor]]


def train(model: nn.Module, steps: int, every: int = 1, **config: object) -> Trained:
    """A watched training."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    with flowscope.watch(model, optimizer, every=every, config={**QUIET, **config}) as scope:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
            losses.append(loss.detach())
    return scope, left_behind(model, optimizer, losses)[:-2]  # the threads share the generator


def two(kind: Callable[[], nn.Module], config: dict[str, object], seed: int) -> Iterator[Outcome]:
    """Two trainings one after the other, then at once."""
    lone = [train(made(kind, seed + k), 30, **config) for k in range(2)]
    joined: dict[int, Trained] = {}

    def at_once(k: int) -> None:
        joined[k] = train(made(kind, seed + k), 30, **config)

    raised = in_threads(*(partial(at_once, k) for k in range(2)))
    wrong = [why for k in joined for why in differences(lone[k], joined[k])]
    yield Outcome(TWO, "", not raised and not wrong, f"{raised} {wrong[:3]}")


OF_THE_PROCESS = {"random_state"}
"""What two trainings in one process share, and so move for each other."""


def differences(lone: Trained, joined: Trained) -> Iterator[str]:
    """What differs between two runs of one training."""
    (first, bits), (second, others) = lone, joined
    if not same(bits, others):
        yield "the training differs"
    if [r.step for r in first.records] != [r.step for r in second.records]:
        yield f"{len(second.records)} records of {len(first.records)}"
    for one, other in zip(first.records, second.records, strict=False):
        for key, values in one.metrics.items():
            if key in OF_THE_PROCESS:
                continue
            found = other.metrics.get(key, np.zeros(0))
            if found.shape != values.shape or not np.allclose(values, found, rtol=1e-3, atol=1e-7, equal_nan=True):
                yield f"step {one.step} {key}"
    alerts = [{(a.kind, a.where, a.state) for a in scope.alerts} for scope in (first, second)]
    if alerts[0] != alerts[1]:
        yield f"alerts {alerts[0] ^ alerts[1]}"


# -- scopes beside a training -----------------------------------------------------------------------------------------


def beside(every: int | None, seed: int) -> Iterator[Outcome]:
    """One thread trains while another watches and closes small models."""
    over = threading.Event()

    def training() -> None:
        model = made(Plain, seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scope = flowscope.watch(model, optimizer, every=every, config=QUIET) if every else None
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            optimizer.step()
        over.set()
        if scope is not None:
            scope.close()

    def watching() -> None:
        while not over.is_set():
            train(made(partial(Stack, depth=1), seed), 2)

    with listening() as said:
        raised = in_threads(training, watching)
    yield Outcome(BESIDE, "", not raised and not said.errors, f"{raised[:1]} {said.errors[:1]}")


# -- readers ----------------------------------------------------------------------------------------------------------


def readers(count: int, seed: int, *, closes: bool = False) -> Iterator[Outcome]:
    """Threads read all the time while one trains."""
    steps, over = 30, threading.Event()
    model, twin = made(Plain, seed), made(Plain, seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scope = flowscope.watch(model, optimizer, every=1, config=QUIET)

    def read() -> None:
        while not over.is_set():
            scope.records, scope.alerts, scope.summary(), scope.state_dict()

    def training() -> None:
        try:
            for step in range(steps):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step()
                scope.step(loss=loss)
            if closes:
                scope.close()
        finally:
            over.set()

    with listening() as said:
        raised = in_threads(training, *[read] * count)
        whole = [record.step for record in scope.records] == [*range(steps)]
        scope.close()
    lone = train(twin, steps)[1]
    equal = same([t for t in lone[steps:] if t.dim()], [t for t in left_behind(model, optimizer, [])[:-2] if t.dim()])
    note = f"{raised[:1]} {said.errors[:1]} records whole {whole}, training equal {equal}"
    yield Outcome(READERS, "", not raised and not said.errors and whole and equal, note)


# -- one model in several threads -------------------------------------------------------------------------------------


def hogwild(seed: int) -> Iterator[Outcome]:
    """Four optimizers of one model, each in a thread of its own."""
    model = made(Plain, seed)

    def training() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(6):
            optimizer.zero_grad()
            try:
                loss_of(model, step).backward()
            except RuntimeError as error:  # weights that another thread has changed meanwhile: so without us
                if "modified by an inplace operation" not in str(error):
                    raise
            optimizer.step()

    with listening() as said, flowscope.watch(model, None, every=1, config=QUIET):
        raised = in_threads(*[training] * 4)
    yield Outcome(SHARED, "", not raised and not said.errors, f"{raised[:2]} {said.errors[:2]}")


def replicas(seed: int) -> Iterator[Outcome]:
    """Three threads run forward and backward of one step."""
    model = made(Plain, seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with listening() as said, flowscope.watch(model, optimizer, every=1, config=QUIET) as scope:
        raised = []
        for step in range(4):
            optimizer.zero_grad()
            raised += in_threads(*(partial(_pass, model, 4 * step + k) for k in range(3)))
            optimizer.step()
        records = scope.records
    held = not raised and not said.errors and [r.step for r in records] == [0, 1, 2, 3]
    yield Outcome(SHARED, "", held, f"{raised[:2]} {said.errors[:2]} {len(records)} records")


def _pass(model: nn.Module, number: int) -> None:
    loss_of(model, number).backward()


def evaluates(seed: int) -> Iterator[Outcome]:
    """A second thread runs the model without gradient all the time: the records are the training's, or it is said."""
    model, lone, over = made(Plain, seed), train(made(Plain, seed), 20), threading.Event()
    joined: list[Trained] = []

    def evaluating() -> None:
        with torch.no_grad():
            while not over.is_set():
                loss_of(model, 99)

    def training() -> None:
        try:
            joined.append(train(model, 20))
        finally:
            over.set()

    with listening() as said:
        raised = in_threads(training, evaluating)
    wrong = [*differences(lone, joined[0])] if joined else []
    told = any("several threads" in line for line in said.lines)
    held = not raised and not said.errors and (told or not wrong)
    yield Outcome(SHARED, "", held, f"{raised[:1]} {wrong[:3]} {said.errors[:1]}")


def closes(seed: int) -> Iterator[Outcome]:
    """Another thread closes the scope at a moment of its own."""
    raised: list[BaseException] = []
    with listening() as said:
        for turn in range(8):
            model = made(Plain, seed)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            scope = flowscope.watch(model, optimizer, every=1, config=QUIET)
            raised += in_threads(partial(_train_on, model, optimizer), partial(_close_after, scope, 0.004 * turn))
    yield Outcome(CLOSED, "", not raised and not said.errors, f"{raised[:1]} {said.errors[:1]}")


def _train_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def _close_after(scope: flowscope.Scope, seconds: float) -> None:
    time.sleep(seconds)
    scope.close()
