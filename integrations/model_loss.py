"""The loss that a model returns itself, for trainers that hand no loss to their callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.faults import Faults
from flowscope.hooks.hooks import Hooks


class ModelLoss:
    """Adds up the losses of a step's micro-batches on the device, from `output.loss` (or `output[0]`) in training.

    Under `torch.compile` too, without a graph break: the only effects of the hook are additions to a tensor made
    before. Attach before the first compiled call.

    Args:
        model: a model that returns its loss, like those of transformers.

    Attributes:
        seen: whether the model returned a loss at all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seen = False
        self._hooks = Hooks(Faults())
        # sum of the losses; how many of them were means over their own micro-batch
        self._sums = torch.zeros(2, device=next(model.parameters()).device)
        self._hooks.after(model, "model loss", self._observe)

    def _observe(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        self.seen = True
        self._sums[0].add_(loss.detach().float().reshape(()))
        if kwargs.get("num_items_in_batch") is None:
            self._sums[1].add_(1.0)

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
        return torch.where(means > 0, total / means.clamp(min=1.0), total * share)

    def close(self) -> None:
        """Remove the hook."""
        self._hooks.close()
