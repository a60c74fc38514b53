"""What is measured of a training while it runs: losses, the time of its steps, what a step keeps for backward."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.comparing.outcomes import NAN, Outcome

WARM_UP = 0.1
"""So large a share of the steps is not timed: the first ones allocate."""


class Meter:
    """Takes the losses and times of one training.

    Attributes:
        label: of the candidate.
        seed: of the training.
        losses: so far.
        saved: bytes that the first step keeps for backward.
        progress: called as `progress(step, loss)`.
    """

    def __init__(self, label: str, seed: int, progress: Callable[[int, float], None]) -> None:
        self.label, self.seed, self.progress = label, seed, progress
        self.losses: list[float] = []
        self.saved = NAN
        self._ends: list[float] = [time.perf_counter()]

    def step(self, loss: float) -> None:
        """Note a step that ended; reading the loss has waited for the device."""
        self._ends.append(time.perf_counter())
        self.losses.append(loss)
        self.progress(len(self.losses), loss)

    @contextlib.contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Count what is kept for backward inside, in the first step."""
        if self.losses:
            yield
            return
        own = {storage_of(p)[0] for p in model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            place, size = storage_of(tensor)
            if place not in own:
                kept[place] = size
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.saved = float(sum(kept.values()))

    def outcome(self, model: nn.Module | None, gradient_product: float = NAN, error: str = "") -> Outcome:
        """Return what the training came to."""
        times = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        timed = times[max(1, round(WARM_UP * len(times))) :] or times
        return Outcome(
            self.label,
            self.seed,
            tuple(self.losses),
            gradient_product,
            statistics.median(timed) if timed else NAN,
            self.saved,
            0 if model is None else sum(p.numel() for p in model.parameters()),
            error,
        )


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's memory is and how large; a subclass without memory of its own counts as nothing."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return 0, 0
    return storage.data_ptr(), storage.nbytes()


def product_of(scope: Any) -> float:
    """Return the share of the last block's gradient that arrives at the first, as last recorded."""
    for record in reversed(scope.records):
        seen = [float(x) for x in record.metrics.get("gradient_product", ()) if math.isfinite(x)]
        if seen:  # a model's input needs no gradient: then the first block's output is the first
            return seen[0]
    return NAN
