"""`non_finite`: names the first tensor, in the order of execution, that holds an inf or a NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import NUMBERS, Detector, Finding
from flowscope.detectors.rows import FlowView, each_flow, module_of, parameter_name
from flowscope.records import Record, RunHeader

CANARY = ("input", "forward", "backward", "loss")

SKIPPED = frozenset({"skipped", "possibly_skipped"})
"""Flags of a step that GradScaler left out, or may have."""
SMALLEST_SCALE = 1.0
"""A scale below this only shrinks the gradients further: what overflows there is not due to fp16's scaling (ours)."""

PINPOINT = "watch(..., every=1) pinpoints the first module"

ADVICE = {
    "input": "check the data of this batch (missing values, a zero standard deviation) and drop or clean it",
    "weight": "load the last good checkpoint; then lower the learning rate or clip gradients (clip_grad_norm_)",
    "step": "look at what the optimizer multiplies and divides by: a learning rate that is no number, eps=0, a loaded "
    "state. Then load the last good checkpoint",
    "activation": "look at that module for exp, log, division or a root without eps, and for a mask that leaves a row "
    "nothing to attend to (a sample of padding only). If it was finite before, lower the learning rate",
    "loss": "a mean over nothing is NaN: look for an empty batch, labels that are all ignored, a mask that hides all. "
    "Else compute the loss from logits (cross_entropy, not log(softmax)) and add eps to log, division and root",
    "gradient": "a root (norm, distance, standard deviation) at 0 has no finite derivative, nor has where() over a "
    "division: add eps inside, or torch.autograd.set_detect_anomaly(True) for one step names the operation. Else clip "
    "gradients and lower the learning rate",
}
BETWEEN = {
    "forward": f"{PINPOINT}; often it is a mask that leaves a row nothing (a sample of padding only), or exp, log or "
    "division without eps. If the weights themselves are not finite, the step before spoilt them",
    "loss": "a mean over nothing is NaN: look for an empty batch, labels that are all ignored, a mask that hides all. "
    f"Else log or division without eps; {PINPOINT}",
    "backward": "often it is a root (norm, distance) or a log at 0 (add eps inside), or a row that a mask leaves "
    "nothing to attend to. "
    f"{PINPOINT}, torch.autograd.set_detect_anomaly(True) the operation",
}
"""Of a step between two records, of which only the part is known."""


class NonFinite(Detector):
    """The first bad tensor: input, weight, activation by depth, loss, gradient from the last point back, parameter."""

    kind, level = "non_finite", NUMBERS
    shown_by = ("nonfinite", "nonfinite_grad", "canary", "param_grad_norm")
    # additive masks hold -inf: an input that was non-finite while all else was fine is not a cause
    begins_with: ClassVar[dict[str, Any]] = {
        "last_step": None,
        "harmless_input": False,
        "last_good": None,
        "scaled": False,
    }

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """At most one finding: the first bad tensor."""
        if not SKIPPED.isdisjoint(record.flags):
            return self._collapsed_scale(record)
        canary = dict(zip(CANARY, record.metrics.get("canary", np.zeros(4)).tolist(), strict=False))
        sampled = "unsampled" not in record.flags
        left_out = self._left_out(record)
        if left_out:
            canary["backward"] = 0.0
        since, self.state["last_step"] = self.state["last_step"], record.step
        later = exact = [*self._sampled(record, header, canary, left_out=left_out)] if sampled else []
        later = later or [*self._canary_only(canary, sampled)]
        if not later:
            if sampled:
                self.state["last_good"] = record.step
            self.state["harmless_input"] |= canary.get("input", 0) > 0
            return [] if sampled else [self.unseen()]
        first = later[0]
        if canary.get("input", 0) > 0 and not self.state["harmless_input"]:
            first = ("input", "", "the model's input", canary["input"])
        return [self._finding(first, record, exact=sampled and (first in exact or first[0] == "input"), since=since)]

    def _collapsed_scale(self, record: Record) -> Iterable[Finding]:
        """A GradScaler halves its scale with each step it skips; a few are usual, below 1 no scale is to blame."""
        scale = float(record.metrics.get("loss_scale", np.array([np.nan]))[0])
        if not scale < SMALLEST_SCALE:
            return [self.unseen()]
        words = f"the GradScaler skips step after step and its scale fell to {scale:.3g}: gradients overflow without it"
        advice = "watch a few steps without scaler and autocast: the first non-finite tensor is then named"
        return [self.found("", scale, SMALLEST_SCALE, words, advice=advice, certain=True)]

    def _left_out(self, record: Record) -> bool:
        """Whether a GradScaler keeps from the optimizer what overflows in backward.

        Where nobody gave it to watch, the backward passes of steps it skips are those of the next step it takes: the
        loss was multiplied, and the gradients that were used are finite.
        """
        used = record.metrics.get("param_grad_norm")
        if used is not None and not bool(np.isnan(used).all()):
            scale = float(record.metrics.get("gradient_scale", np.ones(1))[0])
            self.state["scaled"] = scale > SMALLEST_SCALE and not bool(np.isinf(used).any())
        return bool(self.state["scaled"])

    def _sampled(
        self, record: Record, header: RunHeader, canary: Mapping[str, float], *, left_out: bool
    ) -> Iterator[tuple[str, str, str, float]]:
        yield from _weights(record, header, self.state["last_good"])
        for view, at, count in _in_time(each_flow(record, header), "nonfinite"):
            yield "activation", view.point(at), f"the activation of {view.point(at)}", count
        if canary.get("loss", 0) > 0 or (record.loss is not None and not np.isfinite(record.loss)):
            yield from _beside(record, header)
            yield "loss", "", "the loss (all activations seen are finite)", max(canary.get("loss", 0), 1.0)
        last_first = reversed([*each_flow(record, header)])
        for view, at, count in [] if left_out else _in_time(last_first, "nonfinite_grad", back=True):
            # a clean gradient at the next point: the block between them made it
            place = view.block(at) if at < len(view.layout.points) - 1 else view.point(at)
            yield "gradient", place, f"the gradient at {view.point(at)}", count
        norms = record.metrics.get("param_grad_norm")
        if norms is not None and bool(np.isinf(norms).any()):
            name = parameter_name(record, header, int(np.argmax(np.isinf(norms))))
            yield "gradient", module_of(name), f"the gradient of the parameter {name}", float(np.isinf(norms).sum())
        yield from _spoilt(record, header)

    @staticmethod
    def _canary_only(canary: Mapping[str, float], sampled: bool) -> Iterator[tuple[str, str, str, float]]:
        words = {"forward": "the forward pass", "loss": "the loss", "backward": "the backward pass"}
        for part, words_for in words.items():
            if canary.get(part, 0) > 0:
                yield part, "", words_for + (" of a step between two records" if sampled else ""), canary[part]

    def _finding(
        self, first: tuple[str, str, str, float], record: Record, *, exact: bool, since: int | None
    ) -> Finding:
        tensor, where, words, count = first
        steps = f"step {record.step}"
        if not exact and since is not None and since + 1 < record.step:
            steps = f"steps {since + 1} to {record.step}"
        advice = ADVICE[tensor] if exact or tensor not in BETWEEN else BETWEEN[tensor]
        if not exact and tensor == "input":
            advice += "; watch(..., every=1) pinpoints the batch"
        message = f"the first non-finite tensor is {words}: {count:.0f} bad, {steps}"
        if (tensor == "gradient" and "parameter" in words) or tensor == "step":
            message = f"the first non-finite tensor is {words} ({count:.0f} parameters alike), {steps}"
        return self.found(where, count, 0.0, message, advice=advice, certain=True)


def _in_time(views: Iterable[FlowView], metric: str, *, back: bool = False) -> list[tuple[FlowView, int, float]]:
    """Where each flow was bad first and how many entries were, the flows in time too.

    Of several calls of the flows in a step (micro-batches) the first that was bad, and in that the first point, or,
    where gradients go `back`, the last.
    """
    found = []
    for order, view in enumerate(views):
        counts = view.get(metric)
        if counts is None or not bool((counts > 0).any()):
            continue
        calls = view.get(f"{metric}_call")
        known = np.ones(counts.shape) if calls is None or calls.shape != counts.shape else np.nan_to_num(calls, nan=1.0)
        first = float(np.min(known, where=counts > 0, initial=np.inf))
        points = np.flatnonzero((counts > 0) & (known == first))
        at = int(points[-1 if back else 0])
        found.append((first, order, view, at, float(counts[at])))
    return [(view, at, count) for _, _, view, at, count in sorted(found, key=lambda one: one[:2])]


def _beside(record: Record, header: RunHeader) -> Iterator[tuple[str, str, str, float]]:
    """What a block returned beside the hidden state, where the loss is bad and all hidden states are not."""
    for view in each_flow(record, header):
        counts = view.get("nonfinite_beside")
        if counts is not None and bool((counts > 0).any()):
            at = int(np.argmax(counts > 0))
            words = f"what {view.point(at)} returns beside the hidden state (which is finite)"
            yield "activation", view.point(at), words, float(counts[at])


def _weights(record: Record, header: RunHeader, last_good: int | None) -> Iterator[tuple[str, str, str, float]]:
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
    where, count = module_of(name), float(bad.sum())
    if last_good == record.step - 1:  # all was finite then, its gradients too
        yield (
            "step",
            where,
            f"the weight {name} after the optimizer's step {last_good}, which got finite gradients",
            count,
        )
        return
    yield "weight", where, f"the weight {name}{_step_between(last_good, record.step)}", count


def _step_between(last_good: int | None, step: int) -> str:
    return "" if last_good is None else f", spoilt by an optimizer's step between {last_good} and {step - 1}"


def _spoilt(record: Record, header: RunHeader) -> Iterator[tuple[str, str, str, float]]:
    """A weight that the step itself made bad, of finite weights and finite gradients."""
    columns = [record.metrics.get(name) for name in ("update_ratio", "param_norm", "param_grad_norm")]
    ratio, norm, gradient = columns
    if ratio is None or norm is None or gradient is None or not ratio.shape == norm.shape == gradient.shape:
        return
    bad = np.isinf(ratio) & np.isfinite(norm) & (norm > 0) & np.isfinite(gradient)
    if bad.any():
        name = parameter_name(record, header, int(np.argmax(bad)))
        words = f"the weight {name} after this step, which got finite gradients"
        yield "step", module_of(name), words, float(bad.sum())
