"""Gradients of earlier steps that are still in `.grad` when a step's own begin to arrive: zero_grad was not called.

A hook on a few small parameters looks at `.grad` just before backward adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.raw_gradients import entries, spread
from flowscope.model.hidden_state import is_compiling
from flowscope.sums.vector_norms import Number, norms


class CarriedGradients:
    """The least norm that `.grad` had before a backward of this step added to it, by the parameter's number.

    Least, because a parameter may get its first gradient from a loss that is not its own (a discriminator from the
    generator's) and be set to zero only then.
    """

    FUSE = "carried gradients"

    def __init__(self, hooks: Hooks) -> None:
        self._switch, self._hooks = hooks.switch, hooks
        self._held: list[tuple[int, Tensor, tuple[Any, Any]]] = []
        self._waiting: dict[int, Number] = {}
        self.norms: dict[int, Number] = {}
        self._left: dict[int, int] = {}
        """How often the gradients were written to when the last sampled step ended, by the parameter's number."""

    def follow(self, now: Sequence[Tensor | None]) -> None:
        """Put the hooks on the parameters as they are now (they may have been replaced, frozen or unfrozen)."""
        if self._held and all(p is now[i] and p.requires_grad for i, p, _ in self._held):
            return
        for *_, handles in self._held:
            for handle in handles:
                self._hooks.remove(handle)
        trainable = [(i, p) for i, p in enumerate(now) if p is not None and p.requires_grad]
        self._held = [(i, p, self._hooked(i, p)) for i, p in spread(trainable) if not hasattr(p, "to_local")]

    def _hooked(self, number: int, parameter: Tensor) -> tuple[Any, Any]:
        arrives, added = partial(self._arrives, number, parameter), partial(self._added, number)
        return (
            self._hooks.before_accumulation(parameter, self.FUSE, arrives, self._switch),
            self._hooks.after_accumulation(parameter, self.FUSE, added, self._switch),
        )

    def _arrives(self, number: int, parameter: Tensor, gradient: Tensor) -> None:
        """A gradient was made; whether it is added to `.grad` is not said (`torch.autograd.grad` only returns it)."""
        known = self.norms.get(number)
        if self._switch.paused or is_compiling() or (isinstance(known, float) and known == 0.0):
            return
        held = parameter.grad
        if held is None or self._by_hand(number, held):
            self._waiting[number] = 0.0
            return
        with torch.no_grad():
            self._waiting[number] = norms([entries(held)])[0]

    def _by_hand(self, number: int, held: Tensor) -> bool:
        """Whether what is there was put there since: a tensor that was written to less often than the one before."""
        return number not in self.norms and held._version < self._left.get(number, 0)

    def _added(self, number: int, parameter: Tensor) -> None:
        if (found := self._waiting.pop(number, None)) is None or self._switch.paused:
            return
        known = self.norms.get(number, found)
        if isinstance(found, Tensor) and isinstance(known, Tensor):
            self.norms[number] = torch.minimum(known, found)
        elif isinstance(found, Tensor) or isinstance(known, Tensor):
            self.norms[number] = 0.0  # of the two only "no gradient held" is a number already
        else:
            self.norms[number] = min(known, found)

    def drop(self) -> None:
        """Forget what was found."""
        self._left = {i: p.grad._version for i, p, _ in self._held if p.grad is not None}
        self._waiting, self.norms = {}, {}
