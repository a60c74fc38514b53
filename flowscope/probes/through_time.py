"""The flow through time of fused recurrent layers: their steps are replayed from one call's input and gradients.

A fused nn.RNN, GRU or LSTM is one node of the graph, its hidden states are not tensors of the model. On the slow
schedule one training call is kept until the optimizer step and replayed cell by cell (`recurrent.replay_gradients`).

Axis letters: R layers x directions, T time steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowscope.discovery.plan import Flow, display_path
from flowscope.probes.canary import Canary
from flowscope.probes.hooks import Hooks, Switch, masked
from flowscope.probes.layout import is_compiling
from flowscope.probes.recurrent import Replay, replay_gradients


class TimeObserver:
    """One fused recurrent layer: what one call of it saw, and the replay at the end of the step."""

    def __init__(self, model: nn.Module, flow: Flow, switch: Switch, canary: Canary, hooks: Hooks) -> None:
        self.flow, self.path = flow, display_path(flow.outputs[0])
        self.part = f"flow {flow.name}"
        self._switch, self._canary, self._hooks = switch, canary, hooks
        module = model.get_submodule(flow.outputs[0])
        assert isinstance(module, nn.RNNBase)
        self._rnn = module
        self._layer = module
        self._call: tuple[Any, Any] | None = None
        self._gradients: dict[str, Tensor] = {}
        hooks.after(module, self.part, self._after)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._switch.paused or not torch.is_grad_enabled():
            return
        states, last = output
        x = states.data if isinstance(states, PackedSequence) else states
        if not x.requires_grad:
            return
        self._canary.count("forward", x)
        if is_compiling() or not (self._switch.sampling and self._switch.slow) or self._call is not None:
            return
        given = args[0] if args else kwargs["input"]
        # a step with a closure ends after its weights have changed
        self._layer = _with_own_weights(self._rnn) if self._switch.in_closure else self._rnn
        self._call = (_detached(given), _detached(args[1] if len(args) > 1 else kwargs.get("hx")))
        hidden, cell = last if isinstance(last, tuple) else (last, None)
        for name, tensor in (("output", x), ("hidden", hidden), ("cell", cell)):
            if tensor is not None:
                self._hooks.on_gradient(tensor, self.part, partial(self._keep, name), name)

    def _keep(self, name: str, gradient: Tensor) -> None:
        held = self._gradients.get(name)
        self._gradients[name] = gradient.clone() if held is None else held + gradient

    def replay(self) -> Replay | None:
        """Replay the call that was kept (before the weights change), and let go of it."""
        call, gradients = self._call, self._gradients
        self._call, self._gradients = None, {}
        if call is None or not gradients:
            return None
        with masked():
            return replay_gradients(
                self._layer, *call, gradients.get("output"), gradients.get("hidden"), gradients.get("cell")
            )

    def row_names(self) -> list[str]:
        """The flow names of the R rows: the layer's path where there is one, else `path.l0`, `path.l0_reverse`, ..."""
        directions = 2 if self._rnn.bidirectional else 1
        if self._rnn.num_layers * directions == 1:
            return [self.path]
        suffixes = ("", "_reverse")[:directions]
        return [f"{self.path}.l{layer}{suffix}" for layer in range(self._rnn.num_layers) for suffix in suffixes]

    def drop(self) -> None:
        """Let go of what was kept."""
        self._call, self._gradients = None, {}


def _with_own_weights(rnn: nn.RNNBase) -> nn.RNNBase:
    """A stand-in for the layer that keeps the weights of this moment (small, and on the slow schedule only)."""
    twin: nn.RNNBase = object.__new__(type(rnn))
    weights = {name: nn.Parameter(p.detach().clone(), False) for name, p in rnn._parameters.items() if p is not None}
    twin.__dict__.update({**rnn.__dict__, "_parameters": weights})
    return twin


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, PackedSequence):
        return value._replace(data=value.data.detach())
    return tuple(_detached(v) for v in value) if isinstance(value, tuple) else value
