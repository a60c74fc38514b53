"""Gradients as backward left them, before clipping (or anything else) changes them.

They are read once, when a backward pass has ended: after DDP has averaged them, with accumulation after each
micro-batch, so that the last reading counts. What triggers the reading is a hook on a few parameters. One pass over the
gradients is only made where something was seen to change them lately; else it is enough that their version counters
stand where backward left them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.hooks.hooks import Hooks
from flowscope.model.hidden_state import is_compiling
from flowscope.model.parameters import ParameterList
from flowscope.sums.vector_norms import Number, norms
from flowscope.torch_internals import backward_under_way

SMALL = 1 << 16
"""Parameters up to this size are small: reading one costs nothing that would show."""
FIRST_READS = 2
"""So many first samples are read whether or not something changes the gradients."""
READS_AFTER_CHANGE = 10
VERSIONS = 32
"""The version counters of so many gradients, evenly spaced, tell whether something changes them."""
SAME = 1e-6
"""Relative difference of two norms of the same values: summed in another order at most."""


class RawGradients:
    """The norms of the gradients at the end of backward, by the parameter's number.

    Args:
        parameters: of the model.
        hooks: where the triggers are registered.
    """

    FUSE = "raw gradients"

    def __init__(self, parameters: ParameterList, hooks: Hooks) -> None:
        self._parameters, self._switch, self._hooks = parameters, hooks.switch, hooks
        self._triggers: list[tuple[int, Tensor, Any]] = []
        self._task = -1
        self._reads = FIRST_READS
        self._left: dict[int, tuple[int, int]] = {}
        self.norms: dict[int, Number] = {}
        self.untouched: dict[int, float] = {}
        self.scale: Tensor | float | None = None
        """What the loss was multiplied by in this step's backward, None where nothing is known of a scaler."""

    def follow(self, now: Sequence[Tensor | None]) -> None:
        """Put the triggers on the parameters as they are now (they may have been replaced, frozen or unfrozen)."""
        if self._triggers and all(p is now[i] and p.requires_grad for i, p, _ in self._triggers):
            return
        for *_, handle in self._triggers:
            self._hooks.remove(handle)
        trainable = [(i, p) for i, p in enumerate(now) if p is not None and p.requires_grad]
        # the first parameter is most often the last to get its gradient
        chosen = dict([*trainable[:1], *spread(trainable)])
        accumulated = self._hooks.after_accumulation
        self._triggers = [(i, p, accumulated(p, self.FUSE, self._arrived, self._switch)) for i, p in chosen.items()]

    def _arrived(self, parameter: Tensor) -> None:
        task = backward_under_way()
        if self._switch.paused or is_compiling() or task in (-1, self._task):
            return
        self._task = task
        self._hooks.after_backward(self.FUSE, self._read)

    @torch.no_grad()
    def _read(self) -> None:
        if self._switch.paused or not self._switch.sampling:
            return
        reading = self._reads > 0 or self._switch.slow
        now = self._parameters.follow() if reading else []
        self._left = {
            i: (id(gradient), gradient._version)
            for i, p in self._parameters.some(VERSIONS).items()
            if p is not None and (gradient := p.grad) is not None
        }
        self._switch.left_gradients = bool(self._left)
        self.norms = {}
        if reading:
            found = {i: p.grad for i, p in enumerate(now) if p is not None and p.grad is not None}
            plain = {i: entries(g) for i, g in found.items() if not hasattr(g, "to_local")}  # no collective here
            self.norms = dict(zip(plain, norms(list(plain.values())), strict=True))

    def compare(self, gradients: Mapping[int, Tensor]) -> None:
        """Note whether gradients, as the optimizer is about to use them, are still what backward left."""
        same = [left == (id(g), g._version) for i, left in self._left.items() if (g := gradients.get(i)) is not None]
        if same:
            self.untouched |= dict.fromkeys(gradients, float(all(same)))

    def judge(self, raw: NDArray[np.float64], used: NDArray[np.float64]) -> None:
        """Read on while the gradients at the end of backward are not those used, else soon no more."""
        seen = used[np.isfinite(used)]
        with np.errstate(all="ignore"):
            changed = bool((~(np.abs(raw[np.isfinite(used)] - seen) <= SAME * seen)).any())
        self._reads = READS_AFTER_CHANGE if changed else max(0, self._reads - 1)

    def drop(self) -> None:
        """Forget what was read."""
        self._left, self.norms, self.untouched, self.scale = {}, {}, {}, None
        self._switch.left_gradients = False


def spread(parameters: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """The first, the middle and the last of the small parameters, with their numbers."""
    small = [(i, p) for i, p in parameters if 0 < p.numel() <= SMALL]
    return [small[i] for i in sorted({0, len(small) // 2, len(small) - 1})] if small else []


def entries(gradient: Tensor) -> Tensor:
    """The entries of a gradient, those that are stored of a sparse one."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
