"""`labels`: where targets are the inputs moved, they are moved by one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flowscope.errors import CannotJudgeError
from flowscope.model.nested import nested_tensors
from flowscope.trials.bench import Bench, Call
from flowscope.trials.causality import look_ahead
from flowscope.trials.criteria import CLASSES, Criterion, criteria
from flowscope.trials.layout import layout_of, tokens_of
from flowscope.trials.trial import Trial, TrialFinding

SURE = 0.95
"""Targets equal inputs at so many of the positions that count."""
ENOUGH = 20
"""Positions that must count."""
FAR = 4
"""Moves by so much are tried."""


class Labels(Trial):
    """Find by how much the targets of a sequence are moved against the inputs, from the tokens themselves."""

    name = "labels"
    proves = "the output at a position is compared with the token that follows it, neither itself nor a later one"
    blind = "losses that are no cross_entropy over the tokens of a call"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: the move."""
        call = bench.calls()[0]
        tokens = tokens_of(call)
        if tokens is None:
            raise CannotJudgeError("the model is given no tokens [B, T]")
        tokens = tokens if layout_of(bench).positions == 1 else tokens.t()
        _, found, _ = criteria(bench, bench.batches[0])
        for one in found:
            if one.kind != CLASSES or one.target.dtype != tokens.dtype:
                continue
            if _crossed(one, tokens, call):
                message = "outputs and targets are flattened in another order: each is compared with another sample's"
                advice = "bring both to [B, T] (transpose one of them) before they are flattened"
                yield self.failed("", message, advice)
                return
            move = _move(one, tokens, call, bench)
            if move is not None:
                yield self._told(move, call, bench)
                return
        raise CannotJudgeError("the targets are not the inputs moved")

    def _told(self, move: int, call: Call, bench: Bench) -> TrialFinding:
        if move == 1:
            return self.passed("each position is compared with the token that follows it")
        if move == 0:
            message = "each position is compared with its own token, which it is given: the targets are not moved"
            advice = "move the targets by one (labels = tokens[:, 1:]), unless it is an autoencoder"
            return self.failed("", message, advice) if _is_causal(bench) else self.noted("", message, advice)
        message = f"each position is compared with the token {move} ahead, not with the next one: moved twice"
        if move < 0:
            message = f"each position is compared with the token {-move} before it, which it is given"
        return self.failed("", message, "move the targets in one place only: by the loader or by the model's loss")


def _is_causal(bench: Bench) -> bool:
    """Whether the model says that it is a decoder, or does not look ahead: then copying is no task for it."""
    if type(bench.model).__name__.endswith("ForCausalLM"):
        return True
    if getattr(getattr(bench.model, "config", None), "is_decoder", False):
        return True
    try:
        return look_ahead(bench).first is None
    except CannotJudgeError:
        return False


def _move(one: Criterion, tokens: Tensor, call: Call, bench: Bench) -> int | None:
    """By how much the targets are ahead of the positions that predict them; None where they are no moved inputs."""
    batch, length = tokens.shape
    if one.target.numel() % batch or one.target.dim() > 2:
        return None
    target = _as_rows(one.target.detach(), batch, bench)
    width = target.shape[1]
    counted = target != one.ignored
    if int(counted.sum()) < ENOUGH or width > length + FAR:
        return None
    for move in sorted(range(-FAR, FAR + 1), key=lambda k: abs(k - 1)):
        rows = slice(max(0, -move), min(width, length - move))
        if rows.stop <= rows.start:
            continue
        left, right = target[:, rows], tokens[:, rows.start + move : rows.stop + move]
        mask = counted[:, rows]
        if int(mask.sum()) >= ENOUGH and float((left == right)[mask].float().mean()) >= SURE:
            return move - _begins(one, call, batch, width, bench)
    return None


def _crossed(one: Criterion, tokens: Tensor, call: Call) -> bool:
    """Whether logits [N, C] are flattened sample by sample and targets [N] position by position, or the reverse."""
    batch, target, values = tokens.shape[0], one.target.detach(), one.input.detach()
    if target.dim() != 1 or target.numel() % batch or batch < 2 or target.numel() == batch:
        return False
    width = target.numel() // batch
    by_sample, by_position = target.view(batch, width), target.view(width, batch).t()
    if (told := _follows(by_sample, tokens, one.ignored)) == _follows(by_position, tokens, one.ignored):
        return False
    for output in nested_tensors(call.output):
        if output.dim() != 3 or output.shape[2] != one.classes:
            continue
        for axis in (0, 1):
            ordered = output.detach() if output.shape[0] == batch else output.detach().transpose(0, 1)
            for begin in range(ordered.shape[1] - width + 1):
                rows = ordered[:, begin : begin + width]
                rows = rows if axis == 0 else rows.transpose(0, 1)
                if torch.allclose(rows.reshape(values.shape).to(values), values, atol=1e-5):
                    return told == (axis == 1)
    return False


def _follows(target: Tensor, tokens: Tensor, ignored: int) -> bool:
    """Whether targets [B, T] are the tokens, or those that follow."""
    width, length = target.shape[1], tokens.shape[1]
    for move in (0, 1):
        n = min(width, length - move)
        left, right = target[:, :n], tokens[:, move : move + n]
        counts = left != ignored
        if int(counts.sum()) >= ENOUGH and float((left == right)[counts].float().mean()) >= SURE:
            return True
    return False


def _as_rows(x: Tensor, batch: int, bench: Bench) -> Tensor:
    if x.dim() == 2:
        return x if x.shape[0] == batch else x.t()
    by_position = layout_of(bench).positions == 0
    return x.view(-1, batch).t() if by_position else x.view(batch, -1)


def _begins(one: Criterion, call: Call, batch: int, width: int, bench: Bench) -> int:
    """At which position of the model's output the compared logits begin: 0, or more where they were sliced."""
    values = one.input.detach()
    if values.dim() == 3 and values.shape[1] == one.classes and values.shape[2] == width:
        values = values.transpose(1, 2)
    if values.numel() != batch * width * one.classes:
        return 0
    values = values.reshape(batch, width, one.classes)
    for output in nested_tensors(call.output):
        if output.dim() == 3 and output.shape[0] == batch and output.shape[2] == one.classes:
            for begin in range(output.shape[1] - width + 1):
                if torch.allclose(output.detach()[:, begin : begin + width].to(values), values, atol=1e-5):
                    return begin
    return 0
