"""`no_signal`: everything is connected, something was learned, and now the gradient of all parameters is exactly 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import OUTCOME, Detector, Finding
from flowscope.detectors.held import held_in
from flowscope.detectors.losses import losses_of
from flowscope.records import Record, RunHeader

RECORDS = 3
"""Records in a row: single batches may hold nothing to learn."""
LEARNED = 0.5
"""A loss that had fallen below this share of its start when the gradient vanished has nothing left to teach."""
ENOUGH = 5
"""Losses other than 0, at the start and at the end, whose medians say so."""


class NoSignal(Detector):
    """A gradient that is there and exactly 0: a warning where the loss had not come down before, else an info.

    From the start on it is `no_gradient`. A loss of exactly 0 alone says nothing: that of policy gradients is 0 by
    construction while its gradient is not.
    """

    kind, level = "no_signal", OUTCOME
    yields_to = frozenset({"no_gradient", "dead_units", "stale_parameters"})
    shown_by = ("param_grad_norm",)
    advice = (
        "look at what the loss counts: a mask written in place, targets that are all ignored, advantages without "
        "variance within a group, a margin that every sample keeps"
    )
    # whether there ever was a gradient, records without since, and the losses other than 0, first and latest
    begins_with: ClassVar[dict[str, Any]] = {
        "alive": False,
        "silent": 0,
        "first": deque(maxlen=ENOUGH),
        "latest": deque(maxlen=ENOUGH),
    }

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        self._learn(record)
        held = held_in(record)
        seen = None if held is None else held.gradient[held.turn & ~np.isnan(held.gradient)]
        if held is None or seen is None or seen.size == 0:
            yield self.unseen()
            return
        if bool((seen != 0).any()) or bool(held.lost.any()):
            self.state["alive"], self.state["silent"] = True, 0
            return
        self.state["silent"] += 1
        if not self.state["alive"]:
            return  # `no_gradient` tells of it
        learned = self._learned()
        message = (
            f"the gradient of all {seen.size} parameters is exactly 0 in the last {self.state['silent']} records, "
            "though everything is connected: the loss has no signal"
        )
        if learned:
            message += ", and had come down before"
        yield self.found("", 0.0, 0.0, message, severity="info" if learned else "warning", records=RECORDS)

    def _learn(self, record: Record) -> None:
        for loss in losses_of(record):
            if loss != 0:
                first: deque[float] = self.state["first"]
                if len(first) < ENOUGH:
                    first.append(abs(float(loss)))
                self.state["latest"].append(abs(float(loss)))

    def _learned(self) -> bool:
        """Whether the loss had come down when it ended; also where no losses are known."""
        first, latest = self.state["first"], self.state["latest"]
        return len(first) < ENOUGH or median(latest) <= LEARNED * median(first)
