"""`targets`: what the targets of some batches hold: classes that never count, and how much is ignored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench
from flowscope.trials.criteria import CLASSES, Criterion, criteria
from flowscope.trials.layout import SHORTEST, are_tokens, given, tokens_of
from flowscope.trials.padding import find_padding
from flowscope.trials.trial import Trial, TrialFinding

EXPECTED = 20
"""A class is missed for certain where so many of it were to be expected."""
SEQUENCES = 2
"""Targets of so many axes are tokens: many of a vocabulary are never used."""
MOSTLY = 0.9
"""A larger share of ignored targets is told; masked language models learn from 15 %."""

PADDED = 0.05
"""A larger share of padding among the targets that count is told."""


class Targets(Trial):
    """Count the targets of the batches."""

    name = "targets"
    proves = "each class is met, and targets count"
    blind = "targets that are wrong and look right"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """A finding for classes that never count, one for what is ignored, one for targets that are all equal."""
        found = [one for batch in bench.batches for one in criteria(bench, batch)[1]]
        classes = [one for one in found if one.kind == CLASSES and one.target.dtype == torch.int64]
        if not found:
            raise CannotJudgeError("the loss calls no loss function of torch")
        told: list[TrialFinding] = []
        sequences = _of_sequences(bench)
        for width in sorted({one.classes for one in classes}):
            told += self._classes([one for one in classes if one.classes == width], width, sequences)
        told += self._padding(bench, classes)
        others = [one.target.detach() for one in found if one.kind != CLASSES]
        if (
            others
            and all(bool((t == others[0].flatten()[0]).all()) for t in others)
            and sum(t.numel() for t in others) > 1
        ):
            message = f"all targets are {float(others[0].flatten()[0]):.4g}"
            told.append(self.failed("", message, "look at where targets are read: a column of zeros, a wrong key"))
        yield from told or [self.passed(f"the targets of {len(found)} losses differ, and count")]

    def _padding(self, bench: Bench, found: Sequence[Criterion]) -> Iterable[TrialFinding]:
        """Targets that count and are the token of padding, where that stands nowhere else."""
        call = bench.calls()[0]
        tokens = tokens_of(call)
        with contextlib.suppress(CannotJudgeError):
            padding = find_padding(bench, call)
            if tokens is None or not padding.where.any() or bool((tokens[~padding.where] == padding.token).any()):
                return
            of_tokens = [one for one in found if one.classes > int(tokens.max()) and _is_sequence(one, tokens)]
            counted = torch.cat([one.counted.cpu() for one in of_tokens] or [torch.zeros(0)])
            count = int((counted == padding.token).sum())
            # each row may end in one: the end of a text is often the same token
            if count > sum(tokens.shape[0] for _ in of_tokens) and count > PADDED * counted.numel():
                message = f"{count} of the {counted.numel()} targets that count are padding (token {padding.token})"
                advice = "set labels of padding to ignore_index (-100), unless writing it is to be learned"
                yield self.noted("", f"{message}, known from {padding.known}", advice)

    def _classes(self, found: Sequence[Criterion], width: int, sequences: bool) -> Iterable[TrialFinding]:
        counted = torch.cat([one.counted.cpu() for one in found])
        total = sum(one.target.numel() for one in found)
        empty = [one for one in found if one.counted.numel() == 0]
        share = 1 - counted.numel() / total
        if empty:
            message = f"no target counts in {len(empty)} of {len(found)} batches: the mean is over nothing"
            yield self.failed("", message, "leave such batches out, or look why all targets are ignored")
        elif share > MOSTLY:
            yield self.noted(
                "", f"{share:.0%} of the targets are ignored", "right for prompts that are not to be learned"
            )
        seen = set(counted.tolist())
        left_out = found[0].ignored
        count = 0 if sequences or not 0 <= left_out < width else total - counted.numel()
        if count >= EXPECTED and seen:
            message = f"class {left_out} of {width} never counts: ignore_index leaves out {count} of {total} targets"
            advice = "where it stands for no label, give it a number that is no class (255, -100); else let it count"
            yield self.failed("", message, advice)
            seen.add(left_out)
        missing = sorted(set(range(width)) - seen)
        if len(seen) == 1 and counted.numel() >= EXPECTED and width > 1:
            message = f"all {counted.numel()} targets are of class {min(seen)}"
            yield self.failed("", message, "look at where targets are read, and whether the data is shuffled")
        elif missing:
            yield self._missing(missing, counted, width, found[0].target)

    def _missing(self, missing: list[int], counted: Tensor, width: int, target: Tensor) -> TrialFinding:
        names = ", ".join(map(str, missing[:5]))
        message = f"{len(missing)} of {width} classes are never met in {counted.numel()} targets: {names}"
        advice = "look whether labels begin at 1, and whether the head is wider than the data; a vocabulary may be"
        rows = target.dim() < SEQUENCES and counted.numel() / width >= EXPECTED and width <= counted.numel()
        sequence = target.dim() >= SEQUENCES or width > 256
        return self.failed("", message, advice) if rows and not sequence else self.noted("", message, advice)


def _is_sequence(one: Criterion, tokens: Tensor) -> bool:
    """Whether a loss has a target for (nearly) each token."""
    return one.target.numel() >= tokens.shape[0] * max(SHORTEST, tokens.shape[1] // 2)


def _of_sequences(bench: Bench) -> bool:
    """Whether the model is given tokens or sequences of vectors, whose ignored targets are padding."""
    inputs = given(bench.calls()[0])
    return any(are_tokens(x) or (x.dim() == 3 and x.is_floating_point()) for x in inputs)
