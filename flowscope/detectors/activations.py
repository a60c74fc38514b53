"""`activation_headroom`: hidden states whose largest entry is close to where the numbers of their dtype end."""

from __future__ import annotations

from flowscope.detectors.limit import Beyond, Limit
from flowscope.records import metric_key

MASSIVE = 0.5
"""A channel that holds this share of the squared norm is what has to shrink."""


class ActivationHeadroom(Limit):
    """A little growth more, and a hidden state overflows (fp16 ends at 65504)."""

    kind, metric, below, per, row = "activation_headroom", "act_headroom", "headroom", "flow", "point"
    shown_by = ("act_headroom", "act_absmax", "top_channel_share")
    message = (
        "the largest entry of {where} could only be {value:.3g} times larger before its numbers end (limit "
        "{limit:.3g}; {count} of {size} points){more}"
    )
    advice = (
        "compute this part in bfloat16 or float32 (bfloat16 has the range of float32), or lower the learning rate; for "
        "fp8 scale by channel or by block"
    )

    def more(self, beyond: Beyond) -> str:
        """The channel that holds most of the squared norm."""
        for flow in (None, *beyond.record.flow_names):
            share, channel = (
                beyond.record.metrics.get(metric_key(name, flow)) for name in ("top_channel_share", "top_channel")
            )
            known = share is not None and channel is not None and share.shape == beyond.values.shape
            if known and share is not None and channel is not None and share[beyond.row] > MASSIVE:
                return f"; channel {channel[beyond.row]:.0f} holds {100 * share[beyond.row]:.0f} % of its squared norm"
        return ""
