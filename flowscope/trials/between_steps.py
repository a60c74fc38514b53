"""What a script's weights do outside of its optimizers' steps, and what an optimizer knew before the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

ENTRIES = 4096
"""At most so many entries of a parameter are looked at, evenly spaced."""


class BetweenSteps:
    """Keeps some entries of each parameter around a step, and compares them when the next one begins.

    Attributes:
        kept: by the id of each parameter that something else changed: how much of the step was left then,
            |w before the next step - w before it| / |w after it - w before it|.
    """

    def __init__(self) -> None:
        self.kept: dict[int, float] = {}
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}

    def begins(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        for p in _parameters(optimizer):
            now, after = _entries(p), self._after.pop(id(p), None)
            if after is not None and not torch.equal(now, after):
                before = self._before[id(p)]
                self.kept[id(p)] = float((now - before).norm() / ((after - before).norm() + 1e-30))
            self._before[id(p)] = now

    def ended(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        self._after.update({id(p): _entries(p) for p in _parameters(optimizer) if id(p) in self._before})


def steps_before(optimizer: Any) -> tuple[int, set[int]]:
    """How many steps an optimizer's state tells of (0: it does not), and the ids of the parameters it has state of."""
    held = {id(p): values for p, values in optimizer.state.items() if isinstance(values, dict) and values}
    return max((int(values.get("step", 0)) for values in held.values()), default=0), set(held)


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if type(p.data) is Tensor and p.numel())


def _entries(p: Tensor) -> Tensor:
    flat = p.detach().reshape(-1)
    return flat[:: -(-flat.numel() // ENTRIES)].double()
