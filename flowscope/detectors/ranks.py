"""`rank_desync`: replicas of one parameter that are no longer the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowscope.detectors.detector import Detector, Finding, parameter_name
from flowscope.records import Record, RunHeader


class RankDesync(Detector):
    """A replicated parameter whose norm differs between ranks; plain data parallelism keeps them equal to the bit."""

    kind = "rank_desync"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding that names the parameter with the largest gap."""
        gaps = record.metrics.get("rank_gap")
        if gaps is None or gaps.size == 0 or bool(np.isnan(gaps).all()):
            yield Finding(self.kind, level="unseen")
            return
        worst, limit = int(np.nanargmax(gaps)), self.config.rank_gap
        value = float(gaps[worst])
        if value <= limit:
            if value > limit / self.config.release_factor:
                yield Finding(self.kind, level="near")
            return
        where, count = parameter_name(record, header, worst), int((gaps > limit).sum())
        yield Finding(
            self.kind,
            where,
            "error",
            value,
            limit,
            f"the norm of {where} differs between ranks by {value:.2g} of itself (limit {limit:.2g}; {count} of "
            f"{gaps.size} parameters differ): the ranks train different models",
            "call the wrapped module (ddp(x), not ddp.module(x)) in every step and clip by the norm over all ranks; "
            "then broadcast the parameters from rank 0 or restart from a checkpoint",
            immediate=True,
        )
