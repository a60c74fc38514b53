"""Which axis of what a model is given holds samples, and which positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flowscope.errors import CannotJudgeError
from flowscope.model.nested import map_tensors, nested_tensors
from flowscope.trials.bench import Bench, Call, Seen, batch_tensors, beyond_rounding

SHORTEST = 3
"""Positions a sequence needs at least."""
MODEL = "the model's own forward"
"""What a place without a path is called."""
_TIME_FIRST = (nn.RNNBase, nn.MultiheadAttention)


@dataclass(frozen=True)
class Layout:
    """Axes of the tensors that a model is given.

    Attributes:
        samples: the axis of the samples.
        positions: that of the positions in a sequence.
    """

    samples: int
    positions: int


def layout_of(bench: Bench) -> Layout:
    """Samples first, unless recurrent or attention layers of torch are told to take positions first.

    That is what the layers take; what they are given may have samples first all the same, by mistake or through a
    transposition on the way, which a batch with one target a sample tells.
    """
    told = [module.batch_first for module in bench.model.modules() if isinstance(module, _TIME_FIRST)]
    if not told or any(told):
        return Layout(0, 1)
    sequences = [x for x in given(bench.calls()[0]) if x.dim() > 1]
    targets = {x.shape[0] for x in batch_tensors(bench.batches[0]) if x.dim() == 1}
    rows, columns = sequences[0].shape[:2] if sequences else (0, 0)
    return Layout(0, 1) if rows in targets and columns not in targets else Layout(1, 0)


def are_tokens(x: Tensor) -> bool:
    """Whether a tensor can be numbers of tokens, two-dimensional whole numbers that are no mask."""
    whole = x.dim() == 2 and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    return whole and x.numel() > 0 and bool(((x < 0) | (x > 1)).any())


def given(call: Call) -> list[Tensor]:
    """The tensors of a call, in order."""
    return [*nested_tensors((call.args, call.kwargs))]


def tokens_of(call: Call) -> Tensor | None:
    """The first tokens of a call."""
    return next((x for x in given(call) if are_tokens(x)), None)


def sequence_length(call: Call, axis: int) -> int:
    """The number T of positions of a call's sequences, [B, T] of tokens or [B, T, D] of vectors.

    Raises:
        CannotJudgeError: it is given none, or too short ones.
    """
    inputs = given(call)
    vectors = [x for x in inputs if x.dim() == 3 and x.is_floating_point()]
    found = [x.shape[axis] for x in [x for x in inputs if are_tokens(x)] or vectors]
    if not found or found[0] < SHORTEST:
        raise CannotJudgeError("the model is given no sequence [B, T] of tokens or [B, T, D] of vectors")
    return int(found[0])


def changed_call(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """The same call with other tensors."""
    return replace(call, args=map_tensors(call.args, change), kwargs=map_tensors(call.kwargs, change))


def other_values(x: Tensor, draw: torch.Generator) -> Tensor:
    """Values of the same kind: vectors with noise of their own scale, tokens drawn from the others of them."""
    if x.is_floating_point():
        spread = x.std(correction=0) if x.numel() > 1 else x.abs().sum()
        return x + torch.randn(x.shape, generator=draw).to(x) * (spread + (spread == 0))
    if x.dtype == torch.bool or x.numel() == 0:
        return x
    # values that occur, for others may be out of range: each moves to another place among them
    values: Tensor = torch.unique(x)
    moves = torch.randint(1, max(2, values.numel()), x.shape, generator=draw).to(x.device)
    return values[(torch.searchsorted(values, x) + moves) % values.numel()]


def first_that_differs(
    before: Iterable[Seen], after: Iterable[Seen], part: Callable[[Tensor], Tensor | None], steps: float = 64.0
) -> Seen | None:
    """The first module, in the order they ended, of whose output `part` differs by more than rounding."""
    for a, b in zip(before, after, strict=False):
        for x, y in zip(a.tensors, b.tensors, strict=False):
            kept, new = part(x), part(y)
            if kept is not None and new is not None and beyond_rounding(kept, new, steps):
                return a
    return None


def outputs(seen: Sequence[Seen], part: Callable[[Tensor], Tensor | None]) -> list[Tensor]:
    """Of what the whole model returned, the parts there are."""
    return [kept for x in seen[-1].tensors if (kept := part(x)) is not None] if seen else []


def name_of(seen: Seen) -> str:
    """A module's path, and words for the whole model."""
    return seen.path or MODEL
