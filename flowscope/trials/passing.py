"""The first batches of a training, copied as a trainer passes them on, and the trials made on them and on a copy of it.

A copy, for the model itself may be watched: its hooks would count our passes. Loader and random state are not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.model.nested import map_tensors
from flowscope.scripts import first_rank
from flowscope.terminal import tell
from flowscope.trials.bench import Bench, Loss
from flowscope.trials.findings import CheckReport
from flowscope.trials.sitting import BATCHES, chosen, run_trials


class Passing:
    """Keeps copies of batches until there are three.

    Args:
        loss: of a model and a batch, as in `flowscope.check`.
        ready: called with the copy of the model, before it is tried.
    """

    def __init__(self, loss: Loss, ready: Callable[[nn.Module], object] = lambda model: None) -> None:
        self._loss, self._ready = loss, ready
        self._batches: list[Any] = []

    @property
    def full(self) -> bool:
        """Whether there are as many as suffice."""
        return len(self._batches) >= BATCHES

    def saw(self, batch: Any) -> None:
        """Copy a batch, unless there are enough."""
        if not self.full:
            self._batches.append(map_tensors(batch, _copied))

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> CheckReport | None:
        """All trials, and the report printed by the first rank; None where no batch passed or the model has no copy."""
        if not self._batches:
            return None
        try:
            twin, its_optimizers = copy.deepcopy((model, list(optimizers)))
        except Exception as error:
            tell(f"flowscope: check=True: the model cannot be copied: {type(error).__name__}: {error}")
            return None
        self._ready(twin)
        report = run_trials(Bench(twin, self._batches, self._loss, its_optimizers), chosen())
        if first_rank():
            print(report)
        return report


def _copied(x: Tensor) -> Tensor:
    return x.detach().clone()
