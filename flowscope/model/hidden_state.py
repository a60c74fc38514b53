"""How a module's tensors are laid out: which argument is the hidden state, which axis holds features, which tokens.

Axis letters: B batch, T tokens or positions, D features, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.model.nested import nested_tensors
from flowscope.model.structure import attribute
from flowscope.model.zero import whole_shape
from flowscope.torch_internals import sequence_number

HIDDEN_NAMES = ("hidden_states", "x", "input", "src", "tgt", "inputs_embeds", "hidden_state", "inputs")


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """The dense floating-point tensors with values among the nested ones, in order.

    Sparse and nested ones are no hidden states we can read (nn.TransformerEncoder makes nested ones when it evaluates).
    """
    return filter(_holds_state, nested_tensors(value))


def _holds_state(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
    return dense and (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def hidden_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the hidden state among a block's arguments: by the customary name, as the first, by its gradient.

    A mask or a rotary table may be floating point and come first, but carries no gradient and has another shape. With
    frozen embeddings x_0 carries none either, and what a decoder's block gets beside it (the encoder's output) does.
    """
    found = [t for t in floating_tensors((args, kwargs)) if t.dim() >= 2]
    if not args:
        for name in HIDDEN_NAMES:
            if any(tensor is kwargs.get(name) for tensor in found):
                return kwargs[name]  # type: ignore[no-any-return]
    for tensor in found:
        if tensor.requires_grad:
            alike = found[0].dim() == tensor.dim() and found[0].shape[-1] == tensor.shape[-1]
            return found[0] if args and alike else tensor
    return found[0] if found else None


def hidden_output(output: Any, like: Tensor | None) -> Tensor | None:
    """Return the hidden state among a block's outputs: the first of the input's shape, else the first with gradient."""
    if isinstance(output, Tensor):
        return output if _holds_state(output) else None
    found = list(floating_tensors(output))
    alike = (tensor for tensor in found if like is not None and tensor.shape == like.shape)
    with_gradient = (tensor for tensor in found if tensor.requires_grad)
    return next(chain(alike, with_gradient, found), None)


def beside(output: Any, x: Tensor) -> list[Tensor]:
    """What a block returned beside the hidden state `x`."""
    return [] if output is x else [other for other in floating_tensors(output) if other is not x]


@dataclass
class AxisReader:
    """Where a module's hidden state keeps its features, from the widths of the layers inside the module."""

    channel_widths: frozenset[int]
    feature_widths: frozenset[int]
    time_first: bool

    @classmethod
    def of(cls, module: nn.Module) -> AxisReader:
        """Read the widths of the convolutions (features at axis 1) and of the linear layers and norms (last axis)."""
        channels: set[int] = set()
        features: set[int] = set()
        time_first = False
        for child in module.modules():
            if isinstance(child, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                channels |= {child.in_channels, child.out_channels}
            elif isinstance(child, nn.modules.batchnorm._NormBase):
                channels.add(child.num_features)
            elif isinstance(child, nn.GroupNorm):
                channels.add(child.num_channels)
            elif isinstance(child, nn.Linear):
                features |= {child.in_features, child.out_features}
            elif isinstance(child, nn.LayerNorm):
                features.add(child.normalized_shape[-1])
            elif isinstance(child, (nn.MultiheadAttention, nn.RNNBase)):
                time_first = time_first or not child.batch_first
            elif "norm" in type(child).__name__.lower():
                weight = attribute(child, "weight")
                features |= {*whole_shape(weight)[-1:]} if isinstance(weight, Tensor) else set()
        return cls(frozenset(channels), frozenset(features), time_first)

    def read(self, x: Tensor) -> tuple[Tensor, int, bool]:
        """Return x with the batch first, its feature axis, and whether what lies between is a sequence of tokens."""
        if x.dim() < 2:
            return x.reshape(1, -1), -1, False
        if x.dim() == 2:
            return x, -1, False
        channels_first = x.shape[1] in self.channel_widths and x.shape[-1] not in self.feature_widths
        if x.dim() == 3:
            if channels_first:
                return x, 1, True
            return (x.transpose(0, 1) if self.time_first else x), -1, True
        last = x.shape[-1] in self.feature_widths and x.shape[1] not in self.channel_widths
        return x, (-1 if last else 1), False


def node_number(x: Tensor) -> int | None:
    """The number of the autograd node that made x (it grows with every node of a thread), None where x has none.

    A number outlives the tensor's Python object, and keeps nothing alive.
    """
    return None if x.grad_fn is None else sequence_number(x.grad_fn)


def derives_from(tensors: Iterator[Tensor], ancestor: Tensor | None, number: int | None, limit: int = 4096) -> bool:
    """Whether one of `tensors` is `ancestor` or was computed from the autograd node of that number.

    Nodes older than it cannot come from it, so only what was made since is walked, at most `limit` nodes.
    """
    queue: list[Any] = []
    for tensor in tensors:
        if ancestor is not None and tensor is ancestor:
            return True
        if tensor.grad_fn is not None:
            queue.append(tensor.grad_fn)
    if number is None:
        return False
    seen: set[Any] = set()
    while queue and len(seen) < limit:
        node = queue.pop(0)
        made = sequence_number(node)
        if made == number:
            return True
        if made < number or node in seen:
            continue
        seen.add(node)
        queue.extend(parent for parent, _ in node.next_functions if parent is not None)
    return False


is_compiling = torch.compiler.is_compiling
"""Whether this code is being traced by torch.compile (then no Python side effect may happen)."""


def feature_axis(block: nn.Module, shape: tuple[int, ...]) -> int:
    """Return 1 where the carried x has its features on axis 1 (convolutions), else -1."""
    widths = AxisReader.of(block)
    on_channels = len(shape) >= 3 and shape[1] in widths.channel_widths
    on_channels = on_channels and (len(shape) >= 4 or shape[-1] not in widths.feature_widths)
    return 1 if on_channels else -1
