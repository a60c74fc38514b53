"""Hidden states a model returns while streams travel between its blocks: reduced to what the plain model has."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class ReduceHiddenStates:
    """A forward hook on models with a `config`: the mean over the streams [B, T..., S, D] of returned hidden states.

    A class, not a closure, so that a wrapped model can be pickled.
    """

    def __init__(self, dims: int) -> None:
        self.dims = dims  # axes of a hidden state without streams

    @classmethod
    def attach(cls, model: nn.Module, dims: set[int]) -> None:
        """Hook the model and the models inside it; nothing is hooked where hidden states differ in their axes."""
        if len(dims) != 1:
            return
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module, "dummy_inputs"):
                module.register_forward_hook(cls(*dims))

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reduce the hidden states in a model's output."""
        if isinstance(output, dict):
            for key in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
                if isinstance(output.get(key), tuple):
                    output[key] = tuple(self.reduce(state) for state in output[key])
        return output

    def reduce(self, state: Any) -> Any:
        """Return the mean over the streams, where there are any."""
        if isinstance(state, Tensor) and state.dim() == self.dims + 1:
            return state.mean(-2)
        return state
