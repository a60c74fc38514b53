"""`attention_logits`: attention logits that grow until the softmax is one-hot, before the loss diverges."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import Array
from flowscope.detectors.limit import Beyond, Limit
from flowscope.records import Record

GROWTH = 4.0
"""Logits that were large from the start (a pretrained model's) and stay so are its way of working."""


class AttentionLogits(Limit):
    """The largest logit of a layer is above its limit, and several times what it was when it was least."""

    kind, metric, above, row = "attention_logits", "attention_logit_max", "attention_logit", "layer"
    shown_by = ("attention_logit_max", "attention_entropy")
    message = (
        "the largest attention logit of {where} is {value:.3g} (limit {limit:.3g}; {count} of {size} layers){more}: as "
        "it grows its softmax becomes one-hot, and the loss will diverge"
    )
    advice = (
        "normalise queries and keys before their product (QK-norm), or clip: scale the query and key weights of heads "
        "over the limit down after each step (QK-Clip); a lower learning rate only delays it"
    )
    begins_with: ClassVar[dict[str, Any]] = {"least": np.zeros(0)}

    def measured(self, record: Record) -> tuple[str, Array | None]:
        """The logits of the layers that have grown."""
        now = record.metrics.get(self.metric)
        if now is None:
            return self.metric, None
        least = self.state["least"]
        least = np.fmin(least, now) if least.shape == now.shape else now
        self.state["least"] = least
        # 0 is far inside of the limit
        return self.metric, np.where(now >= GROWTH * np.maximum(least, 1.0), now, np.where(np.isnan(now), np.nan, 0.0))

    def more(self, beyond: Beyond) -> str:
        """The head, and what the layer began with."""
        heads, least = beyond.record.metrics.get("attention_logit_head"), self.state["least"][beyond.row]
        known = heads is not None and heads.shape == beyond.values.shape
        head = f", in head {heads[beyond.row]:.0f}" if heads is not None and known else ""
        return f"{head}, {beyond.value / max(least, 1.0):.2g} times the least it was"
