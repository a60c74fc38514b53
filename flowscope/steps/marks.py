"""Whether `scope.step` ends a training step where no optimizer of the model is known: or is it one micro-batch of it?

A loop may call it after each micro-batch, and its optimizer is found only when it first steps. So the first call waits
until the next forward shows what became of its gradients: where they were used, cleared or made anew a step has ended,
and every call ends one from then on; where they are there as they were, and grow, micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from flowscope.hooks.turns import Turns
from flowscope.model.tracing import version


class _Look(NamedTuple):
    """A few parameters at one moment: how often they were written to, and which gradients they hold, likewise."""

    written: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    foreign: int

    def updated_since(self, before: _Look) -> bool:
        """Whether something wrote to the weights, or an optimizer of other tensors stepped."""
        return self.written != before.written or self.foreign != before.foreign

    def adds_to(self, before: _Look) -> bool:
        """Whether one backward was added to the gradients held before."""
        return self.gradients == tuple((which, times + 1) for which, times in before.gradients)


class Marks:
    """What `scope.step` means in a loop without a known optimizer.

    Args:
        turns: how often optimizers of others have stepped.
        some: a few of the model's parameters.
    """

    def __init__(self, turns: Turns, some: Callable[[], Iterable[Tensor | None]]) -> None:
        self._turns, self._some = turns, some
        self._every = False
        self._last = self._look()
        self.waiting = False
        """Whether the last call may have ended a step."""

    def marked(self) -> bool:
        """`scope.step` is called; whether a step ends here, as far as is known."""
        before, now = self._last, self._look()
        self._last = now
        if not now.gradients or self._cleared():  # nothing adds up
            return True
        self._every = self._every or now.updated_since(before) or (self.waiting and not now.adds_to(before))
        self.waiting = not self._every
        return self._every

    def forward(self) -> bool:
        """A forward begins; whether the last call had ended a step."""
        if not self.waiting:
            return False
        now = self._look()
        self._every = now.updated_since(self._last) or now.gradients != self._last.gradients
        self.waiting = not self._every
        return self._every

    def settle(self) -> bool:
        """Nothing more can tell; whether the last call is to end a step."""
        waited, self.waiting = self.waiting, False
        return waited

    def _cleared(self) -> bool:
        """Whether the gradients are zero: they are only asked where nobody waits for a device."""
        held = [p.grad for p in self._some() if p is not None and p.is_leaf and p.grad is not None]
        return all(g.is_cpu and g.layout == torch.strided for g in held) and not any(bool(g.any()) for g in held)

    def _look(self) -> _Look:
        some = [p for p in self._some() if p is not None and p.is_leaf]
        gradients = [p.grad for p in some if p.grad is not None]
        held = tuple((id(gradient), version(gradient)) for gradient in gradients)
        return _Look(tuple(map(version, some)), held, self._turns.foreign)
