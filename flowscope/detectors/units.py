"""`dead_units`, `saturation` and `symmetry`: units that give nothing, that pass nothing back, that are all the same."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors.detector import (
    SHARE_RELEASE,
    Array,
    Detector,
    Finding,
    FlowGroup,
    FlowGroups,
    label_of,
    labels_of,
    module_of,
)
from flowscope.records import Record, RunHeader


class ShareOfUnits(Detector):
    """A share per module, judged per flow: the first module from the input beyond the limit is the place."""

    metrics: tuple[str, ...]
    """Metric names, the first that a record holds is used."""

    def __init__(self, config: WatchConfig) -> None:
        super().__init__(config)
        self._groups = FlowGroups()

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a flow at most."""
        metric = next((name for name in self.metrics if name in record.metrics), self.metrics[-1])
        values = record.metrics.get(metric)
        labels = labels_of(record, header, metric)
        seen = values is not None and values.size == len(labels)
        for group in self._groups.of(labels, header) if seen else self._groups.known:
            shares = values[group.rows] if seen and values is not None else None
            if shares is None or bool(np.isnan(shares).all()):
                yield Finding(self.kind, flow=group.flow, level="unseen")
            elif (finding := self._judge(shares, group)) is not None:
                yield finding

    @abstractmethod
    def _judge(self, shares: Array, group: FlowGroup) -> Finding | None:
        """The finding for the modules of one flow."""


class DeadUnits(ShareOfUnits):
    """Modules most of whose units were off for all the data of the step; whole layers at once."""

    kind = "dead_units"
    yields_to = frozenset({"token_collapse"})
    metrics = ("dead_lasting", "dead_fraction")

    def _judge(self, shares: Array, group: FlowGroup) -> Finding | None:
        limit = self.config.dead_units
        beyond, whole = shares > limit, shares >= 1
        if not beyond.any():
            near = bool((shares > SHARE_RELEASE * limit).any())
            return Finding(self.kind, flow=group.flow, level="near") if near else None
        where = int(np.argmax(whole if whole.any() else beyond))
        entire = f", {int(whole.sum())} of them entirely" if whole.any() and shares[where] < 1 else ""
        return Finding(
            self.kind,
            group.names[where].partition(":")[0],
            "error" if whole.any() else "warning",
            float(shares[where]),
            limit,
            f"{shares[where]:.0%} of the units of {group.names[where]} were off for all the data of the step (limit "
            f"{limit:.0%}); {int(beyond.sum())} of {shares.size} activations are beyond it{entire}",
            "lower the learning rate; if it is so from the first step, start biases at 0 and weights by He's rule; "
            "what is dead stays so: start anew or from an earlier checkpoint",
            group.flow,
            immediate=bool(whole.any()),
        )


class Saturation(ShareOfUnits):
    """tanh or sigmoid modules inside a flow most of whose values lie where the derivative is nearly zero."""

    kind = "saturation"
    metrics = ("saturation",)

    def _judge(self, shares: Array, group: FlowGroup) -> Finding | None:
        # an output that is sure of itself saturates, and should; so do poolers and gates beside the depth axis
        limit = self.config.saturation
        beyond = (shares > limit) & group.inner
        if not beyond.any():
            near = bool(((shares > SHARE_RELEASE * limit) & group.inner).any())
            return Finding(self.kind, flow=group.flow, level="near") if near else None
        where = int(np.argmax(beyond))
        return Finding(
            self.kind,
            group.names[where],
            "warning",
            float(shares[where]),
            limit,
            f"{shares[where]:.0%} of the values of {group.names[where]} are saturated (limit {limit:.0%}): the "
            f"derivative is nearly zero there; {int(beyond.sum())} of {shares.size} such modules are beyond the limit",
            "initialise by Xavier (the weights are too large), or put a normalisation before it",
            group.flow,
        )


class Symmetry(Detector):
    """Weight matrices whose rows are all alike, and get gradients that are: all units compute one function."""

    kind = "symmetry"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding at most: two matrices alike are certain, one may only wait for its first step."""
        spread = record.metrics.get("weight_spread")
        if spread is None or bool(np.isnan(spread).all()):
            yield Finding(self.kind, level="unseen")
            return
        limit = self.config.symmetry
        alike = spread < limit
        # the rows of the last matrix have targets of their own, which part them
        alike[np.flatnonzero(~np.isnan(spread))[-1]] = False
        if not alike.any():
            if bool((spread < limit * self.config.release_factor).any()):
                yield Finding(self.kind, level="near")
            return
        first, count = int(np.argmax(alike)), int(alike.sum())
        name = label_of(record, header, "weight_spread", first, "matrix")
        yield Finding(
            self.kind,
            module_of(name),
            "error",
            float(spread[first]),
            limit,
            f"all rows of {name} are alike (relative spread {spread[first]:.1e}, limit {limit:.0e}), and of {count} of "
            f"{spread.size} matrices: its units compute one function and their gradients are the same",
            "initialise the weights at random (He, Xavier); a constant may stand in biases and gains only",
            immediate=count >= 2,
        )
