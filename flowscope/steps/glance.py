"""What a step shows unsampled, for next to nothing: its loss, its rate, a gradient, whether a weight was written to."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flowscope.model.parameters import ParameterList
from flowscope.model.tracing import version

LOOKED_AT = 8
"""So many parameters, evenly spaced, tell whether an optimizer writes to the weights."""
ENOUGH = 10
"""So many losses show how far they scatter."""
BEYOND = 2.0
"""A loss above the largest of those before by this many times its distance from their middle jumps."""
LEAST_RISE = 0.1
"""However little they scatter, by this share of their middle."""
ENTRIES = 1024
"""So many of a gradient are asked whether they are finite: what is not, in backward, is so in all that lies before."""
RATE_FACTOR = 4.0
"""A rate that changes by this factor within some steps is no schedule's slope."""


class Glance:
    """What the steps between two samples are compared with.

    Args:
        parameters: of the model.
        losses: of the steps before, the newest last.
    """

    def __init__(self, parameters: ParameterList, losses: Sequence[float]) -> None:
        self._parameters, self._losses = parameters, losses
        self._limit = math.inf
        self._some: list[Tensor] = []
        self._optimizer: Callable[[], Any] = lambda: None
        self._written, self._writes = 0, False
        """How often the parameters were written to, and whether that ever grew."""
        self._rate = 0.0

    def begin(self, optimizer: Any) -> None:
        """A step was sampled, and its optimizer is the one whose steps are seen from here on."""
        self._limit = math.inf
        if len(self._losses) >= ENOUGH:
            middle, top = median(self._losses), max(self._losses)
            self._limit = top + max(BEYOND * (top - middle), LEAST_RISE * abs(middle))
        held = [p for p in self._parameters.some(LOOKED_AT).values() if p is not None and p.requires_grad]
        if self._optimizer() is not optimizer or not all(map(operator.is_, held, self._some)):
            self._optimizer = weakref.ref(optimizer)
            self._writes, self._rate = False, rate_of(optimizer)
        self._some = held

    def _count(self) -> int:
        return sum(map(version, self._some))

    def is_unusual(self, loss: float) -> bool:
        """Whether a loss is not finite, or far above those before."""
        return loss - loss != 0.0 or loss > self._limit

    def bad_gradient(self, optimizer: Any) -> Tensor | None:
        """Entries of the gradient nearest to the input, if not all are finite.

        On a device nobody waits to know, and what a GradScaler has found and leaves out is no news.
        """
        gradient = next((p.grad for p in self._some if p.grad is not None), None)
        if gradient is None or not gradient.is_cpu or gradient.layout is not torch.strided or gradient.is_complex():
            return None
        if not gradient.numel() or getattr(optimizer, "found_inf", None) is not None:
            return None
        entries = gradient.detach().flatten()[:ENTRIES]
        return None if math.isfinite(entries.abs().max().item()) else entries

    def has_changed(self, optimizer: Any) -> bool:
        """Whether the rate has jumped, or nothing was written to the weights since the last look."""
        written, rate = self._count(), rate_of(optimizer)
        grows, jumps = written > self._written, max(rate, self._rate) > RATE_FACTOR * min(rate, self._rate)
        stays = self._writes and not grows
        # where the optimizer goes past the counters (`p.data`), they never grow
        self._written, self._rate, self._writes = written, rate, self._writes or grows
        return jumps or stays


def rate_of(optimizer: Any) -> float:
    """The learning rate of an optimizer's first group; 0 where it is no number of Python's."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else None
    return rate if isinstance(rate, float) else 0.0
