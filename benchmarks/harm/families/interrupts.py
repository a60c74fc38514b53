"""Ctrl-C at any moment reaches the loop, and a loop that goes on has whole records, right numbers and no trace of it.

Signals come at drawn moments of the process's own time, many in one process.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import flowscope
from benchmarks.harm.attack import Outcome, Plan
from benchmarks.harm.programs import QUIET, Mixed, hooks_of, listening, loss_of
from flowscope.hooks.hooks import MASK
from flowscope.sinks import read_run

INTERRUPTS, IMPORTS = 400, 400
LONGEST = 0.06
"""Seconds of the process's own time until a signal comes."""

REACHES = "interrupts: it reaches the loop"
DRESSED = "interrupts: it reaches the loop from the making of a class, which Python 3.11 turns into an error"
GOES_ON = "interrupts: the loop goes on with whole records"
RIGHT = "interrupts: the numbers afterwards are those of an untouched scope"
NO_TRACE = "interrupts: nothing of it stays"
FIRST = {REACHES: (4000, 3999), GOES_ON: (120, 120), RIGHT: (120, 120), NO_TRACE: (120, 120), DRESSED: (100, 78)}


class Timer:
    """Interrupts what runs within, after so much of the process's own time; counts how often the handler ran."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.struck = 0

    def _strike(self, *_: object) -> None:
        self.struck += 1
        raise KeyboardInterrupt

    def __enter__(self) -> Timer:
        self._before = signal.signal(signal.SIGVTALRM, self._strike)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, self._before)


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Interrupts while training, then while a sink makes classes."""
    for number in range(plan.count(INTERRUPTS // 10)):
        yield from _ten(plan, number)
    for number in range(plan.count(IMPORTS // 20)):
        yield from _while_classes_are_made(plan, number)


def _step(model: nn.Module, optimizer: Any, number: int, scope: flowscope.Scope | None) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, number % 5)
    loss.backward()
    optimizer.step()
    if scope is not None:
        scope.step(loss=loss)


def _until_interrupted(timer: Timer, step: Any, number: int) -> tuple[bool, int]:
    """Whether the interrupt came out of the loop that it fell into, and the number of the step it fell into."""
    try:
        with timer:
            while not timer.struck:
                step(number)
                number += 1
    except KeyboardInterrupt:
        return True, number
    finally:
        torch.set_grad_enabled(True)  # an interrupt inside of no_grad() leaves it off, with and without flowscope
    return False, number


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = Mixed().eval()  # no dropout: the same batch has the same numbers
    return model, torch.optim.SGD(model.parameters(), 0.0)


def _ten(plan: Plan, number: int) -> Iterator[Outcome]:
    """Ten interrupts of one scope; then what stands is looked at."""
    model, optimizer = _made()
    case, before = f"scope {number}", hooks_of(model, optimizer)
    with tempfile.TemporaryDirectory() as folder, listening() as said:
        scope = flowscope.watch(model, optimizer, log_dir=folder, every=1, config=QUIET)

        def step(step: int) -> None:
            _step(model, optimizer, step, scope)

        at = 0
        for _ in range(10):
            reached, at = _until_interrupted(Timer(1e-4 + LONGEST * plan.random.random()), step, at)
            yield Outcome(REACHES, case, reached, f"lost in step {at}")
        for last in range(at, at + 5):
            step(last)
        records = scope.records
        numbers = [record.step for record in records]
        # a step that was interrupted may have no record, or may have ended already
        whole = numbers == sorted(set(numbers)) and len(numbers) >= at + 5 - 10 and not said.errors
        yield Outcome(GOES_ON, case, whole, f"{len(numbers)} of {at + 5}, {said.errors[:2]}")
        yield Outcome(RIGHT, case, *_right(records[-1], at + 4))
        scope.close()
        left = hooks_of(model, optimizer) - before
        in_file = len(read_run(folder).records)
        note = f"{left} hooks, mask {MASK.on}, {in_file} of {len(numbers)} in the file"
        # an interrupt may fall between a record and its line
        yield Outcome(NO_TRACE, case, not left and not MASK.on and in_file >= len(numbers) - 10, note)


def _right(record: flowscope.Record, step: int) -> tuple[bool, str]:
    model, optimizer = _made()
    with flowscope.watch(model, optimizer, every=1, config=QUIET) as scope:
        _step(model, optimizer, step, scope)
        untouched = scope.records[-1]
    names = ("grad_norm", "gradient_product", "param_grad_norm", "act_rms")
    wrong = [
        name for name in names
        if name not in record.metrics
        or not np.allclose(record.metrics[name], untouched.metrics[name], rtol=1e-3, atol=1e-7, equal_nan=True)
    ]  # fmt: skip
    return not wrong, str(wrong)


class Importing:
    """A sink that makes classes with `cached_property`, as the first import of an image format's module does."""

    def write(self, event: object) -> None:
        """Make some."""
        for _ in range(100):
            type("Made", (), {f"kept{k}": functools.cached_property(str) for k in range(30)})

    def close(self) -> None:
        """Nothing to do."""


def _while_classes_are_made(plan: Plan, number: int) -> Iterator[Outcome]:
    model, optimizer = _made()
    with listening() as said, contextlib.ExitStack() as stack:
        scope = stack.enter_context(flowscope.watch(model, optimizer, every=1, sinks=[Importing()], config=QUIET))
        at = 0
        for _ in range(20):
            timer = Timer(1e-4 + LONGEST * plan.random.random())
            reached, at = _until_interrupted(timer, lambda step: _step(model, optimizer, step, scope), at)
            yield Outcome(
                DRESSED, f"scope {number}", reached and not said.errors, f"lost in step {at}: {said.errors[:1]}"
            )
