"""What the steps of a training are made of, for trials, where a trainer hands neither batches nor losses to callbacks.

What the model is called with is a batch; the gradient that comes to the loss it returns is the share of that loss in
what `backward` was called on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.errors import CannotJudgeError
from flowscope.faults import Faults
from flowscope.hooks.hooks import Hooks
from flowscope.integrations.model_loss import loss_in
from flowscope.model.hidden_state import is_compiling
from flowscope.torch_internals import begun_from, scale_of
from flowscope.trials.passing import Passing

OTHER = 1e-3
"""Where what backward was called on is off its share of the model's loss by more, the trainer adds something to it."""


class TriedSteps:
    """Listens to a model that returns its loss, and tells `passing` of its batches and steps.

    Args:
        model: like those of transformers; it is called with names.
        passing: what is told.
        scaler: the GradScaler that multiplies the loss; None where there is none.
    """

    PART = "the batches for check=True"

    def __init__(self, model: nn.Module, passing: Passing, scaler: Any = None) -> None:
        self._model, self._passing, self._scaler = model, passing, scaler
        self._begun: list[tuple[Tensor, Tensor, Tensor]] = []
        self._gradients: dict[str, Tensor] = {}
        self._hooks = Hooks(Faults())
        self._hooks.before(model, self.PART, self._called)
        self._hooks.after(model, self.PART, self._answered)

    def _called(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled() and not is_compiling():
            self._passing.saw(kwargs)

    def _answered(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        loss = None if is_compiling() else loss_in(output)
        if loss is not None and loss.requires_grad and model.training:
            self._hooks.on_gradient(loss, self.PART, partial(self._weighed, loss.detach()), "loss")

    def _weighed(self, own: Tensor, share: Tensor) -> None:
        roots = begun_from()
        if len(roots) == 1:
            self._begun.append((own, share.detach(), roots[0].detach()))
            if self._passing.last_step:
                self._hooks.after_backward(self.PART, self._keep_gradients)

    def _keep_gradients(self) -> None:
        # the trainer clips before it tells of the step
        named = self._model.named_parameters()
        self._gradients = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}

    def step_begins(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The optimizer is about to step."""
        begun, self._begun = self._begun, []
        gradients, self._gradients = self._gradients, {}
        if self._passing.last_step:
            scale = 1.0 if self._scaler is None else float(scale_of(self._scaler))
            numbers = [(float(own), float(share) / scale, float(root) / scale) for own, share, root in begun]
            if not numbers:
                self._passing.misses("the trainer computes a loss of its own from the model's outputs")
            self._passing.weigh([share for _, share, _ in numbers], [value for _, _, value in numbers])
            if any(abs(share * own - value) > OTHER * abs(value) for own, share, value in numbers):
                self._passing.misses("the trainer adds something to the model's own loss")
            gradients = {name: gradient / scale for name, gradient in gradients.items()}
        self._passing.step_begins(self._model, optimizers, gradients)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()


def own_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The loss that a model returns for its inputs.

    Raises:
        CannotJudgeError: it returns none.
    """
    loss = loss_in(model(**inputs))
    if loss is None:
        raise CannotJudgeError("the model returns no loss of its own")
    return loss
