"""`constant_output` before it is constant: embeddings that their loss draws to one point."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.collapse import EMBEDDING_RECORDS, STARTED_APART, ConstantOutput
from flowscope.detectors.detector import OUTCOME, Detector, Finding
from flowscope.records import Record, RunHeader

DRAWN, DRAWN_SPREAD = 0.25, 0.3
"""Both the deviation of the outputs and the share of their mean square that it makes have fallen to less than this of
what they were: of 145 healthy programs none came that far."""
FIRST_STEPS = 20
"""Before, embeddings come together and part again while they learn their mean."""
ONE = ("output_spread", "output_deviation", "output_width", "loss_classes")
"""Numbers of the whole model, without which nothing is said."""


class DrawnTogether(Detector):
    """Outputs of several values, under a loss that is no choice among classes, come together and stay so.

    One value a sample may well learn a constant (returns), and probabilities the frequencies of their classes. That the
    loss falls says nothing here: it falls by that.
    """

    kind, level = "constant_output", OUTCOME
    yields_to = frozenset({"representation_collapse", "rank_collapse", "constant_output"})
    explains = frozenset({"constant_output"})
    shown_by = ConstantOutput.shown_by
    advice = (
        "look for what keeps outputs of different samples apart: the sign of a margin, negatives, labels that belong "
        "to other samples, a stop-gradient or a variance term"
    )
    begins_with: ClassVar[dict[str, Any]] = {"spread": None, "deviation": None}

    @property
    def name(self) -> str:
        """Beside the detector of outputs that are constant."""
        return "drawn_together"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the model."""
        del header
        found = [record.metrics.get(name) for name in ONE]
        numbers = [float(value[0]) for value in found if value is not None and value.size == 1]
        if len(numbers) < len(ONE):
            yield self.unseen(cause="drawn")
            return
        spread, deviation, width, classes = numbers
        contrast = record.metrics.get("output_contrast")
        if contrast is not None and contrast.size == 1:
            spread = float(np.fmax(spread, contrast[0]))
        start = self.state
        if start["spread"] is None:
            start.update(spread=spread, deviation=deviation)
        apart = start["spread"] > STARTED_APART * self.config.constant_output and start["deviation"] > 0
        if not apart or not width > 1 or np.isfinite(classes) or record.step < FIRST_STEPS:
            return
        left = deviation / start["deviation"]
        if not (left < DRAWN and spread < DRAWN_SPREAD * start["spread"]):
            return
        message = (
            f"all outputs are drawn to one point: their standard deviation over samples is {deviation:.2g}, {left:.2g} "
            f"of what it was (limit {DRAWN}), and {spread:.2g} of their mean square is variation, "
            f"{start['spread']:.2g} at the start"
        )
        yield self.found("", left, DRAWN, message, records=EMBEDDING_RECORDS, cause="drawn")
