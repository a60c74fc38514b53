"""What is said of a loop in which no step ends, so that no record can come: with the first calls, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowscope.detectors import Finding
from flowscope.detectors.stepping import never_stepped
from flowscope.faults import LOGGER
from flowscope.hooks.turns import Turns
from flowscope.steps.optimizers import OwnOptimizers

if TYPE_CHECKING:
    from flowscope.steps.numbers import StepCount

CALLS = 3
"""So many calls of `scope.step` without a step of the optimizer are told of."""
FORWARDS = 16
"""So many forward passes in training without any step are told of."""
ACCUMULATED = 64
"""While gradients of one call grow on in the next, micro-batches are accumulated: so many may be."""


class Unstepped:
    """Counts the calls of `scope.step` until a step has ended.

    Args:
        own: the optimizers of the model.
        turns: how often others have stepped.
        some: a few of the model's parameters.
        tell: where the alert goes.
    """

    def __init__(
        self,
        own: OwnOptimizers,
        turns: Turns,
        some: Callable[[], Iterable[Tensor | None]],
        tell: Callable[[Finding], None],
    ) -> None:
        self._calls, self._forwards = 0, 0
        self._before = (-1, -1)
        """How many gradients were there, and how often they had been written to."""
        self._some: Callable[[], Iterable[Tensor | None]] = lambda: (*some(), *_firsts(own.known))
        self._tell = tell
        self._none: Callable[[], bool] = lambda: bool(own.known) and not turns.now
        self._others: Callable[[], int] = lambda: turns.foreign
        self.reason: Callable[[], str] = lambda: _reason(own.known, turns, ran=self._forwards > 0)
        """Why no step has ended."""

    def called(self) -> None:
        """`scope.step` was called, and no step had ended."""
        self._calls += 1
        gradients, grew = self._gradients()
        if self._calls == (ACCUMULATED if grew else CALLS):
            LOGGER.warning("flowscope: no record after %d calls of scope.step: %s", self._calls, self.reason())
        # a GradScaler that nobody knows of leaves out the first steps: asked once, as it waits for the device
        if self._calls == ACCUMULATED or (self._calls == CALLS and not grew and all(map(_finite, gradients))):
            self._alert()

    def forward(self, count: StepCount, begins: Callable[[], bool]) -> bool:
        """A forward in training begins, which `begins` tells; says what that says."""
        if not count.ended and not self._calls:
            self._forwards += 1
            if self._forwards == (ACCUMULATED if self._gradients()[1] else FORWARDS):
                LOGGER.warning("flowscope: no record after %d forward passes: %s", self._forwards, self.reason())
        return begins()

    def _gradients(self) -> tuple[list[Tensor], bool]:
        """A few gradients, and whether they have grown: accumulation adds in place, and a second loss adds others."""
        gradients = [p.grad for p in self._some() if p is not None and p.is_leaf and p.grad is not None]
        before, now = self._before, (len(gradients), sum(gradient._version for gradient in gradients))
        self._before = now
        return gradients, before[0] >= 0 and any(new > old for new, old in zip(now, before, strict=True))

    def _alert(self) -> None:
        if self._none():
            self._tell(never_stepped(self._calls, self.reason()))

    def close(self, *, forwards: int, ended: bool) -> None:
        """The scope is closed after so many training forwards; nothing of the training is kept alive."""
        told = self.reason()
        if not ended and (self._calls or forwards or self._others()):
            LOGGER.warning("flowscope: closed without a record: %s", told)
        if not ended and self._calls:
            self._alert()
        self._some, self.reason, self._none, self._others = tuple, lambda: told, lambda: False, lambda: 0


def _firsts(optimizers: Sequence[Any]) -> list[Tensor]:
    """The first parameter of each."""
    return [next(iter(group["params"])) for o in optimizers for group in o.param_groups[:1] if group["params"]]


def _finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())


def _reason(known: Sequence[Any], turns: Turns, *, ran: bool) -> str:
    if turns.foreign and not ran and not turns.now:
        return (
            f"this model never ran, while optimizers of others made {turns.foreign} steps: a trainer may have made it "
            "anew after watch. Call watch on the model that is trained"
        )
    if not known:
        return (
            "no optimizer of this model has stepped and scope.step() was not called, so that no step has ended. Where "
            "its optimizer is none of torch's, call scope.step() after each of its steps"
        )
    waits = ", ".join(type(optimizer).__name__ for optimizer in known if not turns.of(optimizer))
    told = f"the optimizer {waits} has not stepped" if waits else "the optimizer's step was begun and has not ended"
    if waits and turns.now:
        told = f"a step ends with the last of the {len(known)} optimizers, and {told}"
    others = f" (another model's made {turns.foreign} steps)" if turns.foreign else ""
    return f"{told}{others}, and nothing is recorded until it does: is optimizer.step() called, with its parentheses?"
