"""`rank_desync`: replicas of one parameter that are no longer the same on all ranks."""

from __future__ import annotations

from flowscope.detectors.limit import Limit


class RankDesync(Limit):
    """A replicated parameter whose norm differs between ranks; plain data parallelism keeps them equal to the bit."""

    kind, metric, above, row = "rank_desync", "rank_gap", "rank_gap", "parameter"
    severity, records = "error", 1
    message = (
        "the norm of {where} differs between ranks by {value:.2g} of itself (limit {limit:.2g}; {count} of {size} "
        "parameters differ): the ranks train different models"
    )
    advice = (
        "call the wrapped module (ddp(x), not ddp.module(x)) in every step and clip by the norm over all ranks; "
        "then broadcast the parameters from rank 0 or restart from a checkpoint"
    )
