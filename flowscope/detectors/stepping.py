"""`stale_parameters` and `gradient_accumulates`: an optimizer that steps other tensors, a zero_grad that is missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import WIRING, Detector, Finding, Flags, said
from flowscope.detectors.held import FOREIGN, Held, held_in
from flowscope.detectors.limit import Limit
from flowscope.detectors.rows import module_of, parameter_name
from flowscope.records import Record, RunHeader

UNDONE, UNDONE_RECORDS = 0.1, 5
"""A step of which less is left, so many records in a row, is undone (averages of two sets of weights leave half)."""
UNMOVED_RECORDS = 3
"""Weights that did not move though nothing says why: one record may be a step that was left out."""
NEVER_MOVED_RECORDS = 8
"""Likewise from the start on under an optimizer that counts its steps: it may leave the first out on purpose (while
the variance of its second moments is not known, six)."""
ROUNDING = 1e-6
"""An expected change below this share of the weights may be lost to rounding: that is no stale optimizer."""
CONVERGED = 1e-2
"""Weights that moved under gradients a hundred times as large may stand still: a line search finds nothing better."""


class StaleParameters(Detector):
    """The optimizer holds none of the parameters that get gradients, or its steps change none of them."""

    kind, level = "stale_parameters", WIRING
    shown_by = ("param_optimized",)
    advice = (
        "build the optimizer from model.parameters() of the model that is trained, after copies, moves and wrapping"
    )
    # the largest total gradient under which the weights moved
    begins_with: ClassVar[dict[str, Any]] = {"moved": 0.0}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the model, one where its steps are undone."""
        yield from said(self._undone(record))
        yield from self._wrong_tensors(record, header)

    def _undone(self, record: Record) -> Finding | None:
        kept = record.metrics.get("update_kept")
        if kept is None:
            return self.unseen(cause="undone")
        if not kept[0] < UNDONE:
            return None
        message = (
            f"of what the optimizer changed, {kept[0]:.2g} is left when the next step begins (limit {UNDONE}): "
            "something writes the weights back after each step"
        )
        advice = (
            "look at what copies or loads weights in the loop: an average is copied from the model (average.lerp_(w, "
            "rate)), not into it"
        )
        return self.found(
            "", kept[0], UNDONE, message, advice=advice, severity="error", records=UNDONE_RECORDS, cause="undone"
        )

    def _wrong_tensors(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        norms, held = record.metrics.get("param_grad_norm"), record.metrics.get("param_optimized")
        trainable = record.metrics.get("param_trainable")
        if norms is None or held is None or trainable is None or not norms.shape == held.shape == trainable.shape:
            yield self.unseen()
            return
        found, asks = held_in(record), trainable == 1
        learning = asks & (norms > 0)
        if found is not None and not found.steps.size:
            yield self._foreign(found, record, header)
            return
        if not learning.any() and not (found is not None and asks.any() and (held[asks] == 0).all()):
            yield self.unseen()
            return
        if not learning.any():
            first = parameter_name(record, header, int(np.argmax(asks)))
            message = (
                f"the optimizer holds none of the {int(asks.sum())} parameters of this model (the first is {first})"
            )
            yield self.found(module_of(first), asks.sum(), 0.0, message, severity="error")
            return
        count, first = int(learning.sum()), parameter_name(record, header, int(np.argmax(learning)))
        if bool((held[learning] == 0).all()):
            message = (
                f"the optimizer holds none of the {count} parameters of this model that get a gradient (the first is "
                f"{first}): it steps other tensors, those of a copy or of before a move"
            )
            yield self.found(module_of(first), count, 0.0, message, severity="error", records=1)
            return
        total = float(np.sqrt(np.square(norms[learning]).sum()))
        if not self._unmoved(record, learning & (held != 0) if found is None else learning & found.turn, found):
            ratio = record.metrics.get("update_ratio")
            if ratio is not None and bool((ratio > 0).any()):
                self.state["moved"] = max(self.state["moved"], total)
        elif total >= CONVERGED * self.state["moved"]:
            message = (
                f"{count} parameters got a gradient and the step changed not one entry of them (the first is {first}): "
                "what is stepped is not what the model computes with"
            )
            waits = not self.state["moved"] and "optimizer_steps" in record.metrics
            records = NEVER_MOVED_RECORDS if waits else UNMOVED_RECORDS
            yield self.found(module_of(first), count, 0.0, message, severity="error", records=records)

    def _foreign(self, found: Held, record: Record, header: RunHeader) -> Finding:
        """No optimizer of this model has stepped, another one has, and nothing else moves the weights."""
        asks = found.trainable
        if not found.facts[FOREIGN] > 0 or not asks.any() or not bool(found.still[asks].all()):
            return self.unseen()
        first = parameter_name(record, header, int(np.argmax(asks)))
        message = (
            f"the only optimizer that steps ({found.facts[FOREIGN]:.0f} times so far) holds none of the "
            f"{int(asks.sum())} parameters of this model (the first is {first}), and none of them changes"
        )
        records = UNMOVED_RECORDS
        return self.found(module_of(first), asks.sum(), 0.0, message, severity="error", records=records)

    @staticmethod
    def _unmoved(record: Record, learning: Flags, found: Held | None) -> bool:
        """Whether every learning parameter is exactly what it was, though its rate and gradient would move it."""
        same, norm = record.metrics.get("param_unchanged"), record.metrics.get("param_norm")
        ratio = record.metrics.get("update_ratio")
        if norm is None or ratio is None or ratio.shape != learning.shape:
            return False
        rate = record.metrics.get("param_lr", np.full(learning.shape, np.nan))
        learning = learning & (rate != 0)
        still = ratio == 0 if same is None or same.shape != learning.shape else same == 1
        still = still if found is None else found.still
        if not learning.any() or not bool(still[learning].all()):
            return False
        with np.errstate(all="ignore"):
            expected = rate * record.metrics["param_grad_norm"] / norm
        return bool((np.isnan(rate) | (expected > ROUNDING) | (norm == 0))[learning].any())


def never_stepped(calls: int, reason: str) -> Finding:
    """What is said without a record, as none can come: the loop ran so many times and no optimizer stepped."""
    message = f"scope.step was called {calls} times and nothing was ever updated: {reason}"
    advice = "call optimizer.step() after backward, with its parentheses"
    kind = StaleParameters.kind
    return Finding(kind, "", "error", calls, 0.0, message, advice, immediate=True, cause="unstepped")


class GradientAccumulates(Limit):
    """Gradients of the steps before are still in `.grad` when a step's first gradient arrives: no zero_grad."""

    kind, metric, above, row, level = "gradient_accumulates", "grad_carried", "carried_gradient", "", WIRING
    # zero_grad does not reach what the optimizer does not hold
    yields_to = frozenset({"stale_parameters", "parameters_not_optimized"})
    message = (
        "when this step's first gradient arrived, .grad held gradients of earlier steps, of {value:.2g} times the norm "
        "of what the optimizer then used (limit {limit:.2g}): they were not set to zero"
    )
    advice = "call optimizer.zero_grad() once a step, before backward (with accumulation: before the first micro-batch)"
