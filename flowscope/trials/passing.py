"""The first batches of a training, copied as a trainer passes them on, and the trials made on them and on a copy of it.

A copy, for the model itself may be watched: its hooks would count our passes. Loader and random state are not touched.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.model.nested import map_tensors, nested_tensors
from flowscope.scripts import first_rank
from flowscope.terminal import tell
from flowscope.trials.bench import Bench, Loss, Step
from flowscope.trials.findings import CheckReport
from flowscope.trials.sitting import BATCHES, chosen, run_trials

STEPS = 2
"""The step that is judged is the second or a later one: what an earlier one left in the gradients shows then."""
LARGEST = 2**28
"""Bytes of a step's micro-batches; of a step of more, they are not copied."""


@dataclass(frozen=True)
class Passed:
    """A batch as it passed.

    Attributes:
        batch: a copy.
        chance: torch's random state (CPU) when its forward pass began.
        share: what backward was called on, as a multiple of the loss that `Passing` makes of the batch.
        loss: what backward was called on, without a GradScaler's scale.
    """

    batch: Any
    chance: Tensor
    share: float = 1.0
    loss: float = math.nan

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the batch."""
        return [*nested_tensors(self.batch)]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Passed:
        """The same with other tensors."""
        return replace(self, batch=map_tensors(self.batch, change))


class Passing:
    """Keeps copies of batches until there are three, and of a whole step: its micro-batches, and the model before it.

    Args:
        loss: of a model and a batch, as in `flowscope.check`.
        ready: called with the copy of the model, before it is tried.
    """

    def __init__(self, loss: Loss, ready: Callable[[nn.Module], object] = lambda model: None) -> None:
        self._loss, self._ready = loss, ready
        self._batches: list[Passed] = []
        self._micro: list[Passed] = []
        self._missed = ""
        self._steps = 0
        self._bench: Bench | None = None
        self._given_up = False

    @property
    def full(self) -> bool:
        """Whether there is as much as suffices, so that the trials can be made."""
        return self._bench is not None or self._given_up

    @property
    def last_step(self) -> bool:
        """Whether the step under way is the one that is judged."""
        return not self.full and len(self._batches) >= BATCHES and self._steps + 1 >= STEPS

    def saw(self, batch: Any) -> None:
        """Copy a batch whose forward pass begins, unless there are enough."""
        if self.full:
            return
        passed = Passed(map_tensors(batch, _copied), torch.get_rng_state())
        if len(self._batches) < BATCHES:
            self._batches.append(passed)
        self._micro.append(passed)
        if sum(x.numel() * x.element_size() for one in self._micro for x in one.tensors) > LARGEST:
            self._micro.clear()
            self.misses("the batches of a step are too large to be copied")

    def weigh(self, shares: Sequence[float], values: Sequence[float]) -> None:
        """Say of each micro-batch of the step under way what backward was called on, and which share of its loss it is.

        Args:
            shares: of the losses of the micro-batches, in their order.
            values: what backward was called on, without a GradScaler's scale.
        """
        if len(shares) != len(self._micro):
            self.misses("backward was not called once on the loss of each batch")
            return
        told = zip(self._micro, shares, values, strict=True)
        self._micro = [replace(one, share=share, loss=value) for one, share, value in told]

    def misses(self, reason: str) -> None:
        """The step under way is not seen as a whole."""
        self._missed = self._missed or reason

    def step_begins(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], gradients: Mapping[str, Tensor]
    ) -> None:
        """The optimizer is about to step; `gradients` by parameter name are what the micro-batches gave together."""
        if self.last_step:
            step = Step(self._micro, {name: gradient.detach().clone() for name, gradient in gradients.items()})
            self._copy(model, optimizers, None if self._missed else step)
        self._steps += 1
        self._micro, self._missed = [], ""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> CheckReport | None:
        """All trials, and the report printed by the first rank; None where no batch passed or the model has no copy."""
        if not self._batches:
            return None
        if not self.full:
            self._missed = f"a step is judged from the {STEPS}nd and the {BATCHES}rd batch on, and the training is over"
            self._copy(model, optimizers, None)
        if self._bench is None:
            return None
        report = run_trials(self._bench, chosen())
        if first_rank():
            print(report)
        return report

    def _copy(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: Step | None) -> None:
        try:
            twin, its_optimizers = copy.deepcopy((model, list(optimizers)))
        except Exception as error:
            tell(f"flowscope: check=True: the model cannot be copied: {type(error).__name__}: {error}")
            self._given_up = True
            return
        self._ready(twin)
        self._bench = Bench(twin, self._batches, self._loss_of, its_optimizers, step, not_seen=self._missed)
        if step is not None:
            self._bench.compare(step.batches[0])

    def _loss_of(self, model: nn.Module, one: Passed) -> Tensor:
        loss = self._loss(model, one.batch)
        return loss if one.share == 1 else loss * one.share


def _copied(x: Tensor) -> Tensor:
    return x.detach().clone()
