"""`loss_start`: the loss is what head and targets imply, and the shapes and functions on its way fit together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowscope.errors import CannotJudgeError
from flowscope.model.nested import nested_tensors
from flowscope.trials.bench import Bench
from flowscope.trials.criteria import CLASSES, LABELS, VALUES, Criterion, Widened, criteria
from flowscope.trials.trial import Trial, TrialFinding

HIGH = 1.5
"""A loss above so many times what guessing gives is told."""
OFF = 0.01
"""Probabilities add up to 1 within this."""
_PROBABILITIES = frozenset({"Softmax", "Sigmoid"})


class LossStart(Trial):
    """Listen to torch's loss functions: what they are given, and what guessing would give."""

    name = "loss_start"
    proves = (
        "outputs and targets meet in equal shapes, through one softmax or sigmoid, at a loss that guessing explains"
    )
    blind = "loss functions written by hand, apart from the shapes in their differences"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """A finding for each thing that does not fit."""
        loss, found, widened = criteria(bench, bench.batches[0])
        if not torch.isfinite(loss):
            yield self.failed(
                "", f"the loss is {float(loss):g}", "look at the first batch: empty, all ignored, log of 0"
            )
            return
        if not found and not widened:
            raise CannotJudgeError("the loss calls no loss function of torch")
        told = [*map(self._widened, widened)]
        told += self._axes(bench, found)
        told += [finding for one in found if (finding := self._doubled(one)) is not None]
        yield from dict.fromkeys(told)
        if not told:
            high = next((finding for one in found if (finding := self._level(one)) is not None), None)
            yield high or self.passed(
                f"the loss is {float(loss):.4g}: " + "; ".join(_implied(one) for one in found[:3])
            )

    def _widened(self, one: Widened) -> TrialFinding:
        shapes = f"{list(one.left)} against {list(one.right)}"
        message = f"{one.name} of {shapes} broadcasts each output against each target"
        return self.failed("", message, "give both one shape: output.squeeze(-1), or target.unsqueeze(-1)")

    def _axes(self, bench: Bench, found: Sequence[Criterion]) -> Iterable[TrialFinding]:
        """Outputs whose class axis is not that of the loss."""
        with contextlib.suppress(CannotJudgeError):
            for one in found:
                if any(_reinterpreted(one, call.output) for call in bench.calls()):
                    message = f"the outputs were viewed as {list(one.input.shape)}, which mixes classes and positions"
                    yield self.failed("", message, "move the axis of the classes (transpose, movedim), then reshape")

    def _doubled(self, one: Criterion) -> TrialFinding | None:
        """A softmax or sigmoid too many, or too few."""
        made = one.made_by()
        logits = one.name in ("cross_entropy", "binary_cross_entropy_with_logits")
        if logits and made in _PROBABILITIES:
            message = f"{one.name} takes logits and is given probabilities (of {made.lower()}): they are squashed twice"
            return self.failed("", message, "give it the outputs before that softmax or sigmoid")
        if one.name == "nll_loss" and made in _PROBABILITIES:
            message = f"nll_loss takes logarithms of probabilities and is given probabilities (of {made.lower()})"
            return self.failed("", message, "use log_softmax, or cross_entropy on the outputs before it")
        if one.name == "nll_loss" and made == "LogSoftmax" and (total := _total(one)) is not None:
            message = f"the probabilities that nll_loss is given add up to {total:.3g} over the classes, not to 1"
            return self.failed("", message, "take log_softmax over the classes' axis (dim=-1 before flattening)")
        if one.name == "nll_loss" and not made.startswith("Log"):
            positive = bool((one.input.detach() > 0).any())
            if positive:
                message = "nll_loss takes logarithms of probabilities and is given positive numbers"
                return self.failed("", message, "use cross_entropy, which takes logits")
        if one.name == "binary_cross_entropy" and made == "Sigmoid" and _twice(one.input):
            message = "binary_cross_entropy is given a sigmoid of a sigmoid"
            return self.failed("", message, "keep one of the two, or use binary_cross_entropy_with_logits")
        return None

    def _level(self, one: Criterion) -> TrialFinding | None:
        """A loss far above that of guessing."""
        if one.given.get("reduction") not in ("mean", None) or one.given.get("weight") is not None:
            return None
        value, guess = float(one.value.detach()), _guess(one)
        if guess is None or not value > HIGH * guess + 0.05:
            return None
        message = f"{one.name} is {value:.4g}, guessing gives {guess:.4g}: {_implied(one)}"
        if one.kind == VALUES:
            return self.noted("", message, "scale the targets to variance 1, or start the head's bias at their mean")
        return self.noted(
            "", message, "start the head smaller (its outputs are sure of wrong answers); later on, look at the data"
        )


def _guess(one: Criterion) -> float | None:
    """The loss of the best constant answer: log C for classes, log 2 for labels, the targets' variance for values."""
    if one.kind == CLASSES and one.target.dtype == torch.int64:
        return math.log(one.classes) if one.classes > 1 else None
    if one.kind == LABELS:
        return math.log(2)
    if one.name == "mse_loss" and one.target.numel() > 1:
        return float(one.target.detach().double().var(correction=0))
    return None


def _implied(one: Criterion) -> str:
    guess = _guess(one)
    if guess is None:
        return f"{one.name} of {list(one.input.shape)}"
    words = {CLASSES: f"log of {one.classes if one.kind == CLASSES else 0} classes", LABELS: "log 2"}
    return f"{words.get(one.kind, 'the variance of the targets')} is {guess:.4g}"


def _total(one: Criterion) -> float | None:
    """What the probabilities of one answer add up to, the worst; None where it is 1."""
    totals = one.input.detach().double().exp().sum(one.class_axis)
    worst = totals.flatten()[(totals - 1).abs().argmax()]
    return float(worst) if float((worst - 1).abs()) > OFF else None


def _reinterpreted(one: Criterion, output: Any) -> bool:
    """Whether outputs [.., T, C] were viewed as [.., C, T], or [B, C, ..] as [N, C]: numbers in place, axes not."""
    if one.kind != CLASSES or one.input.dim() < 2:
        return False
    values, classes = one.input.detach(), one.classes
    for made in nested_tensors(output):
        if made.dim() < 3 or made.numel() != values.numel() or made.shape == values.shape:
            continue
        last = made.shape[-1] == classes and made.shape[1] != classes and values.dim() > 2
        second = made.shape[1] == classes and made.shape[-1] != classes and values.dim() == 2
        if (last or second) and torch.equal(made.detach().reshape(-1), values.reshape(-1)):
            return True
    return False


def _twice(x: Tensor) -> bool:
    """Whether a sigmoid was taken of a sigmoid."""
    node = x.grad_fn
    while node is not None and node.name() != "SigmoidBackward0":
        node = node.next_functions[0][0] if node.next_functions else None
    inner = node.next_functions[0][0] if node is not None else None
    return inner is not None and inner.name() == "SigmoidBackward0"
