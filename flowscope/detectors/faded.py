"""`representation_collapse` of what a model returns beside its answer: a code that the answer does without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.collapse import AS_FAR, EMBEDDING_RECORDS
from flowscope.detectors.detector import OUTCOME, Detector, Finding
from flowscope.detectors.drawn import DRAWN, FIRST_STEPS
from flowscope.detectors.rows import label_of
from flowscope.records import Record, RunHeader


class FadedOutputs(Detector):
    """All further outputs (mean and log-variance of a posterior) come to be the same for every sample, the answer not.

    One of them alone may (a variance that is the same everywhere).
    """

    kind, level = "representation_collapse", OUTCOME
    shown_by = ("further_deviation", "output_deviation")
    advice = (
        "lower the weight of the term that draws the code to one point (the KL term of a variational autoencoder), "
        "raise it from 0 over the first steps, or let the decoder see less of its own past"
    )
    begins_with: ClassVar[dict[str, Any]] = {"answer": None, "further": None}

    @property
    def name(self) -> str:
        """Beside the detector of hidden states."""
        return "faded_outputs"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the model."""
        further, answer = (record.metrics.get(name) for name in self.shown_by)
        if further is None or answer is None or not bool(np.isfinite(further).all()):
            yield self.unseen(cause="faded")
            return
        start = self.state
        if start["further"] is None or start["further"].shape != further.shape:
            start.update(further=further, answer=answer)
        if record.step < FIRST_STEPS or not bool((start["further"] > 0).all()):
            return
        left = further / start["further"]
        if not bool((left < DRAWN).all() and (answer > AS_FAR * start["answer"]).all()):
            return
        row = int(np.argmax(left))
        place = label_of(record, header, "further_deviation", row, "output")
        message = (
            f"what the model returns beside its answer is nearly the same for every sample: at {place} the standard "
            f"deviation over samples is {further[row]:.2g}, {left[row]:.2g} of what it was (limit {DRAWN}); the answer "
            "does without it"
        )
        yield self.found(place, left[row], DRAWN, message, records=EMBEDDING_RECORDS, cause="faded")
