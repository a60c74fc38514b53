"""`same_batch`: each step is given the batch of the step before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from flowscope.detectors.detector import Detector, Finding
from flowscope.records import Record, RunHeader

RECORDS = 3
"""Records in a row: a batch may be used for two steps on purpose."""


class SameBatch(Detector):
    """A note, once: full-batch training is legitimate.

    Only neighbouring steps tell (the first ten, or `every=1`): a data set that is read in a fixed order shows the same
    batch in every tenth step if it has ten.
    """

    kind = "same_batch"
    shown_by = ("input_checksum",)
    advice = (
        "right for training on one batch or on the whole data set at once; else look at what the loop asks the loader "
        "for (next(iter(loader)) makes it anew each time), at a cache, and at a generator that is seeded in the loop"
    )
    # the last record's step and checksum, and the step in which that batch was first seen
    begins_with: ClassVar[dict[str, Any]] = {"step": -1.0, "last": [0.0, 0.0], "since": -1.0}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        found = record.metrics.get("input_checksum")
        if found is None or found.shape != (2,):
            yield self.unseen()
            return
        now, before = [float(x) for x in found], [float(x) for x in self.state["last"]]
        neighbours, same = record.step == self.state["step"] + 1, now == before
        if not (same and neighbours):
            self.state["since"] = float(record.step)
        self.state["step"], self.state["last"] = float(record.step), now
        if not neighbours:
            yield self.unseen()
        elif same:
            message = f"the input of this step is that of step {self.state['since']:.0f}, to the last bit"
            yield self.found("", record.step, self.state["since"], message, severity="info", records=RECORDS)
