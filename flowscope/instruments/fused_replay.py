"""Gradient through time of fused nn.RNN, nn.GRU and nn.LSTM, which hide their steps: replayed cell by cell.

Axis letters: B batch, T time, D input features, H hidden features (P after an LSTM's projection), R = layers x
directions (rows), in the order of `h_n`: layer 0 forward, layer 0 reverse, layer 1 forward, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowscope.errors import FlowscopeError
from flowscope.sums.site_statistics import GATE_COLUMNS, gate_sums
from flowscope.sums.statistics import wide

Hidden = Tensor | tuple[Tensor, Tensor] | None
State = tuple[Tensor, ...]  # (h,) or (h, c), each [b, H]
Cell = Callable[[Tensor, State], State]


@dataclass(frozen=True, eq=False)
class Replay:
    """What `replay_gradients` read.

    Attributes:
        grad_square: fp64 [R, T], sum over batch and features of (dL/dh_t)^2.
        act_square: fp64 [R, T], sum over batch and features of h_t^2.
        counts: fp64 [T], sequences that reach time t (B, or fewer where packed).
        note: "" or a sentence on what is not exact.
        gates: [R, GATE_COLUMNS], the sums of `site_statistics.gate_sums` over the gate that keeps the state: an LSTM's
            forget gate, a GRU's update gate; None without one.
    """

    grad_square: Tensor
    act_square: Tensor
    counts: Tensor
    note: str = ""
    gates: Tensor | None = None


def replay_gradients(
    rnn: nn.RNNBase,
    inputs: Tensor | PackedSequence,
    hx: Hidden,
    grad_output: Tensor | None,
    grad_hn: Tensor | None,
    grad_cn: Tensor | None = None,
) -> Replay:
    """Replay one call of a fused recurrent layer in a private graph and read ||dL/dh_t||^2 at every step.

    dL/dh_t is the whole gradient that reaches h_t: through the output, the next step and the next layer. Column t is
    absolute time in both directions; a reverse row is processed from t = T-1 down to 0, so its earliest state is the
    last column. No parameter's `.grad` changes, no random number is drawn, frozen weights are no obstacle. Computed in
    the weights' dtype, at least fp32, with autocast off; one graph, one `torch.autograd.grad`. With dropout between
    layers the masks of the original call are lost: only the last layer's rows are given (the others are NaN), from
    inputs without dropout, and `note` says so.

    Args:
        rnn: nn.RNN (tanh, relu), nn.GRU or nn.LSTM (with or without `proj_size`); any layers, directions, batch_first.
        inputs: what the layer was called with: [T, B, D], [B, T, D] (batch_first), [T, D] or a PackedSequence.
        hx: the initial state it was called with, or None.
        grad_output: dL/d output in the layout of `output`; for packed input dL/d output.data. None: output unused.
        grad_hn: dL/d h_n [R, B, H] (unbatched [R, H]), or None where h_n is unused.
        grad_cn: the same for an LSTM's c_n.

    Raises:
        FlowscopeError: no gradient at all was given, or the layer is none of the three kinds.
    """
    if rnn.mode not in ("RNN_TANH", "RNN_RELU", "GRU", "LSTM"):
        raise FlowscopeError(f"replay_gradients: got {type(rnn).__name__}, expected nn.RNN, nn.GRU or nn.LSTM.")
    if grad_output is None and grad_hn is None and grad_cn is None:
        raise FlowscopeError("replay_gradients: no gradient was given: pass grad_output, grad_hn or grad_cn.")
    device = rnn.get_parameter("weight_ih_l0").device.type
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        replay = _Layers(rnn, inputs, hx)
        replay.forward()
        return replay.read(grad_output, grad_hn, grad_cn)


class _Layers:
    """One call of the layer as [b_t, features] per time step, b_t sequences being alive at t (all, unless packed)."""

    def __init__(self, rnn: nn.RNNBase, inputs: Tensor | PackedSequence, hx: Hidden) -> None:
        self.rnn = rnn
        dtype = rnn.get_parameter("weight_ih_l0").dtype
        self.dtype = dtype if dtype == torch.float64 else torch.float32
        self.order = inputs.sorted_indices if isinstance(inputs, PackedSequence) else None
        self.packed = isinstance(inputs, PackedSequence)
        self.batched = isinstance(inputs, PackedSequence) or inputs.dim() == 3
        if isinstance(inputs, PackedSequence):
            self.sizes = [int(size) for size in inputs.batch_sizes]
            self.data = self._cast(inputs.data)
        else:
            steps = self._time_major(inputs)
            self.sizes = [steps.shape[1]] * steps.shape[0]
            self.data = steps.flatten(0, 1)
        self.initial = self._initial(hx)
        self.states: list[list[Tensor]] = []  # [R][T] of h_t [b_t, H]
        self.logits: list[list[Tensor]] = []  # [R][T] of the gate that keeps the state, [b_t, H]
        self.finals: list[State] = []  # [R] of (h_n,) or (h_n, c_n), each [B, H]
        self.output: Tensor

    @property
    def directions(self) -> int:
        return 2 if self.rnn.bidirectional else 1

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.dtype)

    def _time_major(self, tensor: Tensor) -> Tensor:
        """[T, B, features] of `inputs` or of the gradient of `output`."""
        tensor = self._cast(tensor)
        if not self.batched:
            return tensor.unsqueeze(1)
        return tensor.transpose(0, 1) if self.rnn.batch_first else tensor

    def _rows(self, tensor: Tensor) -> Tensor:
        """[R, B, H] of a state or of its gradient, in the order of the packed batch."""
        tensor = self._cast(tensor if self.batched else tensor.unsqueeze(1))
        return tensor if self.order is None else tensor.index_select(1, self.order)

    def _initial(self, hx: Hidden) -> State:
        rnn, rows = self.rnn, self.directions * self.rnn.num_layers
        widths = [rnn.proj_size or rnn.hidden_size] + [rnn.hidden_size] * (rnn.mode == "LSTM")
        if hx is None:
            return tuple(self.data.new_zeros(rows, self.sizes[0], width) for width in widths)
        return tuple(self._rows(state) for state in (hx if isinstance(hx, tuple) else (hx,)))

    def forward(self) -> None:
        # nothing else in the private graph asks for a gradient: the weights are detached
        data = self.data.requires_grad_()
        for layer in range(self.rnn.num_layers):
            outputs = []
            for direction in range(self.directions):
                states, final = self._direction(data, layer, direction)
                self.states.append(states)
                self.finals.append(final)
                outputs.append(torch.cat(states))
            data = torch.cat(outputs, dim=1)
        self.output = data

    def _direction(self, data: Tensor, layer: int, direction: int) -> tuple[list[Tensor], State]:
        suffix = f"l{layer}" + "_reverse" * direction
        weights = {
            name: self._cast(getattr(self.rnn, f"{name}_{suffix}"))
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            if hasattr(self.rnn, f"{name}_{suffix}")
        }
        projected = torch.functional.split(
            nn.functional.linear(data, weights["weight_ih"], weights.get("bias_ih")), self.sizes
        )
        start = tuple(state[layer * self.directions + direction] for state in self.initial)
        self.logits.append([])
        cell = _cell(self.rnn.mode, weights, self.logits[-1])
        return _reverse(cell, projected, start) if direction else _forward(cell, projected, start)

    def read(self, grad_output: Tensor | None, grad_hn: Tensor | None, grad_cn: Tensor | None) -> Replay:
        ends: list[Tensor] = []
        grads: list[Tensor] = []
        if grad_output is not None:
            ends.append(self.output)
            grads.append(self._cast(grad_output) if self.packed else self._time_major(grad_output).flatten(0, 1))
        for index, grad in enumerate((grad_hn, grad_cn)):
            if grad is not None:
                ends += [final[index] for final in self.finals]
                grads += list(self._rows(grad))
        states = [state for row in self.states for state in row]
        reached = torch.autograd.grad(ends, states, grads, allow_unused=True)
        shape = (len(self.states), len(self.sizes))
        grad_square = _squares(reached, states).view(shape)
        act_square = _squares(states, states).view(shape)
        note = ""
        if self.rnn.training and self.rnn.dropout > 0 and self.rnn.num_layers > 1:
            hidden = slice(0, shape[0] - self.directions)
            grad_square[hidden], act_square[hidden] = torch.nan, torch.nan
            self.logits[hidden] = [[] for _ in self.logits[hidden]]
            note = "dropout between layers: gradient through time of the last layer only, replayed without dropout"
        counts = torch.tensor(self.sizes, dtype=torch.float64, device=grad_square.device)
        return Replay(grad_square, act_square, counts, note, self._gates())

    def _gates(self) -> Tensor | None:
        if not any(self.logits):
            return None
        none = torch.zeros(GATE_COLUMNS, dtype=wide(self.data.device), device=self.data.device)
        return torch.stack([gate_sums(torch.cat(row)) if row else none for row in self.logits])


def _squares(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """[R*T] sums of squares; a state that no gradient reaches has gradient zero."""
    zero = like[0].new_zeros((), dtype=torch.float64)
    return torch.stack([zero if t is None else t.detach().to(torch.float64).square().sum() for t in tensors])


def _forward(cell: Cell, projected: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
    states: list[Tensor] = []
    ended: list[State] = []
    for x in projected:
        alive = x.shape[0]
        if alive < state[0].shape[0]:
            ended.append(tuple(part[alive:] for part in state))
            state = tuple(part[:alive] for part in state)
        state = cell(x, state)
        states.append(state[0])
    # the longest sequences come first and end last
    parts = [state, *reversed(ended)]
    return states, tuple(torch.cat([part[i] for part in parts]) for i in range(len(state)))


def _reverse(cell: Cell, projected: Sequence[Tensor], start: State) -> tuple[list[Tensor], State]:
    states: list[Tensor] = []
    state = tuple(part[:0] for part in start)
    for x in reversed(projected):
        begun, alive = state[0].shape[0], x.shape[0]
        if alive > begun:
            state = tuple(torch.cat([part, new[begun:alive]]) for part, new in zip(state, start, strict=True))
        state = cell(x, state)
        states.append(state[0])
    return states[::-1], state


def _cell(mode: str, weights: dict[str, Tensor], logits: list[Tensor]) -> Cell:
    """One step (W_ih x + b_ih, state) -> state; gate order and formulas of torch.nn.RNNCell, GRUCell, LSTMCell.

    Every step adds the pre-activation of the gate that keeps the state to `logits`.
    """

    def recur(h: Tensor) -> Tensor:
        return nn.functional.linear(h, weights["weight_hh"], weights.get("bias_hh"))

    def rnn(x: Tensor, state: State) -> State:
        z = x + recur(state[0])
        return (z.tanh() if mode == "RNN_TANH" else z.relu(),)

    def gru(x: Tensor, state: State) -> State:
        (h,) = state
        x_reset, x_update, x_new = x.chunk(3, dim=1)
        h_reset, h_update, h_new = recur(h).chunk(3, dim=1)
        new = (x_new + (x_reset + h_reset).sigmoid() * h_new).tanh()
        logits.append((x_update + h_update).detach())
        update = (x_update + h_update).sigmoid()
        return ((1 - update) * new + update * h,)

    def lstm(x: Tensor, state: State) -> State:
        h, c = state
        write, forget, new, read = (x + recur(h)).chunk(4, dim=1)
        logits.append(forget.detach())
        c = forget.sigmoid() * c + write.sigmoid() * new.tanh()
        h = read.sigmoid() * c.tanh()
        return (nn.functional.linear(h, weights["weight_hr"]) if "weight_hr" in weights else h), c

    return {"GRU": gru, "LSTM": lstm}.get(mode, rnn)
