"""`token_collapse`, `representation_collapse`, `rank_collapse`, `constant_output`: tokens, samples, layers all alike.

Adjacent cosines near 1 are healthy in Keel and DeepNorm, so no cosine between layers has an absolute limit here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import OUTCOME, Array, Detector, Finding, Flags, said
from flowscope.detectors.limit import Limit
from flowscope.detectors.rows import FlowView, each_flow
from flowscope.records import Record, RunHeader

CLEARLY_LOWER = 10.0
"""1 - token cosine of the input must exceed the limit's by this factor: tokens were different when they came in."""
HEALTHY_RANK = 4.0
"""Below this effective rank at the start (few classes, narrow heads, a batch of one) a rank says nothing."""
SUPPORTING_PRODUCT = 0.3
"""A gradient product below this supports a token collapse: less of the depth tells; healthy Pre-LN models exceed 1."""
DEEP = 4
"""Of so many blocks half are no single layer: that all tokens are one vector in half of the depth is then certain."""
FROM_START_RECORDS = 4
"""A rank that was low from the start must stay so for this many records that have one."""
COMPARED_CALLS = 2
"""A part runs so often at least in a step whose loss compares its results with each other."""
EMBEDDING_RECORDS = 3
"""Embeddings come closer while their mean is learned: it counts when it lasts."""
TWICE = 2.0
"""A code has faded by itself only where it shrank so much more than the layer before it."""
STARTED_APART = 100.0
"""Outputs whose spread began above the limit by this factor were apart at the start,"""
AS_FAR = 0.3
"""and are still, where their deviation is this share of what it was."""
SCALAR = 1e-9
"""Outputs of one unit have cosines of exactly 1."""


def samples_alike(distance: Array, limit: float) -> int:
    """How many points at the end hold (nearly) one vector for all samples, which were different at the first point.

    Args:
        distance: 1 - mean cosine between samples [L+1].
        limit: below it samples are alike.
    """
    if not distance[0] > CLEARLY_LOWER * limit:
        return 0
    return _trailing(distance < limit)


def sample_distance(view: FlowView) -> Array | None:
    """1 - mean cosine between samples at the points that can tell: an end of one unit (1 by construction) is left out.

    None where it was not measured, or at fewer than two points.
    """
    cosine, width = view.get("sample_cosine"), view.record.metrics.get("output_width")
    if cosine is None or cosine.size < 2 or not np.isfinite(cosine[[0, -1]]).all():
        return None
    distance = 1 - cosine
    scalar = width is not None and width.size == 1 and width[0] == 1 and distance[-1] < SCALAR
    distance = distance[:-1] if scalar else distance
    return distance if distance.size >= 2 else None


def calls_compared(view: FlowView) -> bool:
    """Whether this step's loss compared what several calls of this part returned.

    Several calls alone say nothing: micro-batches, real and generated samples, an agent that acts. Records made before
    the loss's graph was read have the calls alone.
    """
    calls, compares = view.get("forward_calls"), view.record.metrics.get("loss_compares")
    return calls is not None and calls[-1] >= COMPARED_CALLS and (compares is None or compares[0] != 0)


def learn_start(view: FlowView, first: dict[str, Array], metric: str = "sample_cosine") -> None:
    """Keep, by flow, how far samples (or tokens) were apart at the start: the first record that has it."""
    if view.layout.name not in first and (measured := _apart(view, metric)) is not None:
        first[view.layout.name] = measured


def common_mode_grew(view: FlowView, points: int, first: Mapping[str, Array], metric: str = "sample_cosine") -> bool:
    """Whether the samples only look alike at the last so many points, because something they share has grown.

    A target's mean does, or the logit of a frequent class: in units of the activation they are as far apart there as at
    the start (`learn_start`), where they were less alike. Nothing is lost.
    """
    start, now = first.get(view.layout.name), _apart(view, metric)
    if start is None or now is None or start.shape != now.shape:
        return False
    shared = (now[0] < start[0]) & (CLEARLY_LOWER * now[1] > start[1])
    return bool(shared[-points:].all())


class TokenCollapse(Detector):
    """All tokens of a sequence have become the same vector by the last points, and were not at the first."""

    kind = "token_collapse"
    symptom = "ever"
    shown_by = ("token_cosine",)
    advice = (
        'if the blocks are post-norm, call flowscope.wrap(model, mode="keel") or make them pre-norm (a lower rate or a '
        "longer warm-up did not help at 24 blocks); else lower the learning rate, and keep a residual path around "
        "attention"
    )
    begins_with: ClassVar[dict[str, Any]] = {"common": {}}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a flow at most."""
        return said(*(self._judge(view) for view in each_flow(record, header) if view.layout.kind != "time"))

    def _judge(self, view: FlowView) -> Finding | None:
        cosine = view.get("token_cosine")
        if cosine is None or cosine.size < 3:
            return self.unseen(view.layout.name) if cosine is None else None
        learn_start(view, self.state["common"], "token_cosine")
        distance, limit = 1 - cosine, 1 - self.config.token_cosine
        if not distance[0] > CLEARLY_LOWER * limit:  # also where x_0 was not seen
            return None
        beyond = distance < limit
        trailing = _trailing(beyond)
        depth = distance.size - 1
        if trailing < max(2, math.ceil(depth / (8 if _falling(view, SUPPORTING_PRODUCT) else 3))):
            close = _trailing(distance < limit * self.config.release_factor) > 0
            return self.near(close, view.layout.name)
        if common_mode_grew(view, trailing, self.state["common"], "token_cosine"):
            return self.near(True, view.layout.name)
        where = distance.size - trailing
        nothing_back = _falling(view, self.config.vanishing_product)
        whole = depth >= DEEP and 2 * _trailing(distance < limit / 10) > depth
        places = f"{depth} blocks" if distance.size == len(view.layout.points) else f"{distance.size} merge sites"
        crossed, certain = view.row("token_cosine", where), whole or nothing_back
        message = (
            f"the mean cosine between different tokens of a sequence is {1 - distance[-1]:.5f} at the last of "
            f"{places} and {1 - distance[0]:.3f} at {view.row('token_cosine', 0)} (limit {1 - limit:.4f}, "
            f"crossed at {crossed}): what tells tokens apart is lost"
        )
        return self.found(crossed, 1 - distance[-1], 1 - limit, message, view.layout.name, certain=certain)


def trained_apart(flow: str, others: Sequence[str], record: Record) -> bool:
    """Whether another optimizer trains a flow than these others: its end is an answer (an action) and no code."""
    if (optimizers := record.metrics.get("param_optimizer")) is None:
        return False
    names = record.labels("param_optimizer")

    def of(flow: str) -> set[float]:
        held = {float(o) for name, o in zip(names, optimizers, strict=True) if name.startswith(f"{flow}.")}
        return {optimizer for optimizer in held if optimizer == optimizer}

    own = of(flow)
    return bool(own) and own.isdisjoint(set[float]().union(*map(of, others)))


class RepresentationCollapse(Detector):
    """Blocks have become copies, samples have become one vector, or a code has faded; against the run's own start."""

    kind, level = "representation_collapse", OUTCOME
    symptom = "at first"
    shown_by = ("cosine", "effective_rank")
    begins_with: ClassVar[dict[str, Any]] = {"cosines": {}, "to_input": {}, "widest": {}, "sizes": {}, "common": {}}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """Three causes a flow: copies (cosines between layers), samples (between samples), code (an inner end)."""
        views = [view for view in each_flow(record, header) if view.layout.kind not in ("time", "gates")]
        names = [view.layout.name for view in views]
        for at, view in enumerate(views):
            behind = names[at + 1 :]
            inner = view.layout.kind != "network" and behind and not trained_apart(names[at], behind, record)
            yield from said(self._copies(view), self._samples(view), self._code(view) if inner else None)

    def _copies(self, view: FlowView) -> Finding | None:
        cosine, to_input, name = view.get("cosine"), view.get("cosine_to_input"), view.layout.name
        if cosine is None or to_input is None or np.isnan(to_input[-1]) or cosine.size < 2:
            return self.unseen(name, "copies")
        first = self.state["cosines"].get(name, np.zeros((0, cosine.size)))
        start = self.state["to_input"].setdefault(name, float(to_input[-1]))
        if first.shape[1:] != cosine.shape:
            return None
        if len(first) < self.config.baseline_records:
            self.state["cosines"][name] = np.vstack([first, cosine])
            return None
        limit, base = 1 - self.config.representation_cosine, 1 - np.median(first, axis=0)
        came_closer = 1 - start > self.config.drift * (1 - to_input[-1])
        distance = np.maximum(1 - cosine, 1e-12)
        copies = (distance < limit) & (base > self.config.drift * distance)
        if copies.sum() * 2 < cosine.size or not came_closer:
            close = ((distance < limit * self.config.release_factor) & (base > limit)).sum() * 2 >= cosine.size
            return self.near(close, name, "copies")
        middle, block = np.nanmedian(cosine), view.block(int(np.argmax(copies)))
        message = (
            f"{int(copies.sum())} of {cosine.size} blocks return a copy of their input (median cosine {middle:.6f}, at "
            f"the start {1 - np.nanmedian(base):.3f}); cosine of the last point to the first {to_input[-1]:.4f}, at "
            f"the start {start:.3f}"
        )
        advice = (
            "check that the blocks' learning rate and initialisation are not near zero, nor weight decay too strong; "
            "scale the branches up or remove blocks"
        )
        return self.found(block, middle, 1 - limit, message, name, advice=advice, cause="copies")

    def _samples(self, view: FlowView) -> Finding | None:
        distance, name = sample_distance(view), view.layout.name
        if distance is None:
            return self.unseen(name, "samples")
        last = float(distance[-1])
        learn_start(view, self.state["common"])
        widest = self.state["widest"][name] = max(self.state["widest"].get(name, 0.0), last)
        limit = 1 - self.config.sample_cosine
        if (alike := samples_alike(distance, limit)) >= 2:
            if common_mode_grew(view, alike, self.state["common"]):
                return self.near(True, name, "samples")
            return self._alike(view, distance, distance.size - alike, limit, self.config.baseline_records)
        limit = 1 - self.config.embedding_cosine
        compared = calls_compared(view)
        fell = widest > CLEARLY_LOWER * last and last > SCALAR
        if compared and fell and last < limit and distance[0] > 2 * last:
            return self._alike(view, distance, distance.size - 1, limit, EMBEDDING_RECORDS)
        near = compared and fell and last < limit * self.config.release_factor
        near = near or samples_alike(distance, (1 - self.config.sample_cosine) * self.config.release_factor) >= 2
        return self.near(near, name, "samples")

    def _alike(self, view: FlowView, distance: Array, where: int, limit: float, records: int) -> Finding:
        point, name, last = view.point(where), view.layout.name, 1 - distance[-1]
        message = (
            f"different samples end in one vector: mean cosine between them {last:.5f} at the last point "
            f"(limit {1 - limit:.3f}, crossed at {point}; at its lowest {1 - self.state['widest'][name]:.3f}), "
            f"{1 - distance[0]:.3f} at {view.point(0)}"
        )
        advice = (
            "in self-supervised training add the stop-gradient, the predictor or a variance term; else check the "
            "activation (no softmax between layers) and the initialisation"
        )
        found = self.found(point, last, 1 - limit, message, name, advice=advice, records=records, cause="samples")
        # what was never apart was drawn together by no loss (a codebook of which one code is used at first)
        widest = self.state["widest"][name]
        never = widest < limit and not widest > CLEARLY_LOWER * distance[-1]
        return replace(found, symptom="ever") if never else found

    def _code(self, view: FlowView) -> Finding | None:
        """The end of an inner flow (what an encoder hands on) shrinks to nothing while the layer before it does not."""
        size, name = view.get("act_rms"), view.layout.name
        if size is None or size.size < 2 or not bool(np.isfinite(size[-2:]).all()):
            return self.unseen(name, "code")
        first = self.state["sizes"].get(name, np.zeros((0, 2)))
        if len(first) < 3:
            self.state["sizes"][name] = np.vstack([first, size[-2:]])
            return None
        before, code = np.median(first, axis=0) / np.maximum(size[-2:], np.finfo(np.float64).tiny)
        limit = self.config.faded_code
        if code <= limit or code <= TWICE * before:
            return self.near(code > limit / self.config.release_factor, name, "code")
        last, end = view.point(size.size - 1), size[-1]
        message = (
            f"what {last} hands on has faded to an RMS of {end:.2g}, {code:.1f} times less than at the start "
            f"(limit {limit:.3g} times), the layer before it {before:.1f} times: it carries less and less"
        )
        advice = "lower the weight of the term that shrinks it (the KL term of a variational autoencoder)"
        return self.found(
            last, end, end * code / limit, message, name, advice=advice, records=EMBEDDING_RECORDS, cause="code"
        )


class RankCollapse(Detector):
    """All samples (or tokens) end on one line: the effective rank of the last points has fallen to 1."""

    kind, level = "rank_collapse", OUTCOME
    yields_to = frozenset({"representation_collapse"})
    symptom = "ever"
    shown_by = ("effective_rank",)
    advice = (
        "check the activation (no softmax between layers) and the initialisation; in self-supervised training add "
        "the stop-gradient, the predictor or a variance term"
    )
    begins_with: ClassVar[dict[str, Any]] = {"rank": {}, "common": {}}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a flow at most."""
        views = (view for view in each_flow(record, header) if view.layout.kind not in ("time", "gates"))
        return said(*(self._judge(view) for view in views))

    def _judge(self, view: FlowView) -> Finding | None:
        rank, name = view.get("effective_rank"), view.layout.name
        learn_start(view, self.state["common"])
        if rank is None or rank.size < 2:
            return self.unseen(name)
        first = self.state["rank"].setdefault(name, rank.copy())
        if first.shape != rank.shape:
            return None
        limit = self.config.collapsed_rank
        # A head of one unit has rank 1 by construction, so a low rank at the start says something only where the layer
        # before it has it too; untrained layers whose biases outweigh their weights come close and grow out of it.
        strict = 1 + (limit - 1) / self.config.release_factor
        from_start = _trailing(first < strict) >= 2
        if from_start:
            limit = strict
        needed = 2 if from_start else 1
        if not rank[0] >= HEALTHY_RANK or not (from_start or first[-1] >= HEALTHY_RANK):
            return None
        trailing = _trailing(rank < limit)
        if trailing < needed:
            close = _trailing(rank < 1 + (limit - 1) * self.config.release_factor) >= needed
            return self.near(close, name)
        if not from_start and common_mode_grew(view, trailing, self.state["common"]):
            return self.near(True, name)
        crossed, records = view.point(rank.size - trailing), FROM_START_RECORDS if from_start else None
        message = (
            f"all samples end in one vector: effective rank {rank[-1]:.2f} at {view.point(rank.size - 1)} (limit "
            f"{limit:.2f}, crossed at {crossed}), {rank[0]:.1f} at {view.point(0)}, {first[-1]:.1f} there at the start"
        )
        return self.found(crossed, rank[-1], limit, message, name, records=records)


class ConstantOutput(Limit):
    """The model answers the same whatever it is given.

    What all answers share is no answer: log-probabilities are judged as the logits they come from, and a target's mean
    that outgrew its variation is none where the answers lie as far apart as they did.
    """

    kind, metric, below, row, level = "constant_output", "output_spread", "constant_output", "", OUTCOME
    yields_to = frozenset({"representation_collapse", "rank_collapse"})
    symptom = "ever"
    shown_by = ("output_spread", "sample_cosine")
    records = "baseline_records"
    message = (
        "the model's output hardly depends on its input: {value:.2g} of its mean square is variation between samples "
        "(limit {limit:.2g})"
    )
    advice = "check for a clamp or mask behind the last layer, and that inputs and targets belong together"
    begins_with: ClassVar[dict[str, Any]] = {"start": {}}

    def measured(self, record: Record) -> tuple[str, Array | None]:
        """The spread; of several values that of what tells them apart, where it is larger."""
        spread = record.metrics.get(self.metric)
        if spread is None:
            return self.metric, None
        contrast, deviation = (record.metrics.get(name) for name in ("output_contrast", "output_deviation"))
        if contrast is not None and contrast.shape == spread.shape:
            spread = np.fmax(spread, contrast)
        start = self.state["start"]
        if deviation is None or {deviation.shape, *(x.shape for x in start.values())} != {spread.shape}:
            return self.metric, spread
        start.setdefault("spread", spread)
        start.setdefault("deviation", deviation)
        varied = start["spread"] > STARTED_APART * self.limit
        return self.metric, np.where(varied & (deviation > AS_FAR * start["deviation"]), 1.0, spread)


def _falling(view: FlowView, below: float) -> bool:
    """Whether the gradient is also getting lost: its product falls below this somewhere."""
    product = view.get("gradient_product")
    return product is not None and bool((product < below).any())


def _apart(view: FlowView, metric: str) -> Array | None:
    """1 - mean cosine between samples (or tokens), and that in units of the activation's mean square [2, L+1]."""
    cosine, rms = view.get(metric), view.get("act_rms")
    if cosine is None or rms is None or cosine.shape != rms.shape:
        return None
    return np.stack([1 - cosine, np.square(rms) * (1 - cosine)])


def _trailing(flags: Flags) -> int:
    """How many entries at the end are true in a row."""
    wrong = np.flatnonzero(~flags)
    return int(flags.size if wrong.size == 0 else flags.size - 1 - wrong[-1])
