"""`update_growth`: a layer's updates outgrow their own past while its gradient does not: what comes before a spike.

One number is judged against its own past, without a model of its size or spread: the last `LAST` of a row are all
larger than all `WINDOW` of a while ago. Of w + k exchangeable numbers the last k are the k largest with a chance of
1 / C(w + k, k), however they are distributed; `chance_of` adds that up over all records and rows. Records of a run are
exchangeable only in so far as nothing trends, so growth counts from a factor of two only; how often healthy runs show
it was measured (docs/corridor.md).

Reported of large runs as the first sign, in the lower layers first: the update norm doubles, then the gradient grows,
then the loss (marin issue 1368). Adam's update of an unchanged gradient grows where the second moment is lost, or where
gradients turn from noise into one direction (Molybog et al. 2023, arXiv 2304.09871, section 4).

Axis letters: P parameters, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import Array, Detector, Finding
from flowscope.detectors.rates import updates_of
from flowscope.detectors.rows import ancestors, labels_of, module_of
from flowscope.records import Record, RunHeader

LAST = 8
"""So many records in a row are larger ..."""
WINDOW = 40
"""... than so many before them,"""
GAP = 20
"""so many records apart: what doubles slowly is compared with what was before it."""
TWOFOLD = 2.0
"""The median of the last over that of the window."""


def chance_of(rows: int, records: int) -> float:
    """The chance at most that any of the rows is found at any of so many records, where nothing happens."""
    return min(1.0, rows * max(0, records - WINDOW - GAP - LAST + 1) / math.comb(WINDOW + LAST, LAST))


def outgrown(course: Array) -> float:
    """By which factor the last of a course [K] have outgrown it: 0 where they are not the largest, or it is short."""
    if len(course) < WINDOW + GAP + LAST:
        return 0.0
    window, last = course[-WINDOW - GAP - LAST : -GAP - LAST], course[-LAST:]
    return float(np.median(last) / np.median(window)) if last.min() > window.max() else 0.0


class UpdateGrowth(Detector):
    """The updates of a layer, over their rate, are the largest of its past by a factor of two; its gradient is not."""

    kind = "update_growth"
    yields_to = frozenset({"exploding_gradient", "loss_spike", "update_too_large"})
    symptom = "ever"
    shown_by = ("update_ratio", "update_rms")
    advice = (
        "save a checkpoint; look at the optimizer's state of this layer (a second moment that is lost or no longer "
        "written), lower the rate or the second beta, clip updates"
    )
    # of each layer the course of its updates over their rate, of its gradient and of its rate
    begins_with: ClassVar[dict[str, Any]] = {"updates": {}, "gradients": {}, "rates": {}, "course": {}, "records": 0}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding, which names the first such layer from the input."""
        layers = layers_of(record, header)
        updates = updates_of(record, self.state["course"])
        if updates is None or not layers:
            yield self.unseen()
            return
        self.state["records"] += 1
        rates = np.where(np.isfinite(updates.rate), updates.rate, 1.0)
        sizes = {
            "updates": updates.ratio * updates.norm / rates,
            "gradients": record.metrics["param_grad_norm"],
            "rates": rates,
        }
        trained = {kind: np.where(updates.trained, size, np.nan) for kind, size in sizes.items()}
        grown = {
            name: self._grown(*(self._course(kind, name, size[rows]) for kind, size in trained.items()))
            for name, rows in layers.items()
        }
        found = [name for name, factor in grown.items() if factor >= TWOFOLD]
        if not found:
            return
        first, chance = found[0], chance_of(len(layers), self.state["records"])
        message = (
            f"the updates of {first} have grown {grown[first]:.2g}-fold (limit {TWOFOLD:g}): the last {LAST} records "
            f"are all above all {WINDOW} of {GAP} before them, and its gradient is as it was ({len(found)} of "
            f"{len(layers)} layers; where nothing happens, {chance:.1g} of runs show it): gradient and loss may follow"
        )
        yield self.found(first, grown[first], TWOFOLD, message, immediate=True)

    @staticmethod
    def _grown(updates: Array, gradients: Array, rates: Array) -> float:
        """The factor by which updates have outgrown their past; 0 where the gradient has too, or the rate changed.

        A lower rate makes gradients of successive steps alike, so that Adam's update grows beside it.
        """
        growth, of_gradient = outgrown(updates), outgrown(gradients)
        steady = rates.size > 0 and rates.max() < TWOFOLD * rates.min()
        return growth if steady and of_gradient * of_gradient < growth else 0.0

    def _course(self, kind: str, layer: str, row: Array) -> Array:
        """The course of a layer's total norm; a record that trains none of it, or gives no number, is left out."""
        known: Array = self.state[kind].get(layer, np.zeros(0))
        total = float(np.sqrt(np.nansum(np.square(row))))
        if math.isfinite(total) and total > 0:
            known = self.state[kind][layer] = np.append(known, total)[-WINDOW - GAP - LAST :]
        return known


def layers_of(record: Record, header: RunHeader) -> dict[str, list[int]]:
    """Layer -> the rows of its parameters: the block that holds them, else their module; from input to output."""
    blocks = {block for flow in header.flows for block in flow.blocks}
    rows: dict[str, list[int]] = {}
    for row, label in enumerate(labels_of(record, header, "param_norm")):
        module = module_of(label)
        rows.setdefault(next((path for path in ancestors(module) if path in blocks), module or label), []).append(row)
    return rows
