"""`dead_units`, `saturation` and `symmetry`: units that give nothing, that pass nothing back, that are all the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from flowscope.detectors.detector import SHARE_RELEASE, WIRING, Array, Finding, Flags
from flowscope.detectors.limit import Beyond, Limit
from flowscope.detectors.rows import module_of
from flowscope.records import Record, RunHeader

CLOSED = (
    "the model answers 0 throughout: if this activation is its end, take it away (it cannot answer below 0), or look "
    "at the sign of the targets; else start biases at 0 and weights by He's rule, and lower the learning rate"
)


class DeadUnits(Limit):
    """Modules most of whose units were off for all the data of the step; whole layers at once."""

    kind, metric, above, per = "dead_units", "dead_lasting", "dead_units", "module"
    tells, release = "first", SHARE_RELEASE
    yields_to = frozenset({"token_collapse"})
    symptom = "ever"
    shown_by = ("dead_fraction",)
    message = (
        "{value:.0%} of the units of {label} were off for all the data of the step (limit {limit:.0%}); {count} of "
        "{size} activations are beyond it"
    )
    advice = (
        "lower the learning rate; if it is so from the first step, start biases at 0 and weights by He's rule; what is "
        "dead stays so: start anew or from an earlier checkpoint"
    )

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a flow at most; what to do about an end that is off is another thing."""
        found = super().findings(record, header)
        deviation, spread = (record.metrics.get(f"output_{name}") for name in ("deviation", "spread"))
        # a spread that is no number: the answer is 0 in all entries
        if deviation is None or spread is None or not (deviation.max() == 0 and np.isnan(spread).all()):
            return found
        return (replace(f, advice=CLOSED) if f.level == "beyond" else f for f in found)

    def measured(self, record: Record) -> tuple[str, Array | None]:
        """The share of the step where no lasting one is recorded."""
        metric = self.metric if self.metric in record.metrics else "dead_fraction"
        return metric, record.metrics.get(metric)

    def worst(self, values: Array, flags: Flags) -> int:
        """The first that is dead entirely, else the first beyond the limit."""
        whole = values >= 1
        return int(np.argmax(whole if whole.any() else flags))

    def place(self, label: str) -> str:
        """The module, where its input is meant."""
        return label.partition(":")[0]

    def certain(self, beyond: Beyond) -> bool:
        """A layer that is dead entirely."""
        return bool((beyond.values >= 1).any())


class Saturation(Limit):
    """tanh or sigmoid modules inside a flow most of whose values lie where the derivative is nearly zero."""

    kind, metric, above, per = "saturation", "saturation", "saturation", "module"
    tells, release = "first", SHARE_RELEASE
    symptom = "ever"
    message = (
        "{value:.0%} of the values of {where} are saturated (limit {limit:.0%}): the derivative is nearly zero there; "
        "{count} of {size} such modules are beyond the limit"
    )
    advice = "initialise by Xavier (the weights are too large), or put a normalisation before it"

    def judged(self, values: Array, inner: Flags) -> Array:
        """An output that is sure of itself saturates, and should; so do poolers and gates beside the depth axis."""
        return np.where(inner, values, np.nan)


class Symmetry(Limit):
    """Weight matrices whose rows are all alike, and get gradients that are: all units compute one function."""

    kind, metric, below, row, level = "symmetry", "weight_spread", "symmetry", "matrix", WIRING
    tells, severity = "first", "error"
    message = (
        "all rows of {label} are alike (relative spread {value:.1e}, limit {limit:.0e}), and of {count} of {size} "
        "matrices: its units compute one function and their gradients are the same"
    )
    advice = "initialise the weights at random (He, Xavier); a constant may stand in biases and gains only"

    def measured(self, record: Record) -> tuple[str, Array | None]:
        """The rows of the last matrix have targets of their own, which part them: it is not judged."""
        spread = record.metrics.get(self.metric)
        seen = np.flatnonzero(~np.isnan(spread)) if spread is not None else np.zeros(0)
        if spread is not None and seen.size:
            spread = np.where(np.arange(spread.size) == seen[-1], np.nan, spread)
        return self.metric, spread

    def place(self, label: str) -> str:
        """The module of the matrix."""
        return module_of(label)

    def certain(self, beyond: Beyond) -> bool:
        """Two matrices alike are certain, one may only wait for its first step."""
        return beyond.count >= 2
