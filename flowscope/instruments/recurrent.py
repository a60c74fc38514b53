"""The flow through time of fused recurrent layers: their steps are replayed from one call's input and gradients.

A fused nn.RNN, GRU or LSTM is one node of the graph, its hidden states are not tensors of the model. On the slow
schedule one training call is kept until the optimizer step and replayed cell by cell (`recurrent.replay_gradients`).

Axis letters: R layers x directions, T time steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks, masked
from flowscope.instruments.fused_replay import Replay, replay_gradients
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.model.hidden_state import is_compiling
from flowscope.model.nested import map_tensors
from flowscope.model.plan import Flow, display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.records import FlowLayout
from flowscope.sums import point_metrics, site_metrics
from flowscope.sums.statistics import BACKWARDS, COLUMNS, ELEMENTS, GRAD_SQUARE, SQUARE

KEEPING = {"LSTM": "forget", "GRU": "update"}
"""The gate of a recurrent layer that keeps its state."""


class RecurrentFlow(Instrument):
    """One fused recurrent layer: what one call of it saw, and the replay before the weights change."""

    name = "recurrent_flow"
    families = ("flow", "depth")
    counts_canary = True

    def __init__(self, flow: Flow, module: nn.RNNBase) -> None:
        self._flow, self.fuse = flow, f"flow {flow.name}"
        self._rnn = self._layer = module
        self._call: tuple[Any, Any] | None = None
        self._gradients: dict[str, Tensor] = {}
        self._replay: Replay | None = None

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One a fused layer."""
        layers = [(flow, view.model.get_submodule(flow.outputs[0])) for flow in view.flows if flow.fused]
        return [cls(flow, layer) for flow, layer in layers if isinstance(layer, nn.RNNBase)]

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at the layer."""
        self._switch, self._canary, self._hooks = hooks.switch, hooks.canary, hooks
        hooks.after(self._rnn, self.fuse, self._after)

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
        self._call = map_tensors((given, args[1] if len(args) > 1 else kwargs.get("hx")), Tensor.detach)
        hidden, cell = last if isinstance(last, tuple) else (last, None)
        for name, tensor in (("output", x), ("hidden", hidden), ("cell", cell)):
            if tensor is not None:
                self._hooks.on_gradient(tensor, self.fuse, partial(self._keep, name), name)

    def _keep(self, name: str, gradient: Tensor) -> None:
        held = self._gradients.get(name)
        self._gradients[name] = gradient.clone() if held is None else held + gradient

    def replay(self) -> None:
        """Replay the call that was kept, and let go of it."""
        call, gradients = self._call, self._gradients
        if self._replay is not None:
            return
        self._call, self._gradients = None, {}
        if call is not None and gradients:
            with masked():
                self._replay = replay_gradients(
                    self._layer, *call, gradients.get("output"), gradients.get("hidden"), gradients.get("cell")
                )

    def update_failed(self) -> None:
        """The next update replays the call of its own forward."""
        self._replay = None

    def take(self) -> Taken | None:
        """What the replay read."""
        replay = self._replay
        self.update_failed()
        if replay is None:
            return None
        counts = replay.counts.to(replay.grad_square.dtype)
        gates = [] if replay.gates is None else [replay.gates]
        tensors = [replay.grad_square, replay.act_square, counts, *gates]
        return Taken(self.fuse, tensors, partial(self._read, replay.note))

    def drop(self) -> None:
        """Let go of what was kept; `discard` does not: the call that is kept is that of a forward under way."""
        self.update_failed()
        self._call, self._gradients = None, {}

    def _names(self) -> list[str]:
        """The flow names of the R rows: the layer's path where there is one, else `path.l0`, `path.l0_reverse`, ..."""
        path, directions = display_path(self._flow.outputs[0]), 2 if self._rnn.bidirectional else 1
        if self._rnn.num_layers * directions == 1:
            return [path]
        suffixes = ("", "_reverse")[:directions]
        return [f"{path}.l{layer}{suffix}" for layer in range(self._rnn.num_layers) for suffix in suffixes]

    def _read(self, note: str, out: RecordBuilder, parts: list[Array]) -> None:
        """One flow per layer and direction, points in processing order."""
        gradients, activations, counts, *gates = parts
        hidden, path = self._rnn.proj_size or self._rnn.hidden_size, display_path(self._flow.outputs[0])
        for row, name in enumerate(self._names()):
            order = slice(None, None, -1) if name.endswith("_reverse") else slice(None)
            labels = [f"{path}#{t}" for t in range(gradients.shape[1])][order]
            out.flow(FlowLayout(name, "time", tuple(labels), tuple(labels[1:]), type(self._rnn).__name__))
            rows = np.zeros((gradients.shape[1], COLUMNS))
            rows[:, GRAD_SQUARE], rows[:, SQUARE] = gradients[row][order], activations[row][order]
            rows[:, ELEMENTS] = counts[order] * hidden
            rows[:, BACKWARDS] = ~np.isnan(gradients[row][order])
            out.along(point_metrics.flow_metrics(rows), labels)
            for metric, values in site_metrics.gate_metrics(np.array([table[row] for table in gates])).items():
                if gates:
                    out.add(metric, values, [f"{name}#{KEEPING[self._rnn.mode]}"])
        out.note(note)


def _with_own_weights(rnn: nn.RNNBase) -> nn.RNNBase:
    """A stand-in for the layer that keeps the weights of this moment (small, and on the slow schedule only)."""
    twin: nn.RNNBase = object.__new__(type(rnn))
    weights = {name: nn.Parameter(p.detach().clone(), False) for name, p in rnn._parameters.items() if p is not None}
    twin.__dict__.update({**rnn.__dict__, "_parameters": weights})
    return twin
