"""`causality`: the tail of each sequence is changed, and the head of the output must not notice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench, Call, Seen, batch_tensors
from flowscope.trials.layout import (
    changed_call,
    first_that_differs,
    layout_of,
    name_of,
    other_values,
    outputs,
    sequence_length,
    tokens_of,
)
from flowscope.trials.trial import Trial, TrialFinding


class Causality(Trial):
    """Change what comes after the middle; where an output before it changes, the model sees the future."""

    name = "causality"
    proves = "the output at a position does not depend on the inputs after it"
    blind = "a model that may see the future (an encoder) is noted, not failed, unless its targets are its inputs moved"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: the first module, in the order of the pass, whose head changed with the tail."""
        seen = look_ahead(bench)
        if seen.first is None:
            yield self.passed(
                f"the outputs at the first {seen.head} of {seen.length} positions do not depend on the rest"
            )
            return
        message = f"the outputs at the first {seen.head} of {seen.length} positions change with the inputs after them"
        message += f", first at {name_of(seen.first)}"
        if reason := _must_be_causal(bench, seen.call, seen.axis):
            advice = "give its attention a causal mask (is_causal=True), or pad convolutions on the left only"
            yield self.failed(seen.first.path, f"{message}; {reason}", advice)
        else:
            advice = "right for an encoder; a model that predicts what follows needs a mask"
            yield self.noted(seen.first.path, message, advice)


class Ahead(NamedTuple):
    """What changes at the first `head` of `length` positions (`axis` of the inputs) with the rest of a call's inputs.

    `first` is the first module whose output changes there; None where the model's does not.
    """

    first: Seen | None
    head: int
    length: int
    call: Call
    axis: int


def look_ahead(bench: Bench) -> Ahead:
    """Change what comes after the middle of the first batch.

    Raises:
        CannotJudgeError: there are no sequences, or outputs of their length, or they do not repeat.
    """
    call, axis = bench.calls()[0], layout_of(bench).positions
    length = sequence_length(call, axis)
    head = length // 2

    def of_head(x: Tensor) -> Tensor | None:
        if x.dim() == 3 and axis == 1 and x.shape[1] == x.shape[2] == length:
            return x[:, :head, :head]  # positions are one of the two axes
        if x.dim() > axis and x.shape[axis] == length:
            return x.narrow(axis, 0, head)
        # convolutions keep positions last: [B, D, T]
        return x[..., :head] if x.dim() == 3 and axis == 1 and x.shape[-1] == length else None

    def other(x: Tensor) -> Tensor:
        if x.dim() not in (2, 3) or x.shape[axis] != length or not (x.dim() == 3 or _is_tokens(x, call)):
            return x
        draw = torch.Generator().manual_seed(1)
        return torch.cat([x.narrow(axis, 0, head), other_values(x, draw).narrow(axis, head, length - head)], axis)

    plain = bench.look(call)
    if not outputs(plain, of_head):
        raise CannotJudgeError("the output has no axis of the sequence's length")
    if first_that_differs(plain, bench.look(call), of_head) is not None:
        raise CannotJudgeError("the same input gives different outputs in evaluation mode (see determinism)")
    changed = bench.look(changed_call(call, other))
    if first_that_differs(plain[-1:], changed[-1:], of_head) is None:
        return Ahead(None, head, length, call, axis)
    return Ahead(first_that_differs(plain, changed, of_head) or plain[-1], head, length, call, axis)


def _is_tokens(x: Tensor, call: Call) -> bool:
    tokens = tokens_of(call)
    return tokens is not None and x.dtype == tokens.dtype and bool((x > 1).any())


def _must_be_causal(bench: Bench, call: Call, axis: int) -> str:
    """Why the model may not see the future; "" where it may."""
    config: Any = getattr(bench.model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return ""
    if getattr(config, "is_decoder", False) or type(bench.model).__name__.endswith("ForCausalLM"):
        return "its configuration says that it is a decoder"
    tokens = tokens_of(call)
    labels = call.kwargs.get("labels")
    if tokens is None or (isinstance(labels, Tensor) and labels is not tokens and not _moved(tokens, labels, axis)):
        return ""
    same = [x for x in batch_tensors(bench.batches[0]) if x.dtype == tokens.dtype]
    others = [x for x in same if x.dim() == 2]
    # targets are flattened in the order of the tokens: the loss takes [T B] of [T, B]
    others += [x.view(tokens.shape) for x in same if x.dim() == 1 and x.numel() == tokens.numel()]
    moved = any(_moved(tokens, other, axis) for other in others)
    return "its targets are its inputs moved by one" if moved else ""


def _moved(inputs: Tensor, other: Tensor, axis: int) -> bool:
    """Whether `other` holds the inputs' next tokens: a longer text of which they are the beginning, or moved ones."""
    n = inputs.shape[axis]
    if other.shape[1 - axis] != inputs.shape[1 - axis]:
        return False
    if torch.equal(other, inputs):
        return False
    if other.shape[axis] > n:
        return torch.equal(other.narrow(axis, 0, n), inputs)
    return other.shape[axis] == n and torch.equal(other.narrow(axis, 0, n - 1), inputs.narrow(axis, 1, n - 1))
