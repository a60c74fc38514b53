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
FADED = 0.1
"""So had gradients that had come down to this share of the first: a policy that always wins has equal returns."""
BOTH = 3
"""Losses above 0 and below: no such loss comes down to 0."""
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
        "signs": 0,
        "first": deque(maxlen=ENOUGH),
        "latest": deque(maxlen=ENOUGH),
        # and the norms of all gradients together, other than 0
        "large": deque(maxlen=ENOUGH),
        "small": deque(maxlen=ENOUGH),
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
            keep_ends(self.state["large"], self.state["small"], float(np.linalg.norm(seen)))
            return
        losses = losses_of(record)
        # batches between this record and the last had something to teach, where this one's loss is 0 and theirs are not
        between = losses.size > 0 and losses[-1] == 0 and bool((losses != 0).any())
        self.state["silent"] = 0 if between else self.state["silent"] + 1
        if between or not self.state["alive"]:
            return  # `no_gradient` tells of it
        learned = came_down(self.state["first"], self.state["latest"], LEARNED) or self._faded()
        learned = learned or self.state["signs"] == BOTH  # of policy gradients: their level says nothing
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
                keep_ends(self.state["first"], self.state["latest"], abs(float(loss)))
                self.state["signs"] = int(self.state["signs"]) | (1 if loss > 0 else 2)

    def _faded(self) -> bool:
        large, small = self.state["large"], self.state["small"]
        return len(large) == ENOUGH and came_down(large, small, FADED)


def keep_ends(first: deque[float], latest: deque[float], value: float) -> None:
    """Keep the first and the latest values."""
    if len(first) < ENOUGH:
        first.append(value)
    latest.append(value)


def came_down(first: deque[float], latest: deque[float], share: float) -> bool:
    """Whether what was kept had come down to a share of the start; also where too few are known."""
    return len(first) < ENOUGH or median(latest) <= share * median(first)
