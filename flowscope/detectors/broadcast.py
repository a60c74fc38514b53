"""`constant_output` by its cause: a loss that broadcasts one value a sample to one a pair of samples."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowscope.detectors.collapse import ConstantOutput
from flowscope.detectors.detector import WIRING, Array, Detector, Finding
from flowscope.records import Record, RunHeader


class BroadcastLoss(Detector):
    """Each answer is compared with the targets of all samples, so the best answer is their mean; or one row is all."""

    kind, level = ConstantOutput.kind, WIRING
    shown_by = ConstantOutput.shown_by

    @property
    def name(self) -> str:
        """Apart from the rule on the output."""
        return "broadcast_loss"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the run."""
        del header
        shape = record.metrics.get("loss_broadcast")
        if shape is None or shape.shape != (4,) or np.isnan(shape).any():
            if "loss_classes" not in record.metrics:  # this record's loss was not read
                yield self.unseen(cause="broadcast")
            return
        if shape[0] == 1:
            yield self._one_row(shape)
            return
        one, other, pairs = shapes_of(shape)
        message = (
            f"the loss broadcasts a tensor of shape {one} to {pairs}: what it is compared with has shape {other}, so "
            "each answer is compared with the targets of all samples, and their mean is learned"
        )
        advice = "give both the same shape before the loss: squeeze(1) on the one, or unsqueeze(1) on the other"
        yield self.found("", shape[2] * shape[3], shape[0], message, advice=advice, cause="broadcast")

    def _one_row(self, shape: Array) -> Finding:
        """The model answers one row for all samples."""
        one, wide = (f"({', '.join(f'{size:.0f}' for size in part if size)}, ...)" for part in (shape[:2], shape[2:]))
        message = (
            f"the model was given {shape[2]:.0f} samples and answers one row for all, which the loss broadcasts from "
            f"{one} to {wide}: every sample gets the same answer"
        )
        advice = "look in forward for a mean, a sum or an index over the batch axis (dim=0)"
        return self.found("", shape[2], 1.0, message, advice=advice, cause="broadcast")


def shapes_of(shape: Array) -> tuple[str, str, str]:
    """The shape that was broadcast, the one it was compared with, and the one of all pairs; of `loss_broadcast`."""
    rows, columns, high, wide = (int(size) for size in shape)
    flat, column = f"({rows},)", f"({rows}, 1)"
    one, other = (column, flat) if columns else (flat, column)
    return one, other, f"({high}, {wide})"
