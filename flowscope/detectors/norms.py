"""`train_eval_gap`: normalisation layers whose running statistics are not those of the batches they see."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowscope.detectors.detector import Detector, Finding, label_of
from flowscope.records import Record, RunHeader

GAP_RECORDS = 3
"""Running statistics follow by a tenth a step: after a jump of the weights they need some records."""


class TrainEvalGap(Detector):
    """What evaluation will compute with is far from what training computes with."""

    kind = "train_eval_gap"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding that names the module with the largest gap."""
        gaps = record.metrics.get("norm_gap")
        if gaps is None or gaps.size == 0 or bool(np.isnan(gaps).all()):
            yield Finding(self.kind, level="unseen")
            return
        if record.step < self.config.gap_steps:
            return  # the running statistics are still those of the start
        worst, limit = int(np.nanargmax(gaps)), self.config.norm_gap
        value = float(gaps[worst])
        if value <= limit:
            if value > limit / self.config.release_factor:
                yield Finding(self.kind, level="near")
            return
        where, count = label_of(record, header, "norm_gap", worst, "module"), int((gaps > limit).sum())
        yield Finding(
            self.kind,
            where,
            "warning",
            value,
            limit,
            f"the running statistics of {where} are {value:.3g} batch standard deviations off what its batches have "
            f"(limit {limit:.3g}; {count} of {gaps.size} such modules): model.eval() will compute something else",
            "give the module a momentum of about 0.1 (0 never updates its running statistics), or renew them by a pass "
            "over the training data in train mode before evaluating",
            records=GAP_RECORDS,
        )
