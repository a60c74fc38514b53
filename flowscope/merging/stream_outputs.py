"""Streams that other code than the flow's blocks would see: reduced there to what the plain model has.

The last block of a stretch reduces. Where it does not run (layer drop, a list cut short, an early exit), the streams
leave the block before it, and the module that runs the blocks hands them on to a norm of its own or returns them: hooks
on these reduce them. Hidden states that a model collects between its blocks are reduced where it returns them.

Which tensor carries streams is known from the block that returned it; its shape alone decides only where that cannot be
noted (compiled code): a feature map [B, C, H, W] may end in (streams, features) by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection
from flowscope.merging.weaving import Woven, change_class
from flowscope.model.sites import BlockSites

_MARK = "flowscope_streams"


@dataclass
class Stretch:
    """Consecutive blocks that streams travel through, [B, T..., S, D].

    Attributes:
        axes: of what travels.
        ending: its last two sizes, (S, D).
        feature_axis: of the plain tensor.
        reduction: "mean" or "sum" over the streams.
        open: whether streams have left a block and nobody has taken them yet (eager code only).
        start: the connection of the block that expands.
    """

    axes: int
    ending: tuple[int, int]
    feature_axis: int
    reduction: str
    open: list[bool] = field(default_factory=lambda: [False])
    start: Any = None

    def leaves(self, streams: Tensor) -> Tensor:
        """Note that a block hands streams on."""
        if not torch.compiler.is_compiling():
            self.open[0] = True
            setattr(streams, _MARK, True)
        return streams

    def arrives(self) -> None:
        """Note that a block takes what comes in."""
        if not torch.compiler.is_compiling():
            self.open[0] = False

    def matches(self, x: Any) -> bool:
        """Whether a value has the shape of what travels."""
        return isinstance(x, Tensor) and x.dim() == self.axes and tuple(x.shape[-2:]) == self.ending

    def reduce(self, streams: Tensor) -> Tensor:
        """Return what the plain model has instead of streams."""
        x = streams.mean(-2) if self.reduction == "mean" else streams.sum(-2)
        return x if self.feature_axis == -1 else x.movedim(-1, self.feature_axis)


def plain(stretches: list[Stretch], module: nn.Module, value: Any, unmarked: bool) -> Any:
    """Return a value with the streams in it reduced, itself where there are none.

    Args:
        stretches: whose streams.
        module: what returned or takes the value.
        value: tensors in tuples, lists and dicts.
        unmarked: take also what has been changed since it left a block, while its stretch is open.
    """
    if isinstance(value, Tensor):
        for stretch in stretches:
            if stretch.matches(value):
                known = getattr(value, _MARK, False) or (unmarked and stretch.open[0])
                if torch.compiler.is_compiling() or known or has_compiled_blocks(module):
                    stretch.arrives()
                    return stretch.reduce(value)
    elif type(value) is tuple or type(value) is list:
        items = [plain(stretches, module, item, unmarked) for item in value]
        if any(one is not other for one, other in zip(items, value, strict=True)):
            return type(value)(items)
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            reduced = plain(stretches, module, item, unmarked)
            if reduced is not item:
                value[key] = reduced
    return value


def run_container(container: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the own forward of a module that runs the blocks of stretches: streams end here at the latest.

    Raises:
        FlowscopeError: streams left a block, and what used them was no module.
    """
    stretches: list[Stretch] = container.flowscope_stretches
    for stretch in stretches:
        stretch.arrives()
    output = plain(stretches, container, forward(container, *args, **kwargs), unmarked=True)
    if not torch.compiler.is_compiling() and any(stretch.open[0] for stretch in stretches):
        raise FlowscopeError(
            f"{type(container).__name__}: the last block of a flow with streams did not run (layer drop, an early "
            "exit), and a function, no module, used what the block before it returned. Leave the blocks that may "
            "be last out with where=..., switch layer drop off, or use mode='keel'."
        )
    return output


class WovenContainer(Woven):
    """A module that runs the blocks of stretches."""

    flowscope_run = staticmethod(run_container)
    flowscope_stretches: list[Stretch]


class ReduceReturned:
    """Forward hook on models with a `config`: the hidden states they collected.

    This and the next are classes, not closures: a wrapped model can be pickled.
    """

    def __init__(self, stretches: list[Stretch]) -> None:
        self.stretches = stretches

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reduce the hidden states in a model's output."""
        if isinstance(output, dict):
            for key in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
                if isinstance(output.get(key), tuple):
                    output[key] = plain(self.stretches, module, output[key], unmarked=False)
        return output


class ReduceHiddenStates:
    """The hook of 0.1 in the place of `ReduceReturned`; its pickles know the axes of a hidden state and no more."""

    dims: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reduce the hidden states with one axis more."""
        for key in [k for k in output if "hidden_states" in k] if isinstance(output, dict) else []:
            if isinstance(output[key], tuple):
                output[key] = tuple(x.mean(-2) if x.dim() == self.dims + 1 else x for x in output[key])
        return output


class ReduceTaken:
    """Forward pre-hook on what the module that runs the blocks calls besides them."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretches = [stretch]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Reduce what carries streams in the arguments."""
        return plain(self.stretches, module, args, unmarked=True), plain(self.stretches, module, kwargs, unmarked=True)


HOOKS = (ReduceReturned, ReduceHiddenStates, ReduceTaken)


def has_compiled_blocks(module: nn.Module) -> bool:
    """Whether parts of a module are compiled on their own, so that what leaves them cannot be noted."""
    parts = module.modules()
    return any(m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for m in parts)


def attach_hooks(model: nn.Module, stretches: list[tuple[list[BlockSites], list[Connection]]]) -> None:
    """Let the streams of each stretch (blocks, their connections) be reduced wherever they leave it."""
    every: list[Stretch] = []
    for blocks, connections in stretches:
        first: Any = connections[0]
        ending = (first.streams, first.features)
        reduction = getattr(first, "reduction", "mean")
        stretch = Stretch(len(blocks[0].shape) + 1, ending, first.axis, reduction, start=first)
        for connection in connections:
            vars(connection)["stretch"] = stretch
        every.append(stretch)
        attach_around(model, [block.path for block in blocks], stretch)
    for module in model.modules():
        if every and hasattr(module, "config") and hasattr(module, "dummy_inputs"):
            module.register_forward_hook(ReduceReturned(every))


def attach_around(model: nn.Module, paths: list[str], stretch: Stretch) -> None:
    """Let the module that runs the blocks, and what it calls besides them, reduce."""
    above = paths[0].rpartition(".")[0]
    while above and not (all(path.startswith(f"{above}.") for path in paths) and is_called(model.get_submodule(above))):
        above = above.rpartition(".")[0]
    container = model.get_submodule(above)
    if not isinstance(container, Woven) and "forward" not in vars(container):
        change_class(container, WovenContainer, above)
    if isinstance(container, WovenContainer):
        vars(container).setdefault("flowscope_stretches", []).append(stretch)
    for module in called_besides(container, {id(model.get_submodule(path)) for path in paths}):
        module.register_forward_pre_hook(ReduceTaken(stretch), with_kwargs=True)


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    return type(module).forward is not nn.Module.forward


def called_besides(container: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    """Yield the outermost modules inside a container that are neither blocks nor hold one."""
    for child in container.children():
        if id(child) in blocks:
            continue
        if is_called(child) and not any(id(module) in blocks for module in child.modules()):
            yield child
        else:
            yield from called_besides(child, blocks)
