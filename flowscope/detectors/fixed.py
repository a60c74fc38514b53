"""`constant_output` to the last digit: what the model answers has never depended on what it was given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.collapse import ConstantOutput
from flowscope.detectors.detector import WIRING, Detector, Finding
from flowscope.records import Record, RunHeader

RECORDS = 10
"""Records in a row from the start: a head that begins at 0 has left it after one step."""


class FixedOutput(Detector):
    """Answers that differ in no digit between samples, in no record since the start.

    A fact, not a symptom: the loss may fall all the same, by what the answers have in common.
    """

    kind, level = ConstantOutput.kind, WIRING
    yields_to = frozenset({"constant_output", "dead_units", "no_gradient", "symmetry", "stale_parameters"})
    explains = frozenset({"constant_output", "vanishing_gradient", "representation_collapse", "rank_collapse"})
    shown_by = ("output_deviation", "output_spread")
    advice = (
        "look at the end of the model: a normalisation over a single feature, a clamp, a rounding or a factor of 0, an "
        "input that is left out"
    )
    begins_with: ClassVar[dict[str, Any]] = {"varied": False}

    @property
    def name(self) -> str:
        """Beside the detector of outputs that hardly differ."""
        return "fixed_output"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the model."""
        del header
        deviation = record.metrics.get("output_deviation")
        if deviation is None or deviation.size == 0 or not bool(np.isfinite(deviation).all()):
            yield self.unseen(cause="fixed")
            return
        self.state["varied"] = self.state["varied"] or bool((deviation != 0).any())
        if self.state["varied"]:
            return
        message = (
            "the model has answered all samples of a batch the same, to the last digit, in every record since the "
            "start: nothing it is given arrives at its output"
        )
        yield self.found("", 0.0, 0.0, message, records=RECORDS, cause="fixed")
