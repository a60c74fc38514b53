"""Running a model once: in evaluation mode, on the user's inputs, transformers' `dummy_inputs`, or made-up ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.model.nested import map_tensors
from flowscope.model.structure import outermost, required_arguments

Call = tuple[tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def modes(model: nn.Module, training: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Each module in the mode that `training(module)` says, inside; as before afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        # not model.eval(): a user's own train() may do more than set the flag
        for module, _ in before:
            module.training = training(module)
        yield
    finally:
        for module, mode in before:
            module.training = mode


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Evaluation mode inside; the mode of each module is as before afterwards."""
    return modes(model, lambda module: False)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode without gradient, and put random state, buffers and modes back."""
    buffers = [
        (module, name, tensor, None if tensor is None or tensor.is_meta else tensor.clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
    ]
    cuda = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a run without gradient, which is not the user's
            yield
    finally:
        with torch.no_grad():
            for module, name, tensor, copy in buffers:
                module._buffers[name] = tensor
                if tensor is not None and copy is not None and not torch.equal(tensor, copy):
                    tensor.copy_(copy)


def as_call(example_inputs: Any) -> Call:
    """Return positional and keyword arguments from a tensor, a tuple (or list) or a dict.

    Raises:
        FlowscopeError: it is none of these.
    """
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if hasattr(example_inputs, "items"):
        return (), {str(key): value for key, value in example_inputs.items()}
    raise FlowscopeError(
        f"example_inputs: got {type(example_inputs).__name__}, expected a tensor, a tuple of positional arguments "
        "or a dict of keyword arguments."
    )


def fresh(call: Call) -> Call:
    """Return a call with copies of its tensors: a model's code may change its arguments (leaves stay as they are)."""
    args, kwargs = map_tensors(call, lambda x: x if x.is_leaf and x.requires_grad else x.clone())
    return args, kwargs


def default_calls(model: Any) -> list[Call]:
    """Return the calls worth trying on a transformers model; empty for any other."""
    if not hasattr(model, "dummy_inputs") or not hasattr(model, "config"):
        return []
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "image_size", None) or 64
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        pixels = torch.linspace(-1, 1, 2 * height * width).reshape(2, 1, height, width)
        pixels = pixels.expand(2, getattr(config, "num_channels", 3), height, width)
        return [((), {"pixel_values": pixels.to(device, getattr(model, "dtype", None))})]
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in model.dummy_inputs.items()}
    calls: list[Call] = [((), inputs)]
    if "input_ids" in inputs and "decoder_input_ids" not in inputs:
        calls.append(((), {**inputs, "decoder_input_ids": inputs["input_ids"]}))
    return calls


def runnable(model: nn.Module) -> nn.Module:
    """Return what `default_calls` can run: the model, or the one transformers model inside it (a Lightning module)."""
    found = list(outermost(model.named_modules(), lambda m: hasattr(m, "dummy_inputs") and hasattr(m, "config")))
    return found[0][1] if len(found) == 1 else model


def block_calls(block: nn.Module) -> Iterator[Call]:
    """Yield hidden states a block might take alone, from its first widths: [B, T, D], [B, C, H, W], then [B, D].

    One for each argument without a default: the layer of a decoder also takes what its cross-attention reads.
    """
    required = len(required_arguments(block)) or 1
    linear: list[int] = []
    channels: list[int] = []
    for module in block.modules():
        if isinstance(module, nn.Conv2d):
            channels.append(module.in_channels)
        elif isinstance(module, nn.Linear):
            linear.append(module.in_features)
        elif isinstance(module, nn.LayerNorm):
            linear.insert(0, module.normalized_shape[-1])
    place = next(block.parameters(), torch.empty(0))
    dtype = place.dtype if place.is_floating_point() else torch.float32
    shapes: list[tuple[int, ...]] = [(2, c, 16, 16) for c in channels[:1]]
    shapes += [shape for d in dict.fromkeys(linear) for shape in ((2, 3, d), (2, d))]
    for shape in shapes:
        count = int(torch.Size(shape).numel())
        x = torch.linspace(-1, 1, count, device=place.device).sin().reshape(shape).to(dtype)
        yield tuple(x.clone() for _ in range(required)), {}


def describe(call: Call) -> str:
    """Say what a call passes: shapes of tensors, types of the rest."""
    args, kwargs = call
    parts = [_describe(value) for value in args]
    return ", ".join([*parts, *(f"{key}={_describe(value)}" for key, value in kwargs.items())])


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
