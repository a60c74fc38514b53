"""`exploding_gradient` as a spike: the gradient's total norm leaves its usual range, before the loss follows.

A gradient norm has a unit and, in healthy runs, a tail: it is compared in logarithms with the run's own recent records,
by their median, their spread and their largest. A trend is no spike: it widens the spread it is measured by.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import Detector, Finding, said
from flowscope.detectors.gradients import ExplodingGradient
from flowscope.detectors.losses import deviation, losses_of
from flowscope.records import Record, RunHeader

WINDOW = 50
"""How many records, of those that were no spike, make the usual range."""
ENOUGH = 20
"""How many it needs before it says anything: the first steps of a run are no usual range."""
NOISE = 8.0
"""Standard deviations of the logarithm beyond the median that are no noise."""
ABOVE_LARGEST = 1.5
"""And this many times as far (in logarithms) above the median as the largest of the window."""
CERTAIN = 10.0
"""Beyond the limit by this factor there is nothing to wait for."""


class GradientSpike(Detector):
    """The total gradient norm of two records in a row, or one far beyond, outside this run's usual range."""

    kind = ExplodingGradient.kind
    yields_to = frozenset({"exploding_gradient", "loss_spike", "update_too_large"})
    shown_by, extreme = ExplodingGradient.shown_by, ExplodingGradient.extreme
    advice = "clip gradients (clip_grad_norm_) a little above their usual norm, lower the learning rate"
    begins_with: ClassVar[dict[str, Any]] = {
        "window": deque(maxlen=WINDOW),
        "losses": deque(maxlen=ENOUGH),
        "outside": 0,
    }

    @property
    def name(self) -> str:
        """Apart from the rule on the gradient product."""
        return "gradient_spike"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the model."""
        del header
        norm, falling = total_gradient(record), self._falling(record)
        if norm is None:
            yield self.unseen(cause="spike")
            return
        value, window = math.log(norm), self.state["window"]
        if len(window) < ENOUGH:
            window.append(value)
            return
        size, level = len(window), median(window)
        factor = math.log(self.config.gradient_spike)
        rise = max(factor, NOISE * deviation(window, level), ABOVE_LARGEST * (max(window) - level))
        above = value - level
        self._learn(value, usual=above <= rise)
        if above <= rise or falling:
            close = above > rise - math.log(self.config.release_factor) and above > rise / 2
            yield from said(self.near(close, cause="spike"))
            return
        limit = math.exp(level + rise)
        message = (
            f"the total gradient norm is {norm:.3g}, {math.exp(min(above, 700)):.3g} times the median of the last "
            f"{size} usual records ({math.exp(level):.3g}; limit {limit:.3g}): the loss may follow"
        )
        yield self.found("", norm, limit, message, cause="spike", immediate=above > rise + math.log(CERTAIN))

    def _falling(self, record: Record) -> bool:
        """Whether the loss is clearly below its recent level: gradients that grow while it falls leave a plateau."""
        losses = losses_of(record)
        if losses.size == 0:
            return False
        value, window = median(losses.tolist()), list(self.state["losses"])
        self.state["losses"].append(value)
        if len(window) < ENOUGH:
            return False
        level = median(window)
        return bool(value < level - 3 * deviation(window, level))

    def _learn(self, value: float, *, usual: bool) -> None:
        """Add what is no spike; a level that lasts for a window becomes the usual one."""
        self.state["outside"] = 0 if usual else self.state["outside"] + 1
        if self.state["outside"] > WINDOW:
            self.state["window"].clear()
            self.state["outside"] = 0
            usual = True
        if usual:
            self.state["window"].append(value)


def total_gradient(record: Record) -> float | None:
    """The norm of all parameters' gradients, before clipping where that was measured; else the flow's largest.

    None where nothing was measured, or it is zero or not finite.
    """
    for name in ("param_grad_norm_raw", "param_grad_norm", "grad_norm"):
        values = record.metrics.get(name)
        if values is None or bool(np.isnan(values).all()):
            continue
        total = float(np.nanmax(values)) if name == "grad_norm" else float(np.sqrt(np.nansum(np.square(values))))
        return total if math.isfinite(total) and total > 0 else None
    return None
