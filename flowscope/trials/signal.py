"""`signal`: gradient product, scale of activations and dead units along depth, as they are now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import nn

from flowscope.errors import CannotJudgeError
from flowscope.records import Array, Record, split_key
from flowscope.trials.bench import Bench
from flowscope.trials.trial import Trial, TrialFinding

LEAST, MOST = 1e-3, 1e3
"""Gradient products over a whole flow beyond these are told: each layer of 50 then scales by 0.87 or 1.15."""
GROWTH = 100.0
"""Activations that grow or shrink by more along a flow are told."""
DEAD = 0.5
"""A larger share of units that never fire is told."""


class Signal(Trial):
    """Watch one backward pass of a batch, and read the profiles."""

    name = "signal"
    proves = "gradient reaches the first layers, activations keep their scale, and units fire"
    blind = "what changes while it trains: watch"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """A finding a flow and profile beyond its range."""
        record = _watched(bench)
        told = [*self._products(bench, record), *self._scales(bench, record), *self._dead(record)]
        if not told and not any(split_key(key)[0] == "act_rms" for key in record.metrics):
            raise CannotJudgeError("the model has no chain of layers that could be told")
        yield from told or [self.passed("gradient, activations and units are in their ranges along depth")]

    def _products(self, bench: Bench, record: Record) -> Iterable[TrialFinding]:
        for flow, values in _profiles(record, "gradient_product"):
            if not np.isfinite(values).any():
                continue
            first = float(values[np.isfinite(values)][0])
            if first < LEAST or first > MOST:
                words = "vanishes" if first < LEAST else "explodes"
                where, over, advice = _along(bench, record.labels("gradient_product", flow), flow)
                message = f"the gradient {words} on the way down: by {first:.3g} over {values.size} {over}"
                advice = advice or "a residual path with normalisation, or another scale at the start"
                yield self.noted(where, message, advice)

    def _scales(self, bench: Bench, record: Record) -> Iterable[TrialFinding]:
        for flow, values in _profiles(record, "act_rms"):
            good = values[np.isfinite(values) & (values > 0)]
            if good.size > 1 and not 1 / GROWTH <= good[-1] / good[0] <= GROWTH:
                where, over, advice = _along(bench, record.labels("act_rms", flow), flow)
                message = f"activations go from {good[0]:.3g} to {good[-1]:.3g} over {good.size} {over}"
                advice = advice or "normalise, or start the weights at sqrt(2 / fan in) (He) or 1 (Glorot)"
                yield self.noted(where, message, advice)

    def _dead(self, record: Record) -> Iterable[TrialFinding]:
        for flow, values in _profiles(record, "dead_fraction"):
            if np.isfinite(values).any() and np.nanmax(values) > DEAD:
                layer = int(np.nanargmax(values))
                labels = record.labels("dead_fraction", flow)
                where = labels[layer] if layer < len(labels) else flow or ""
                message = (
                    f"{np.nanmax(values):.0%} of the units of {where or f'layer {layer}'} never fire on this batch"
                )
                yield self.noted(where, message, "look at the bias and scale before that activation")


def _profiles(record: Record, metric: str) -> Iterator[tuple[str | None, Array]]:
    """The flows that have a metric, with its values."""
    for key, values in record.metrics.items():
        name, flow = split_key(key)
        if name == metric:
            yield flow, values


def _along(bench: Bench, labels: Sequence[str], flow: str | None) -> tuple[str, str, str]:
    """The place of a profile, what its points are, and what to do where they are no layers.

    The points of one recurrent module are its time steps, "lstm#0", "lstm#1", ...
    """
    modules = dict(bench.model.named_modules())
    one = {label.partition("#")[0] for label in labels}
    recurrent = [name for name in one if isinstance(modules.get(name), (nn.RNNBase, nn.RNNCellBase))]
    if len(one) > 1 or not recurrent:
        return flow or "", "layers", ""
    advice = "usual over many steps; a forget gate's bias of 1 (orthogonal weights in a plain RNN) reaches further back"
    return recurrent[0], f"time steps of {recurrent[0]}", advice


def _watched(bench: Bench) -> Record:
    from flowscope.scope import watch

    with watch(bench.model, every=1, sinks=[], config={"console": "off"}) as scope:
        with bench.alike():
            loss = bench.loss(bench.batches[0])
            loss.backward()  # type: ignore[no-untyped-call]
        scope.step(loss=loss.detach())
        records = list(scope.records)
    if not records:
        raise CannotJudgeError("no record was made of a backward pass")
    return records[-1]
