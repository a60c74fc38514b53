"""`samples`: one sample is changed, then all change places, and no output but theirs must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench, Call, Seen
from flowscope.trials.layout import (
    changed_call,
    first_that_differs,
    given,
    layout_of,
    name_of,
    other_values,
    outputs,
)
from flowscope.trials.trial import Trial, TrialFinding

STEPS = 4096.0
"""Rounding where kernels add in another order for another row of a matrix."""


class Samples(Trial):
    """Change the last sample of a batch, in evaluation mode; then in training mode, where no batch statistics are.

    Then move each sample on by one place, in evaluation mode.
    """

    name = "samples"
    proves = "the output of a sample depends neither on the other samples of its batch nor on its place among them"
    blind = "batch statistics, which mix samples in training on purpose, are said and not judged"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: the first module where samples are mixed, or told apart by their place."""
        call, axis = bench.calls()[0], layout_of(bench).samples
        size = _batch_size(call, axis)
        statistics = [name for name, module in bench.model.named_modules() if _mixes_in_training(module)]
        said = ""
        for training in (False, True)[: 1 if statistics else 2]:
            first, pairs = self._with_another(bench, call, axis, training)
            said = "; the output is of pairs of samples" if pairs else said
            if first is not None:
                yield self._mixed(call, first, size)
                return
        if (first := _moved_with_place(bench, call, axis, size)) is not None:
            message = f"the output of a sample changes with its place in the batch, first at {name_of(first)}"
            advice = "look there for positions, a mask or an index along the samples' axis (layers of [T, B, D])"
            yield self.failed(first.path, message, advice)
            return
        said += f"; in training {statistics[0]} and {len(statistics) - 1} more mix them" if statistics else ""
        yield self.passed(f"changing one sample of {size} changes the output of no other{said}")

    @staticmethod
    def _with_another(bench: Bench, call: Call, axis: int, training: bool) -> tuple[Seen | None, bool]:
        """The first module whose output for the others changes with the last sample; whether outputs are of pairs."""
        size = _batch_size(call, axis)

        def of_others(x: Tensor) -> Tensor | None:
            return x.narrow(axis, 0, size - 1) if x.dim() > axis and x.shape[axis] == size else None

        def other(x: Tensor) -> Tensor:
            if x.dim() <= axis or x.shape[axis] != size or _is_mask(x):
                return x
            draw = torch.Generator().manual_seed(1)
            return torch.cat([x.narrow(axis, 0, size - 1), other_values(x, draw).narrow(axis, size - 1, 1)], axis)

        def of_other_pairs(x: Tensor) -> Tensor | None:
            rows = of_others(x)
            pairs = rows is not None and x.dim() == 2 and x.shape[0] == x.shape[1]
            return rows.narrow(1 - axis, 0, size - 1) if rows is not None and pairs else rows

        plain = bench.look(call, training=training)
        if not outputs(plain, of_others):
            raise CannotJudgeError("the output has no axis of the batch's size")
        changed = bench.look(changed_call(call, other), training=training)
        if first_that_differs(plain[-1:], changed[-1:], of_others) is None:
            return None, False
        if first_that_differs(plain[-1:], changed[-1:], of_other_pairs) is None:
            return None, True
        if first_that_differs(plain, bench.look(call, training=training), of_others):
            return None, False  # it keeps state between calls
        return first_that_differs(plain, changed, of_others) or plain[-1], False

    def _mixed(self, call: Call, first: Seen, size: int) -> TrialFinding:
        message = f"the outputs of {size - 1} samples change with the other one, first at {name_of(first)}"
        if _relates_rows(call):
            advice = "right where rows are the nodes of one graph; it is given an index or a square matrix of them"
            return self.noted(first.path, message, advice)
        advice = "look there for a softmax, mean, norm or reshape over axis 0, or attention with batch_first"
        return self.failed(first.path, message, advice)


def _moved_with_place(bench: Bench, call: Call, axis: int, size: int) -> Seen | None:
    """The first module whose output for a sample changes when all samples move on by one place.

    Not asked where rows are related, where another axis is as long (outputs of pairs), and of models that draw numbers.
    """
    if _relates_rows(call) or any(x.shape.count(size) > 1 for x in given(call)):
        return None

    def is_of_samples(x: Tensor) -> bool:
        return x.dim() > axis and x.shape[axis] == size

    def of_samples(x: Tensor) -> Tensor | None:
        return x if is_of_samples(x) and x.shape.count(size) == 1 else None

    def moved(by: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x.roll(by, axis) if is_of_samples(x) else x

    plain = bench.look(call)
    draws = first_that_differs(plain, replace(bench, seed=bench.seed + 1).look(call), lambda x: x)
    if draws is not None or not outputs(plain, of_samples):
        return None
    after = [
        replace(seen, tensors=tuple(map(moved(-1), seen.tensors))) for seen in bench.look(changed_call(call, moved(1)))
    ]
    if first_that_differs(plain[-1:], after[-1:], of_samples, STEPS) is None:
        return None
    if first_that_differs(plain, bench.look(call), of_samples) is not None:
        return None  # it keeps state between calls
    return first_that_differs(plain, after, of_samples, STEPS) or plain[-1]


def _batch_size(call: Call, axis: int) -> int:
    sizes = [x.shape[axis] for x in given(call) if x.dim() > axis]
    if not sizes or sizes[0] < 2:
        raise CannotJudgeError("it needs a batch of two samples or more")
    return int(sizes[0])


def _is_mask(x: Tensor) -> bool:
    return x.dtype == torch.bool or (not x.is_floating_point() and bool(((x == 0) | (x == 1)).all()))


def _mixes_in_training(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or "batchnorm" in type(module).__name__.lower()


def _relates_rows(call: Call) -> bool:
    """Whether a call says how rows are related: [2, E] or [E, 2] whole numbers, a sparse or a square matrix."""
    return any(
        x.is_sparse
        or x.layout is torch.sparse_csr
        or (x.dim() == 2 and not x.is_floating_point() and 2 in x.shape and x.dtype == torch.int64 and x.shape[0] == 2)
        or (x.dim() == 2 and x.shape[0] == x.shape[1] and x.shape[0] > 2)
        for x in given(call)
    )
