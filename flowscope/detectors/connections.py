"""`gate_saturation`, `stream_collapse` and `mixing_gain`: what goes wrong at merge sites with gates or streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import SHARE_RELEASE, Array, Detector, Finding, Flags, said
from flowscope.detectors.rows import FlowView, each_flow
from flowscope.records import Record, RunHeader

MOST = 0.5
"""Fewer saturated gates than this share are how a trained network skips a block: an info."""
SHUT = 0.5
"""A saturated gate with a mean below it is shut, else open."""
CERTAIN = 100.0
"""A gain beyond its limit by this factor is an error at once (the mHC paper's surge came at about 3,000)."""


class GateSaturation(Detector):
    """Gates whose logits lie where the sigmoid's derivative is under 0.7 %: most of them shut is a warning."""

    kind = "gate_saturation"
    shown_by = ("gate_saturation", "gate_mean")

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """Two causes a flow: serious (most gates), few; one of them at a time."""
        for view in each_flow(record, header):
            share, mean, name = view.get("gate_saturation"), view.get("gate_mean"), view.layout.name
            if share is None or mean is None or share.shape != mean.shape:
                yield from (self.unseen(name, cause) for cause in ("serious", "few"))
                continue
            beyond = share > self.config.gate_saturation
            if beyond.any():
                yield self._finding(view, share, mean, beyond)
            close = share > SHARE_RELEASE * self.config.gate_saturation
            nearly = self._serious(view, mean, close, SHARE_RELEASE * MOST)
            yield from said(
                self.near(close.any() and not beyond.any(), name, "few"),
                self.near(nearly and not self._serious(view, mean, beyond, MOST), name, "serious"),
            )

    def _finding(self, view: FlowView, share: Array, mean: Array, beyond: Flags) -> Finding:
        limit, name = self.config.gate_saturation, view.layout.name
        shut = beyond & (mean < SHUT)
        serious = self._serious(view, mean, beyond, MOST)
        counted = shut if shut.any() else beyond
        where, count = int(np.argmax(counted)), int(counted.sum())
        site, word = view.site("gate_saturation", where), "shut" if shut.any() else "open"
        message = (
            f"{count} of {share.size} gates are {word} and saturated, the first with mean {mean[where]:.2g} and "
            f"{share[where]:.0%} of its values beyond |logit| 5 (limit {limit:.0%}): they hardly learn any more"
        )
        if serious:
            advice = "start the gates' bias nearer to 0 (-2 for carry)"
            return self.found(site, share[where], limit, message, name, advice=advice, cause="serious")
        advice = "nothing to do where the block is meant to be skipped or passed whole; a bias nearer to 0 reopens it"
        return self.found(site, share[where], limit, message, name, severity="info", advice=advice, cause="few")

    @staticmethod
    def _serious(view: FlowView, mean: Array, saturated: Flags, most: float) -> bool:
        """Most gates shut; for gates that the user named, whose meaning is unknown, most of them saturated."""
        named = view.layout.kind == "gates" and not view.layout.cell
        counted = saturated if named else saturated & (mean < SHUT)
        return bool(counted.sum() >= most * saturated.size)


class StreamCollapse(Detector):
    """Streams of hyper-connections that have become one: equal after they had parted, or fed by a single one."""

    kind = "stream_collapse"
    yields_to = frozenset({"token_collapse"})
    shown_by = ("stream_cosine",)
    advice = (
        'start the residual mapping at the identity (init="prenorm"), or keep it doubly stochastic '
        '(flowscope.wrap(model, mode="mhc"))'
    )
    begins_with: ClassVar[dict[str, Any]] = {"furthest": {}}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding a flow at most. Streams start equal, so equality alone says nothing."""
        return said(*(self._judge(view) for view in each_flow(record, header)))

    def _judge(self, view: FlowView) -> Finding | None:
        config, name, cosine = self.config, view.layout.name, view.get("stream_cosine")
        if cosine is None:
            return self.unseen(name)
        distance, limit = 1 - cosine, 1 - config.stream_cosine
        middle = float(np.nanmedian(distance))
        furthest = self.state["furthest"][name] = max(self.state["furthest"].get(name, 0.0), middle)
        least = view.get("mix_colsum_min")
        unused = np.zeros(distance.shape, dtype=bool) if least is None else least < config.stream_unused
        fed_by_one = bool(unused.sum() >= MOST * unused.size)
        parted = furthest > config.drift * limit
        equal = distance < limit
        if equal.sum() < MOST * np.isfinite(distance).sum() or not (parted or fed_by_one):
            return self.near(middle < limit * config.release_factor and parted, name)
        where = int(np.argmax(equal))
        told = f"they had parted to {1 - furthest:.3f}" if parted else "one stream feeds them all"
        if fed_by_one and least is not None:
            told += f" (least column sum of the composite mapping {np.nanmin(least):.2g})"
        message = (
            f"the streams are one: median cosine between them {1 - middle:.6f} (limit {1 - limit:.4f}), at "
            f"{int(equal.sum())} of {distance.size} sites; {told}"
        )
        return self.found(view.site("stream_cosine", where), 1 - middle, 1 - limit, message, name)


class MixingGain(Detector):
    """The composite residual mapping of the streams amplifies (forward or backward), or passes next to nothing."""

    kind = "mixing_gain"
    shown_by = ("mix_gain_backward", "mix_gain_forward")

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """Two causes a flow: amplifies, attenuates."""
        for view in each_flow(record, header):
            forward, backward = view.get("mix_gain_forward_norm"), view.get("mix_gain_backward_norm")
            if forward is None or backward is None:
                yield from (self.unseen(view.layout.name, cause) for cause in ("amplifies", "attenuates"))
            else:
                yield from said(self._amplifies(view, forward, backward), self._attenuates(view, forward))

    def _amplifies(self, view: FlowView, forward: Array, backward: Array) -> Finding | None:
        limit, name = self.config.mixing_gain, view.layout.name
        gains = np.fmax(forward, backward)
        largest = float(np.nanmax(gains))
        if largest <= limit:
            return self.near(largest > limit / self.config.release_factor, name, "amplifies")
        # forward products grow from the input on, backward ones towards it: the first site beyond from where they start
        ahead = float(np.nanmax(forward)) >= 0.99 * float(np.nanmax(backward))  # a tie but for rounding is forward
        over = np.flatnonzero((forward if ahead else backward) > limit)
        where = int(over[0] if ahead else over[-1])
        place, certain = view.site("mix_gain_forward_norm", where), largest > CERTAIN * limit
        message = (
            f"the residual mappings of the streams multiply to a gain of {largest:.3g} "
            f"{'forward' if ahead else 'backward'} (limit {limit:.3g}, crossed at {place}; 1 keeps the signal)"
        )
        advice = 'keep the mapping doubly stochastic (flowscope.wrap(model, mode="mhc")), or start it at the identity'
        return self.found(place, largest, limit, message, name, advice=advice, certain=certain, cause="amplifies")

    def _attenuates(self, view: FlowView, forward: Array) -> Finding | None:
        limit, name = 1 / self.config.mixing_gain, view.layout.name
        seen = np.flatnonzero(np.isfinite(forward))
        if seen.size == 0:
            return self.unseen(name, "attenuates")
        last = float(forward[seen[-1]])
        if last >= limit:
            return self.near(last < limit * self.config.release_factor, name, "attenuates")
        place = view.site("mix_gain_forward_norm", int(np.flatnonzero(forward < limit)[0]))
        message = (
            f"the residual mappings of the streams pass {last:.2g} of the carry to the end of the flow (limit "
            f"{limit:.2g}, crossed at {place}): the residual path is cut"
        )
        advice = 'start the residual mapping at the identity (init="prenorm"), or use flowscope.wrap(model, mode="mhc")'
        return self.found(place, last, limit, message, name, advice=advice, cause="attenuates")
