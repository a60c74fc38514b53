"""`update_growth`: a layer's updates outgrow their own past while its gradient does not: what comes before a spike.

One number is judged against its own past, without a model of its size or spread: the last `LAST` of a row are all
larger than all `WINDOW` of a while ago. Of w + k exchangeable numbers the last k are the k largest with a chance of
1 / C(w + k, k), however they are distributed; `chance_of` adds that up over all records and rows. Records of a run are
exchangeable only in so far as nothing trends, so growth counts from a factor of two only; how often healthy runs show
it was measured (docs/corridor.md).

Reported of large runs as the first sign, in the lower layers first: the update norm doubles, then the gradient grows,
then the loss (marin issue 1368). Adam's update of an unchanged gradient grows where the second moment is lost, or where
successive gradients are no longer independent (Molybog et al. 2023, arXiv 2304.09871: updates of a large norm that have
little to do with the way down, before large models diverge).

Axis letters: P parameters, L layers, K records.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flowscope.config import WatchConfig
from flowscope.detectors.detector import Array, Detector, Finding
from flowscope.detectors.losses import losses_of
from flowscope.detectors.rates import Updates, updates_of
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


def outgrown(courses: Array) -> Array:
    """By which factor the last of each course have outgrown it, [L]: 0 where not all are above all of the window.

    Args:
        courses: the last WINDOW + GAP + LAST numbers of each layer, [K, L], NaN where there are not that many yet.
    """
    window, last = courses[:WINDOW], courses[-LAST:]
    # NaN is above nothing
    above = last.min(axis=0) > window.max(axis=0)
    factors = np.zeros(courses.shape[1])
    factors[above] = np.median(last[:, above], axis=0) / np.median(window[:, above], axis=0)
    return factors


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
    # the courses [K, L] of the layers' updates over their rate, of their gradients and of their rates
    begins_with: ClassVar[dict[str, Any]] = {
        "updates": None,
        "gradients": None,
        "rates": None,
        "course": {},
        "seen": 0,
        # the losses, one a record, and for how many records more they have a reason
        "losses": deque(maxlen=WINDOW + GAP + LAST),
        "reason": 0,
    }

    def __init__(self, config: WatchConfig | None = None) -> None:
        super().__init__(config)
        self._layers = Layers()

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding, which names the first such layer from the input."""
        updates = updates_of(record, self.state["course"])
        names, rows = self._layers.of(labels_of(record, header, "param_norm"), header)
        if updates is None or len(rows) != updates.ratio.size:
            yield self.unseen()
            return
        self.state["seen"] += 1
        self._look_at_losses(record)
        growth = self._growth(updates, record.metrics["param_grad_norm"], rows, len(names))
        found = np.flatnonzero(growth >= TWOFOLD)
        if not found.size or self.state["reason"] > 0:
            return
        first, value = names[found[0]], growth[found[0]]
        chance = chance_of(len(names), self.state["seen"])
        message = (
            f"the updates of {first} have grown {value:.2g}-fold (limit {TWOFOLD:g}): the last {LAST} records "
            f"are all above all {WINDOW} of {GAP} before them, and its gradient is as it was ({found.size} of "
            f"{len(names)} layers; where nothing happens, {chance:.1g} of runs show it): gradient and loss may follow"
        )
        yield self.found(first, value, TWOFOLD, message, immediate=True)

    def _look_at_losses(self, record: Record) -> None:
        """A loss that has outgrown its past before: a new task or term of it, or what other detectors tell of."""
        if (losses := losses_of(record)).size:
            self.state["losses"].append(median(losses.tolist()))
        course = list(self.state["losses"])
        risen = len(course) == WINDOW + GAP + LAST and min(course[-LAST:]) > max(course[:WINDOW])
        self.state["reason"] = WINDOW if risen else max(0, self.state["reason"] - 1)

    def _growth(self, updates: Updates, gradient: Array, rows: NDArray[np.intp], layers: int) -> Array:
        """The factor [L] by which updates have outgrown their past; 0 where the gradient has too, or the rate changed.

        A lower rate makes gradients of successive steps alike, so that Adam's update grows beside it.
        """
        rate = np.where(updates.rate > 0, updates.rate, 1.0)
        sizes = {"updates": updates.ratio * updates.norm / rate, "gradients": gradient, "rates": rate}
        for name, size in sizes.items():
            squares = np.where(updates.trained, np.square(size), 0.0)
            self._add(name, np.sqrt(np.bincount(rows, squares, minlength=layers)))
        growth, of_gradient = outgrown(self.state["updates"]), outgrown(self.state["gradients"])
        rates = self.state["rates"]
        steady = rates.max(axis=0) < TWOFOLD * rates.min(axis=0)
        return np.where(steady & (np.square(of_gradient) < growth), growth, 0.0)

    def _add(self, name: str, totals: Array) -> None:
        """Add totals [L] to their courses; a record that trains nothing of a layer, or gives no number, is left out."""
        known = self.state[name]
        if known is None or known.shape[1] != totals.size:
            known = self.state[name] = np.full((WINDOW + GAP + LAST, totals.size), np.nan)
        seen = np.isfinite(totals) & (totals > 0)
        known[:-1, seen] = known[1:, seen]
        known[-1, seen] = totals[seen]


class Layers:
    """The layer of each parameter: the block that holds it, else its module. Computed once a layout."""

    def __init__(self) -> None:
        self._key: tuple[tuple[str, ...], RunHeader] | None = None
        self._found: tuple[list[str], NDArray[np.intp]] = [], np.zeros(0, np.intp)

    def of(self, labels: tuple[str, ...], header: RunHeader) -> tuple[list[str], NDArray[np.intp]]:
        """The layers' names [L], from input to output, and the layer of each parameter [P]."""
        if self._key is None or self._key[0] != labels or self._key[1] is not header:
            self._key = labels, header
            blocks = {block for flow in header.flows for block in flow.blocks}
            holders = [_holder(label, blocks) for label in labels]
            names = list(dict.fromkeys(holders))
            number = {name: n for n, name in enumerate(names)}
            self._found = names, np.array([number[holder] for holder in holders], dtype=np.intp)
        return self._found


def _holder(label: str, blocks: set[str]) -> str:
    module = module_of(label)
    return next((path for path in ancestors(module) if path in blocks), module or label)
