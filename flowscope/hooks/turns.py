"""How often optimizers have stepped: the clock of the steps tells it on every step, instruments ask."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

Heard = Callable[[Any, bool], object]


class Turns:
    """The steps of the model's optimizers since it is watched.

    Attributes:
        now: how often each optimizer, by its id, has stepped in the training step under way.
        foreign: how many steps optimizers have made that hold none of the model's parameters.
        others: those optimizers.
        leaf_loss: whether the loss given last was a leaf that asks for a gradient: it was made of numbers.
        heard: called with the optimizer when one begins a step (True) and when it has ended one (False).
        plain: whether each call of an optimizer was one step so far, outside of any backward.
    """

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.now: Counter[int] = Counter()
        self.foreign = 0
        self.others: weakref.WeakSet[Any] = weakref.WeakSet()
        self.leaf_loss, self.plain = False, True
        self.heard: Heard = lambda optimizer, begins: None

    def of(self, optimizer: Any) -> int:
        """How many steps it has made or begun."""
        return self._steps.get(optimizer, 0)

    def of_others(self, optimizer: Any) -> None:
        """An optimizer that holds none of the model's parameters has stepped."""
        self.foreign += 1
        self.others.add(optimizer)

    def begins(self, optimizer: Any, *, goes_on: bool = False) -> None:
        """One of the model's optimizers is about to step, or `goes_on` with further groups of its step before."""
        self._steps[optimizer] = self.of(optimizer) + (not goes_on)
        self.now[id(optimizer)] += not goes_on
        self.heard(optimizer, True)

    def made(self, optimizer: Any, steps: int) -> None:
        """It has made so many steps that nobody was told of."""
        if steps:
            self._steps[optimizer] = self.of(optimizer) + steps

    def ended(self, optimizer: Any) -> None:
        """It has stepped: one that was given a closure finds its gradients only now."""
        self.heard(optimizer, False)
