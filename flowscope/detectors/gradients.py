"""`vanishing_gradient` and `exploding_gradient`, from the gradient product G(l) = |dL/dx_l| / |dL/dx_L| of a flow.

The product has no unit, so its limits act from the first record. What a baseline adds is drift: a post-norm stack whose
product falls from 2 to 1.5e-2 within ten steps is on its way. The gradient norm has a unit: it is only ever compared
with this run's own first steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.collapse import common_mode_grew, learn_start, sample_distance, samples_alike
from flowscope.detectors.detector import ANY_FLOW, Array, Detector, Finding, said
from flowscope.detectors.losses import losses_of
from flowscope.detectors.rates import decay_advice
from flowscope.detectors.rows import FlowView, each_flow, labels_of
from flowscope.records import BRANCHES, FlowLayout, Record, RunHeader, Severity

ZERO_RECORDS = 3
"""A gradient that is exactly zero may be a start (zero-initialised heads, LoRA's A): it counts after three records."""
ZERO_START_RECORDS = 20
"""A flow that began with exact zeros grows out of them slowly: it gets this many records."""
DRIFT_CEILING = 30.0
"""A fall counts as drift only below this many times the absolute limit."""
GATED = ("LSTM", "GRU")
"""Cells that learn how far they look back: untrained ones forget half of it each step, and train nevertheless."""
ENDING = ("chain", "network")
"""Kinds of flows that end in the model's answer."""
LOSSES = 10
"""So many of the first losses, and of the last, tell whether a run makes progress."""
FELL = 0.05
"""It does where they fell by this share."""
END_RECORDS = 5
"""What the end of a chain does to the gradient counts on so many records without progress."""
COMES_AND_GOES = 20
"""So many records show that a gradient comes and goes, with a quarter as many turns at least."""
CERTAIN = 100.0
"""Beyond the limit by this factor there is nothing to wait for."""

ADVICE = {
    "time": "use a gated cell (LSTM, GRU), orthogonal recurrent weights, or a shorter truncation",
    "gated": "nothing to do if the last steps suffice; an LSTM's forget-gate bias of 1 lets the gradient reach back",
    "chain": "initialise by He (ReLU) or Xavier (tanh), use an activation that does not saturate, or add residual "
    "connections or normalisation",
    "stack": 'if the blocks are post-norm, call flowscope.wrap(model, mode="keel") or make them pre-norm (a lower rate '
    "or a longer warm-up did not help at 24 blocks). Blocks without a shortcut or a norm: add them, or initialise by "
    "He (ReLU) or Xavier (tanh)",
    "network": "initialise by He or Xavier, add normalisation, or residual connections around the stages",
}
EXPLODING_ADVICE = {
    "time": "clip gradients (clip_grad_norm_), use an orthogonal initialisation or a gated cell (LSTM, GRU)",
    "chain": "lower the learning rate, clip gradients (clip_grad_norm_), initialise by He or Xavier",
    "stack": "clip gradients (clip_grad_norm_), lower the learning rate, lengthen its warm-up",
    "network": "lower the learning rate, clip gradients (clip_grad_norm_), initialise by He or Xavier",
}


FED_AGAIN = (
    "nothing, where each block is meant to take the start anew; blocks that are to build on those before them need a "
    "shortcut past each, too"
)
LED = 0.1
"""The share of the last point's gradient that the start of a flow has where nothing is lost on the way to it,"""
ROUND = 30.0
"""and by this factor more than behind the first block, where it came by another way."""

SOLVED = "ODE"
"""The cell of a flow through the states of a differential equation's solver."""
SOLVED_ADVICE = "integrate over a shorter time, penalise the dynamics (Jacobian or kinetic energy), or add weight decay"


def gradient_flows(record: Record, header: RunHeader) -> Iterator[FlowView]:
    """The flows whose gradient is judged: with a flow `network` over all stages, not each stage again."""
    whole = any(layout.kind == "network" for layout in header.flows)
    for view in each_flow(record, header):
        if view.layout.kind != BRANCHES and not (whole and view.layout.kind == "stage"):
            yield view


def advice_for(view: FlowView, table: Mapping[str, str]) -> str:
    """The advice for this kind of flow."""
    if view.layout.cell == SOLVED:
        return SOLVED_ADVICE
    gated = view.layout.cell.startswith(GATED) and "gated" in table
    return table["gated" if gated else view.layout.kind] if gated or view.layout.kind in table else table["stack"]


def product_of(view: FlowView) -> Array | None:
    """The flow's gradient product, NaN where not seen; None where there is nothing to divide by."""
    product = view.get("gradient_product")
    if product is None or product.size < 2 or not np.isfinite(product[-1]):
        return None
    return np.where(np.isfinite(product), product, np.nan)


def worst_block(product: Array, crossing: int, *, vanishing: bool, gain_limit: float) -> int:
    """The block with the smallest (largest) gain of the stretch of bad blocks around `crossing`.

    Args:
        product: gradient product [L+1].
        crossing: the first point, counted from the output, beyond the limit; block `crossing` led there.
        vanishing: whether bad means a gain below `gain_limit`, else above its inverse.
        gain_limit: `WatchConfig.vanishing_gain`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = product[:-1] / product[1:]
    bad = gain < gain_limit if vanishing else gain > 1 / gain_limit
    start = stop = min(crossing, gain.size - 1)
    while start > 0 and bad[start - 1]:
        start -= 1
    while stop < gain.size - 1 and bad[stop + 1]:
        stop += 1
    stretch = np.nan_to_num(gain[start : stop + 1], nan=1.0)
    return start + int(np.argmin(stretch) if vanishing else np.argmax(stretch))


def led_round(view: FlowView, product: Array) -> bool:
    """Whether the gradient comes to the start of a flow past its blocks: each is given the start again (GCNII).

    No block brings back what those behind it lost; it may change the unit (a norm behind a small embedding), so that
    what is compared is gradient times hidden state.
    """
    sizes = view.get("act_rms")
    if sizes is None or sizes.size != product.size or not product[1] > 0 or not product[0] >= LED:
        return False
    return bool(product[0] * sizes[0] > ROUND * product[1] * sizes[1])


class VanishingGradient(Detector):
    """The product below its limit, fallen far below this model's own first steps, or low where samples end alike."""

    kind = "vanishing_gradient"
    yields_to = frozenset({"no_gradient", "symmetry"})
    yields_to_errors = frozenset({"token_collapse", "dead_units"})
    symptom = "at first"
    shown_by, extreme = ("gradient_product", "gain"), "least"
    begins_with: ClassVar[dict[str, Any]] = {
        "best": {},
        "last": {},
        "zero_start": {},
        "common": {},
        "losses": {},
        "decay": {},
    }

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a flow at most."""
        self._learn_loss(record)
        decay = decay_advice(record, header, self.state["decay"])
        found = said(*(self._found(view) for view in gradient_flows(record, header)))
        return (replace(f, advice=decay) if decay and f.level == "beyond" else f for f in found)

    def _learn_loss(self, record: Record) -> None:
        kept, losses = self.state["losses"], losses_of(record).tolist()
        kept["first"] = [*kept.get("first", ()), *losses][:LOSSES]
        kept["last"] = [*kept.get("last", ()), *losses][-LOSSES:]
        kept["count"] = min(kept.get("count", 0) + len(losses), 2 * LOSSES)

    def _progress(self) -> bool | None:
        """Whether the loss has fallen since the first, or may have by so few; None where none was given."""
        first, last = (self.state["losses"].get(end, ()) for end in ("first", "last"))
        if len(first) == 0:
            return None
        few = self.state["losses"]["count"] < 2 * LOSSES
        return few or float(np.mean(last)) < (1 - FELL) * float(np.mean(first))

    def _found(self, view: FlowView) -> Finding | None:
        name, product = view.layout.name, product_of(view)
        if product is None:
            norms = view.get("grad_norm")
            if norms is not None and norms[-1] == 0:
                self.state["zero_start"].setdefault(name, True)
            return self.unseen(name)
        learn_start(view, self.state["common"])
        finding = self._judge(view, product)
        self._learn(name, product)
        return finding

    def _learn(self, name: str, product: Array) -> None:
        """The best so far by point: step 0, then what two records in a row reached (one spike is no baseline)."""
        best, last = self.state["best"], self.state["last"]
        self.state["zero_start"].setdefault(name, bool((product == 0).any()))
        if name not in best or best[name].shape != product.shape:
            best[name] = product.copy()
        else:
            best[name] = np.fmax(best[name], np.minimum(last[name], product))
        last[name] = product

    def _judge(self, view: FlowView, product: Array) -> Finding | None:
        config, layout = self.config, view.layout
        limit = config.vanishing_time if layout.kind == "time" else config.vanishing_product
        release = config.release_factor
        best = self.state["best"].get(layout.name)
        fall = np.ones_like(product)
        if best is not None and best.shape == product.shape:
            positive = (product > 0) & (best > 0)
            np.divide(best, product, out=fall, where=positive)
        below = product < limit
        drifted = (fall > config.drift) & (product < DRIFT_CEILING * limit) & (product > 0)
        beyond = below | drifted
        if not beyond.any() and (ordered := self._ordered(view, product)) is not None:
            return ordered
        if not beyond.any():
            close = (product < limit * release) | (
                (fall > config.drift / release) & (product < DRIFT_CEILING * limit * release)
            )
            return self.near(close.any(), layout.name)
        crossing = int(np.flatnonzero(beyond)[-1])
        where = worst_block(product, crossing, vanishing=True, gain_limit=config.vanishing_gain)
        low = int(np.nanargmin(product))
        nonzero = np.where(product > 0, product, np.nan)
        least = float(np.nanmin(nonzero))
        patience = ZERO_START_RECORDS if self.state["zero_start"].get(layout.name, False) else None
        certain = least < limit / CERTAIN or bool((below & drifted).any())
        if least >= limit and not drifted.any():
            patience, certain = patience or ZERO_RECORDS, False
        told = [f"limit {limit:.2g}"] if below.any() else []
        if fall[low] > 2:
            limits = "" if told else f", limit {config.drift:.3g} times"
            told.append(f"{fall[low]:.3g} times less than at its best{limits}")
        block, severity = view.block(where), _severity(layout)
        if patience is None and self._end_alone(layout, product, fall):
            progress = self._progress()
            if progress:
                return self.near(True, layout.name)
            severity, patience = "info" if progress is None else severity, END_RECORDS
        message = (
            f"the gradient at {view.point(low)} is {product[low]:.2g} of that at {view.point(product.size - 1)} "
            f"({'; '.join(told)}); {block} passes {_gain(product, where):.2g} of it on"
        )
        advice = advice_for(view, ADVICE)
        if led_round(view, product):
            severity, certain, advice = "info", False, FED_AGAIN
            message += f", while {view.point(0)} gets {product[0]:.2g} of it past the blocks (each takes it anew)"
        finding = self.found(block, product[low], limit, message, layout.name, advice=advice)
        immediate = certain and patience is None
        return replace(finding, severity=severity, immediate=immediate, records=patience)

    def _end_alone(self, layout: FlowLayout, product: Array, fall: Array) -> bool:
        """Whether all that is lost is lost in the last block, whose end is no hidden state but the model's answer.

        A last nonlinearity (probabilities) or a small head changes the gradient's size for all that lies before it
        alike; an optimizer that scales each step by it does not notice.
        """
        if layout.kind not in ENDING or product.size < 3 or not product[-2] > 0:
            return False
        inner, fell = product[:-1] / product[-2], fall[:-1] / max(float(fall[-2]), 1.0)
        healthy = max(self.config.ordered_product, self.config.vanishing_product)
        return bool((inner >= healthy).all() and (fell <= self.config.drift).all())

    def _ordered(self, view: FlowView, product: Array) -> Finding | None:
        """A low product beside samples that end in one vector: neither direction carries anything (ordered phase).

        Schoenholz et al. 2017 (arXiv 1611.01232): both decay exponentially with depth at one rate.
        """
        distance, limit = sample_distance(view), self.config.ordered_product
        if distance is None or not bool((product < limit).any()):
            return None
        alike = samples_alike(distance, 1 - self.config.sample_cosine)
        started = self.state["common"].get(view.layout.name)
        apart = started is not None and bool((started[0][-alike:] > 1 - self.config.sample_cosine).all())
        if alike < 2 or (apart and common_mode_grew(view, alike, self.state["common"])):
            return None
        crossing = int(np.flatnonzero(product < limit)[-1])
        where = worst_block(product, crossing, vanishing=True, gain_limit=self.config.vanishing_gain)
        low, block, name = int(np.nanargmin(product)), view.block(where), view.layout.name
        message = (
            f"the gradient at {view.point(low)} is {product[low]:.2g} of that at {view.point(product.size - 1)} (limit "
            f"{limit:.2g} where samples end alike), and from {view.point(distance.size - alike)} on all samples are "
            f"one vector (mean cosine {1 - distance[-1]:.5f}, {1 - distance[0]:.3f} at {view.point(0)}): nothing "
            "passes either way"
        )
        advice, records = advice_for(view, ADVICE), self.config.baseline_records
        return self.found(block, product[low], limit, message, name, advice=advice, records=records)


class ExplodingGradient(Detector):
    """The product above its limit, or the largest gradient norm of a flow far above its own first steps'."""

    kind = "exploding_gradient"
    yields_to = frozenset({"mixing_gain"})
    shown_by, extreme = ("gradient_product", "gain", "grad_norm"), "largest"
    begins_with: ClassVar[dict[str, Any]] = {"first_norms": {}}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a flow at most."""
        return said(*(self._found(view) for view in gradient_flows(record, header)))

    def _found(self, view: FlowView) -> Finding | None:
        finding, growth = self._product(view), self._growth(view)
        if finding is None or (finding.level != "beyond" and growth is not None and growth.level == "beyond"):
            return growth
        return finding

    def _product(self, view: FlowView) -> Finding | None:
        product, limit = product_of(view), self.config.exploding_product
        if product is None:
            return self.unseen(view.layout.name)
        high = int(np.nanargmax(product))
        if product[high] <= limit:
            return self.near(product[high] > limit / self.config.release_factor, view.layout.name)
        crossing = int(np.flatnonzero(product > limit)[-1])
        where = worst_block(product, crossing, vanishing=False, gain_limit=self.config.vanishing_gain)
        message = (
            f"the gradient at {view.point(high)} is {product[high]:.2g} times that at {view.point(product.size - 1)} "
            f"(limit {limit:.2g}); {view.block(where)} multiplies it by {_gain(product, where):.2g}"
        )
        return self._finding(view, where, product[high], limit, message)

    def _growth(self, view: FlowView) -> Finding | None:
        norms, name = view.get("grad_norm"), view.layout.name
        finite = np.zeros(0) if norms is None else norms[np.isfinite(norms)]
        if norms is None or finite.size == 0:
            return self.unseen(name)
        norm, first = float(finite.max()), self.state["first_norms"].get(name, np.zeros(0))
        # a zero-initialised head: whatever comes first is no measure of what follows
        zero_start = first[0] == 0 if first.size else norm == 0
        if zero_start or norm == 0:
            self.state["first_norms"].setdefault(name, np.zeros(1))
            return None
        base = median(first.tolist()) if first.size >= 3 else math.inf
        limit = self.config.exploding_growth * base
        if norm <= limit:
            if first.size < self.config.baseline_records:
                self.state["first_norms"][name] = np.append(first, norm)
            return self.near(norm > limit / self.config.release_factor, name)
        message = (
            f"the largest gradient norm of the flow is {norm:.3g}, {norm / base:.3g} times the median of this run's "
            f"first records ({base:.3g}; limit {self.config.exploding_growth:.3g} times)"
        )
        return self._finding(view, self._strongest(view, norms), norm, limit, message)

    def _strongest(self, view: FlowView, norms: Array) -> int:
        product = product_of(view)
        if product is None:
            return max(0, int(np.nanargmax(norms)) - 1)
        return worst_block(product, product.size - 2, vanishing=False, gain_limit=np.inf)

    def _finding(self, view: FlowView, where: int, value: float, limit: float, message: str) -> Finding:
        block, name, advice = view.block(where), view.layout.name, advice_for(view, EXPLODING_ADVICE)
        certain = bool(value > CERTAIN * limit)
        return self.found(block, value, limit, message, name, severity="error", advice=advice, immediate=certain)


MOST_NETS = 8
"""So many nets that are trained through another are judged."""


class StarvedPlayer(Detector):
    """A net that is trained through another (a generator through its critic) gets a hundredth of its first gradients.

    The other net has won: what it answers no longer depends on what it is shown. Or the gradient comes and goes by the
    same factor from record to record: what lies between the two is flat nearly everywhere (a saturated tanh).
    """

    kind = VanishingGradient.kind
    shown_by, extreme = VanishingGradient.shown_by, VanishingGradient.extreme
    advice = (
        "in a GAN let the loss not saturate where the critic is sure (-log D(G(z)) instead of log(1 - D(G(z)))), and "
        "give the critic a lower rate or fewer steps. Where both nets share one loss, look first what the other one "
        "shows (dead units, a loss that ran away)"
    )
    begins_with: ClassVar[dict[str, Any]] = {"first": {}, "recent": {}}

    @property
    def name(self) -> str:
        """Apart from the rule on the gradient product."""
        return "starved_player"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a net."""
        norms, through = record.metrics.get("param_grad_norm"), record.metrics.get("trained_through")
        if norms is None or through is None or "other_losses" not in record.metrics:
            yield self.unseen(ANY_FLOW)
            return
        names = np.array(labels_of(record, header, "param_grad_norm"))
        if names.size != norms.size:
            return
        for path in record.metric_labels.get("trained_through", ())[:MOST_NETS]:
            held = norms[np.char.startswith(names, f"{path}." if path else "") & (norms >= 0)]
            if held.size:
                yield from said(self._judge(path, float(np.sqrt(np.square(held).sum()))))

    def _judge(self, path: str, norm: float) -> Finding | None:
        first = self.state["first"].get(path, np.zeros(0))
        recent = self.state["recent"][path] = np.append(self.state["recent"].get(path, first), norm)[-COMES_AND_GOES:]
        if first.size < self.config.baseline_records:
            self.state["first"][path] = np.append(first, norm)
            return None
        start = median(first.tolist())
        limit = start / self.config.drift
        low, high = np.quantile(recent, (0.25, 0.75))
        turns = int(np.count_nonzero(np.diff(recent > math.sqrt(low * high))))
        if recent.size == COMES_AND_GOES and low < high / self.config.drift and turns >= COMES_AND_GOES // 4:
            return self._unsteady(path, float(low), float(high))
        if norm >= limit:
            return self.near(norm < limit * self.config.release_factor, cause=path)
        message = (
            f"the gradient of {path or 'the model'}, which reaches it through another net only, has fallen from "
            f"{start:.2g} to {norm:.2g} (limit {limit:.2g}): that net has won, or is dead itself, and teaches nothing"
        )
        return self.found(path, norm, limit, message, cause=path, records=self.config.baseline_records)

    def _unsteady(self, path: str, low: float, high: float) -> Finding:
        message = (
            f"the gradient of {path or 'the model'}, which reaches it through another net only, comes and goes: of the "
            f"last {COMES_AND_GOES} records a quarter have less than {low:.2g}, a quarter more than {high:.2g} (limit "
            f"{self.config.drift:.0f} times): what lies between the two nets is flat nearly everywhere"
        )
        advice = (
            "look whether the answer's tanh or sigmoid is saturated: scale what the net is given to about 1 (a "
            "normalisation of the observations), and begin with a small last layer"
        )
        return self.found(path, low, high / self.config.drift, message, advice=advice, cause=path)


def _severity(layout: FlowLayout) -> Severity:
    if layout.kind != "time":
        return "error"
    return "info" if layout.cell.startswith(GATED) else "warning"


def _gain(product: Array, block: int) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(product[block] / product[block + 1])
