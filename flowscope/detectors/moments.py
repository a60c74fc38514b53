"""`stale_moment`: Adam's second moment is older than the gradients, so that its steps are larger than the rate."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import Array
from flowscope.detectors.limit import Beyond, Limit
from flowscope.records import Record

FIRST_STEP = (0.9, 1.02)
"""Adam's first step moves every entry by the whole learning rate. An optimizer that began otherwise is not judged."""

RECENT, LATEST = 20, 5
"""So many records make what is usual in this run, without the latest of them."""
OUTGROWN = 1.5
"""Beyond the largest of them by this factor gradients have outgrown what was remembered: steps of the whole rate are
usual without a first moment (beta1 0, as for GANs), and where gradients keep their direction."""


class StaleMoment(Limit):
    """Half of the parameters move by more than a multiple of the learning rate: far more than Adam's 0.2 to 0.4."""

    kind, metric, above, row, records = "stale_moment", "update_rms", "moment_ratio", "", 1
    symptom = "ever"
    shown_by = ("update_rms", "param_lr")
    message = (
        "half of the parameters move by more than {value:.3g} times the learning rate in one step (limit {limit:.3g}; "
        "usual for Adam: 0.2 to 0.4){more}: the gradients have outgrown the second moment"
    )
    advice = (
        "lower beta2 (0.95 instead of 0.999), clip gradients, or clip updates by their rms as StableAdamW does "
        "(arXiv 2304.13013): a loss spike follows within a few steps"
    )
    begins_with: ClassVar[dict[str, Any]] = {"adam": -1, "recent": deque(maxlen=RECENT)}

    def measured(self, record: Record) -> tuple[str, Array | None]:
        """[1] the median over parameters of update_rms / learning rate; None where it is not known to be Adam."""
        ratio = self._ratio(record) if self.state["adam"] else None
        if ratio is None or not np.isfinite(ratio).any():
            return self.metric, None
        median = float(np.median(ratio[~np.isnan(ratio)]))
        if self.state["adam"] < 0:
            self.state["adam"] = int(FIRST_STEP[0] < median < FIRST_STEP[1] and record.step == 0)
        recent = self.state["recent"]
        before = list(recent)[:-LATEST]  # a rise takes some steps, and is no measure of itself
        usual = max(before) if len(before) >= LATEST else 0.0
        if median <= self.limit:
            recent.append(median)
        elif median <= OUTGROWN * usual:
            return self.metric, None
        return self.metric, np.array([median]) if self.state["adam"] else None

    def more(self, beyond: Beyond) -> str:
        """The parameter that moves most."""
        ratio, labels = self._ratio(beyond.record), beyond.record.labels(self.metric)
        if ratio is None or len(labels) != len(ratio):
            return ""
        most = int(np.nanargmax(ratio))
        return f", most {labels[most]} by {ratio[most]:.3g}"

    def _ratio(self, record: Record) -> Array | None:
        change, rate = record.metrics.get(self.metric), record.metrics.get("param_lr")
        if change is None or rate is None or change.shape != rate.shape:
            return None
        with np.errstate(all="ignore"):
            return np.where((rate > 0) & (change > 0), change / rate, np.nan)
