"""The loss that a model is trained by, for trainers that hand none to their callbacks.

It is the model's own, or one made of its output: a trainer of policies or preferences (GRPO, DPO) computes it from the
logits. Then no gradient comes to what the model returned as its loss, and what `backward` was called on counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.faults import Faults
from flowscope.hooks.hooks import Hooks
from flowscope.model.hidden_state import floating_tensors, is_compiling
from flowscope.torch_internals import backward_under_way, begun_from, scale_of


class ModelLoss:
    """Adds up the losses of a step's micro-batches on the device, from `output.loss` (or `output[0]`) in training.

    Where that gets no gradient, what the backward passes began from, which trainers have divided by the number of
    micro-batches already. Compiled code shows the model's own alone.

    Under `torch.compile` too, without a graph break: the only effects of the hook are additions to a tensor made
    before. Attach before the first compiled call.

    Args:
        model: a model that returns its loss, like those of transformers.
        scaler: the GradScaler that multiplies the loss, None where there is none.

    Attributes:
        seen: whether there was a loss at all.
    """

    PART = "model loss"

    def __init__(self, model: nn.Module, scaler: Any = None) -> None:
        self.seen = False
        self._hooks = Hooks(Faults())
        # sum of the losses; how many of them were means over their own micro-batch
        self._sums = torch.zeros(2, device=next(model.parameters()).device)
        self._scaler = scaler
        self._own_pass = self._pass = -1
        self._of_trainer: list[Tensor] = []
        self._hooks.after(model, self.PART, self._observe)

    def _observe(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        loss = loss_in(output)
        if not is_compiling():
            self._await_backward(output, loss)
        if loss is None:
            return
        self.seen = True
        self._sums[0].add_(loss.detach().float().reshape(()))
        if kwargs.get("num_items_in_batch") is None:
            self._sums[1].add_(1.0)

    def _await_backward(self, output: Any, loss: Tensor | None) -> None:
        answer = next((x for x in floating_tensors(output) if x.requires_grad and x.dim()), None)
        if loss is not None and loss.requires_grad:
            self._hooks.on_gradient(loss, self.PART, self._own_arrived, "own")
        if answer is not None:
            self._hooks.on_gradient(answer, self.PART, self._arrived, "answer")

    def _own_arrived(self, gradient: Any) -> None:
        self._own_pass = backward_under_way()

    def _arrived(self, gradient: Any) -> None:
        """A backward pass has come to what the model answers, past its own loss where it began there."""
        if (under_way := backward_under_way()) in (self._own_pass, self._pass):
            return
        self._pass, roots = under_way, begun_from()
        if len(roots) == 1 and roots[0].numel() == 1:
            self.seen = True
            scale = 1.0 if self._scaler is None else scale_of(self._scaler)
            self._of_trainer.append(roots[0].detach().float().reshape(()) / scale)

    def take(self, share: float = 1.0) -> Tensor | None:
        """The loss of the step that ends now, None where the model returned none; never synchronises.

        Args:
            share: the number of processes among which transformers divided `num_items_in_batch`: each process's losses
                are then shares of the mean and not means.
        """
        if not self.seen:
            return None
        total, means = self._sums.clone()
        self._sums.zero_()
        of_trainer, self._of_trainer = self._of_trainer, []
        if of_trainer:
            return torch.stack(of_trainer).sum()
        return torch.where(means > 0, total / means.clamp(min=1.0), total * share)

    def close(self) -> None:
        """Remove the hook."""
        self._hooks.close()


def loss_in(output: Any) -> Tensor | None:
    """The loss among what a model returns: `output.loss`, else the first of a tuple; None where that is no number."""
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
