"""`non_finite`: names the first tensor, in the order of execution, that holds an inf or a NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import NUMBERS, Detector, Finding
from flowscope.detectors.rows import each_flow, module_of, parameter_name
from flowscope.records import Record, RunHeader

CANARY = ("input", "forward", "backward", "loss")

SKIPPED = frozenset({"skipped", "possibly_skipped"})
"""Flags of a step that GradScaler left out, or may have."""
SMALLEST_SCALE = 1.0
"""A scale below this only shrinks the gradients further: what overflows there is not due to fp16's scaling (ours)."""

ADVICE = {
    "input": "check the data of this batch (missing values, a zero standard deviation) and drop or clean it",
    "weight": "load the last good checkpoint; then lower the learning rate or clip gradients (clip_grad_norm_)",
    "activation": "look at that module for exp, log, division or a square root without eps; if it was finite before, "
    "lower the learning rate",
    "loss": "compute the loss from logits (cross_entropy, log_softmax), not from log(softmax); add eps to log, "
    "division and square root",
    "gradient": "look at that module's backward (square root or norm at 0, where() over a division); clip gradients, "
    "lower the learning rate",
}


class NonFinite(Detector):
    """The first bad tensor: input, weight, activation by depth, loss, gradient from the last point back, parameter."""

    kind, level = "non_finite", NUMBERS
    shown_by = ("nonfinite", "nonfinite_grad", "canary", "param_grad_norm")
    # additive masks hold -inf: an input that was non-finite while all else was fine is not a cause
    begins_with: ClassVar[dict[str, Any]] = {"last_step": None, "harmless_input": False}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """At most one finding: the first bad tensor."""
        if not SKIPPED.isdisjoint(record.flags):
            return self._collapsed_scale(record)
        canary = dict(zip(CANARY, record.metrics.get("canary", np.zeros(4)).tolist(), strict=False))
        sampled = "unsampled" not in record.flags
        since, self.state["last_step"] = self.state["last_step"], record.step
        later = [*self._sampled(record, header, canary)] if sampled else []
        later = later or [*self._canary_only(canary, sampled)]
        if not later:
            self.state["harmless_input"] |= canary.get("input", 0) > 0
            return [] if sampled else [self.unseen()]
        first = later[0]
        if canary.get("input", 0) > 0 and not self.state["harmless_input"]:
            first = ("input", "", "the model's input", canary["input"])
        return [self._finding(first, record, exact=sampled and first[0] != "canary", since=since)]

    def _collapsed_scale(self, record: Record) -> Iterable[Finding]:
        """A GradScaler halves its scale with each step it skips; a few are usual, below 1 no scale is to blame."""
        scale = float(record.metrics.get("loss_scale", np.array([np.nan]))[0])
        if not scale < SMALLEST_SCALE:
            return [self.unseen()]
        words = f"the GradScaler skips step after step and its scale fell to {scale:.3g}: gradients overflow without it"
        advice = "watch a few steps without scaler and autocast: the first non-finite tensor is then named"
        return [self.found("", scale, SMALLEST_SCALE, words, advice=advice, certain=True)]

    def _sampled(
        self, record: Record, header: RunHeader, canary: Mapping[str, float]
    ) -> Iterator[tuple[str, str, str, float]]:
        yield from _weights(record, header)
        for view in each_flow(record, header):
            counts = view.get("nonfinite")
            if counts is not None and bool((counts > 0).any()):
                at = int(np.argmax(counts > 0))
                yield "activation", view.point(at), f"the activation of {view.point(at)}", float(counts[at])
        if canary.get("loss", 0) > 0 or (record.loss is not None and not np.isfinite(record.loss)):
            yield "loss", "", "the loss (all activations seen are finite)", max(canary.get("loss", 0), 1.0)
        for view in reversed([*each_flow(record, header)]):
            counts = view.get("nonfinite_grad")
            if counts is not None and bool((counts > 0).any()):
                at = int(np.flatnonzero(counts > 0)[-1])
                # a clean gradient at the next point: the block between them made it
                place = view.block(at) if at < counts.size - 1 else view.point(at)
                yield "gradient", place, f"the gradient at {view.point(at)}", float(counts[at])
        norms = record.metrics.get("param_grad_norm")
        if norms is not None and bool(np.isinf(norms).any()):
            name = parameter_name(record, header, int(np.argmax(np.isinf(norms))))
            yield "gradient", module_of(name), f"the gradient of the parameter {name}", float(np.isinf(norms).sum())

    @staticmethod
    def _canary_only(canary: Mapping[str, float], sampled: bool) -> Iterator[tuple[str, str, str, float]]:
        words = {"forward": "the forward pass", "loss": "the loss", "backward": "the backward pass"}
        for part, words_for in words.items():
            if canary.get(part, 0) > 0:
                yield "canary", "", words_for + (" of a step between two records" if sampled else ""), canary[part]

    def _finding(
        self, first: tuple[str, str, str, float], record: Record, *, exact: bool, since: int | None
    ) -> Finding:
        tensor, where, words, count = first
        steps = f"step {record.step}"
        if not exact and since is not None and since + 1 < record.step:
            steps = f"steps {since + 1} to {record.step}"
        advice = ADVICE.get(tensor, "watch(..., every=1) pinpoints the first module")
        if not exact and tensor == "input":
            advice += "; watch(..., every=1) pinpoints the batch"
        message = f"the first non-finite tensor is {words}: {count:.0f} bad, {steps}"
        if tensor == "gradient" and "parameter" in words:
            message = f"the first non-finite tensor is {words} ({count:.0f} parameters alike), {steps}"
        return self.found(where, count, 0.0, message, advice=advice, certain=True)


def _weights(record: Record, header: RunHeader) -> Iterator[tuple[str, str, str, float]]:
    """A weight that was bad before the forward.

    A bad gradient makes its weight bad in the same step, so weights are a cause only where they are not exactly those
    that got a bad gradient; a frozen one (a mask kept as a parameter) only where a gradient suffered.
    """
    norms = record.metrics.get("param_norm")
    if norms is None or not bool(np.isinf(norms).any()):
        return
    bad = np.isinf(norms)
    hurt = np.isinf(record.metrics.get("param_grad_norm", np.full(norms.shape, np.nan)))
    trainable = record.metrics.get("param_trainable", np.ones(norms.shape)) == 1
    if np.array_equal(bad, hurt) or not (hurt.any() or (bad & trainable).any()):
        return
    name = parameter_name(record, header, int(np.argmax(bad)))
    yield "weight", module_of(name), f"the weight {name}", float(bad.sum())
