"""`padding`: more padding is appended, what stands in it is changed, and the rest of the output must not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench, Call, Seen, batch_tensors
from flowscope.trials.layout import changed_call, first_that_differs, layout_of, name_of, outputs, tokens_of
from flowscope.trials.trial import Trial, TrialFinding

APPENDED = 3
"""So many positions of padding are appended."""
STEPS = 4096.0
"""Rounding between tensors of different sizes, where kernels add in another order: 5e-4 of the largest in fp32."""


@dataclass(frozen=True)
class Padding:
    """What of a batch is padding.

    Attributes:
        where: [B, T], true at padding.
        known: from what.
        token: what stands there.
    """

    where: Tensor
    known: str
    token: int


class PaddingIgnored(Trial):
    """Change the embedding of padded positions, and append more of them."""

    name = "padding"
    proves = "the outputs at positions that are no padding do not depend on what or how much padding there is"
    blind = "positions after left padding, whose numbers a model takes from elsewhere"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: the first module of whose output the part that is no padding changed."""
        call = bench.calls()[0]
        if layout_of(bench).positions != 1:
            raise CannotJudgeError("positions come first here; it judges [B, T] only")
        padding = find_padding(bench, call)
        batch, length = padding.where.shape

        def real(x: Tensor) -> Tensor | None:
            if x.dim() >= 2 and x.shape[0] == batch and x.shape[1] in (length, length + APPENDED):
                return x[:, :length][~padding.where]
            if x.dim() == 2 and x.shape[0] == batch and x.shape[1] in (length - 1, length - 1 + APPENDED):
                # a number for each token but the first, as of the moved targets
                return x[:, : length - 1][~padding.where[:, 1:]]
            return x if x.dim() == 2 and x.shape[0] == batch else None

        plain = bench.look(call)
        if not outputs(plain, real):
            raise CannotJudgeError("the output has no axis of the batch's or the sequence's length")
        if first_that_differs(plain, bench.look(call), real) is not None:
            raise CannotJudgeError("the same input gives different outputs in evaluation mode (see determinism)")
        tried = self._tried(bench, call, padding)
        if not tried:
            raise CannotJudgeError("there is no padding in this batch, and the model's length is fixed")
        for what, seen in tried.items():
            if first_that_differs(plain[-1:], seen[-1:], real, STEPS) is None:
                continue
            first = first_that_differs(plain, seen, real, STEPS) or plain[-1]
            message = f"{what} changes the output at other positions, first at {name_of(first)}"
            message += f"; padding is known from {padding.known}"
            advice = "give attention the mask of padding there, and leave padding out of means, norms and the loss"
            yield self.failed(first.path, message, advice)
            return
        yield self.passed(f"the rest of the output does not depend on the padding (known from {padding.known})")

    def _tried(self, bench: Bench, call: Call, padding: Padding) -> dict[str, list[Seen]]:
        """What modules return with other padding, and with more of it where the model takes longer sequences."""
        tried = {}
        if padding.where.any():
            other = bench.seen(lambda: self._with_other_padding(bench, call, padding.where))
            tried["what stands in the padding"] = other
        with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError):  # the length is fixed
            more = bench.look(_appended(call, padding))
            tried[f"appending {APPENDED} positions of padding"] = more
        return tried

    @staticmethod
    def _with_other_padding(bench: Bench, call: Call, where: Tensor) -> Any:
        """The model's output where embeddings of padded positions (or vectors given there) hold other numbers."""
        draw = torch.Generator().manual_seed(1)

        def disturbed(x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=draw).to(x)
            return torch.where(where.unsqueeze(-1).to(x.device), x + noise * (x.std() + 1), x)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            same = isinstance(output, Tensor) and output.dim() == 3 and output.shape[:2] == where.shape
            return disturbed(output) if same else None

        def change(x: Tensor) -> Tensor:
            return disturbed(x) if x.dim() == 3 and x.is_floating_point() and x.shape[:2] == where.shape else x

        tables = [module for module in bench.model.modules() if isinstance(module, nn.Embedding)]
        handles = [table.register_forward_hook(after) for table in tables]
        try:
            return bench.run(changed_call(call, change))
        finally:
            for handle in handles:
                handle.remove()


def find_padding(bench: Bench, call: Call) -> Padding:
    """What of a call is padding: by a mask it is given, an embedding's `padding_idx`, or ignored targets at the end.

    Raises:
        CannotJudgeError: nothing tells.
    """
    tokens = tokens_of(call)
    found = _by_mask(call, tokens)
    if found is None and tokens is not None:
        found = _by_embedding(bench, tokens) or _by_targets(bench, tokens)
    if found is None:
        raise CannotJudgeError("nothing tells what is padding: no mask, no padding_idx, no ignored targets at the end")
    return found


def _by_mask(call: Call, tokens: Tensor | None) -> Padding | None:
    named = [*call.kwargs.items(), *((f"argument {n}", x) for n, x in enumerate(call.args))]
    masks = [(name, x) for name, x in named if isinstance(x, Tensor) and x.dim() == 2]
    for name, x in masks:
        if x.dtype == torch.bool and "mask" in name and "padding" in name:
            return Padding(x, name, _token(tokens, x))
    for name, x in masks:
        if _is_zero_one(x) and ("attention_mask" in name or _has(tokens, x)):
            return Padding(x == 0, name, _token(tokens, x == 0))
    return None


def _by_embedding(bench: Bench, tokens: Tensor) -> Padding | None:
    largest = int(tokens.max())
    for path, module in bench.model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and largest < module.num_embeddings:
            return Padding(tokens == module.padding_idx, f"padding_idx of {path}", module.padding_idx)
    return None


def _by_targets(bench: Bench, tokens: Tensor) -> Padding | None:
    for target in batch_tensors(bench.batches[0]):
        if target.shape == tokens.shape and not target.is_floating_point() and bool((target == -100).any()):
            ending = (target == -100).flip(1).long().cumprod(1).flip(1).bool()
            if ending.any() and bool((tokens[ending] == tokens[ending][0]).all()):
                return Padding(ending, "ignored targets at the end", int(tokens[ending][0]))
    return None


def _has(tokens: Tensor | None, mask: Tensor) -> bool:
    return tokens is not None and mask.shape == tokens.shape and mask is not tokens


def _is_zero_one(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all()) and bool((x == 1).any())


def _token(tokens: Tensor | None, where: Tensor) -> int:
    return int(tokens[where][0]) if tokens is not None and tokens.shape == where.shape and bool(where.any()) else 0


def _appended(call: Call, padding: Padding) -> Call:
    """The same call with more padding behind each sequence."""
    shape = padding.where.shape
    tokens = tokens_of(call)

    def change(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[:2] != shape:
            return x
        end = x[:, -1:].expand(-1, APPENDED, *x.shape[2:])
        if x.dim() == 2 and (x.dtype == torch.bool or _is_zero_one(x)):
            shown = bool(padding.where[x == 1].all()) if bool((x == 1).any()) else True
            return torch.cat([x, torch.full_like(end, shown)], 1)
        if tokens is not None and x.dim() == 2 and x.dtype == tokens.dtype:
            target = x is call.kwargs.get("labels") or bool((x == -100).any())
            value = padding.token if torch.equal(x, tokens) else -100 if target else int(x[0, -1])
            return torch.cat([x, torch.full_like(end, value)], 1)
        return torch.cat([x, torch.zeros_like(end)], 1)

    return changed_call(call, change)
