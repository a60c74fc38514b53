"""`update_too_small`, `update_too_large` and `over_clipped`: what a step changes, against the weights it changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import OUTCOME, WIRING, Detector, Finding, said
from flowscope.detectors.rates import Updates, decay_advice, updates_of, working
from flowscope.detectors.rows import parameter_name
from flowscope.records import Record, RunHeader

SLOW_RECORDS = 10
"""Too small for this many records in a row: single records may be small by their batch or by the schedule."""
USUAL_ABOVE_OVERALL = 30.0
"""The median tensor may move by this much more than all weights together (biases are small), not by more."""
LARGE_RECORDS = 3
"""A parameter that grows out of almost zero doubles once or twice: the third record in a row is no start."""
LOW_PRECISION = 1e-5
"""A larger machine epsilon than this: fp16 (9.8e-4) and bf16 (7.8e-3)."""
ALL_TOGETHER = 3.0
"""All weights together may change by a third of what one tensor may."""
ENORMOUS = 10.0
"""Beyond this there is nothing to wait for (SageMaker Debugger's WeightUpdateRatio)."""


class UpdateTooSmall(Detector):
    """The steps leave the weights as good as unchanged from the start, or the weights' precision swallows them."""

    kind, level = "update_too_small", OUTCOME
    yields_to = frozenset({"update_too_small"})  # of `Unmoved`: what changes nothing at all
    shown_by = ("update_ratio",)
    begins_with: ClassVar[dict[str, Any]] = {"best": 0.0, "course": {}}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for small updates, one for updates lost to rounding."""
        updates = updates_of(record, self.state["course"])
        if updates is None:
            yield self.unseen()
            yield self.unseen(cause="precision")
            return
        slow, rounded = self._slow(record, header, updates), self._rounded(record, header, updates)
        if slow is not None and rounded is not None and rounded.level == "beyond":
            slow = self.unseen()  # what rounding swallows, a higher rate need not save
        yield from said(slow, rounded)

    def _slow(self, record: Record, header: RunHeader, updates: Updates) -> Finding | None:
        limit, release = self.config.small_update, self.config.release_factor
        if self.state["best"] >= limit * release:
            return None  # the run has moved: small updates later are its schedule, or the end of what it can learn
        # a huge embedding of which a batch uses few rows hides the rest from the one, small biases move the other
        overall = max(updates.overall, updates.usual / USUAL_ABOVE_OVERALL)
        best = self.state["best"] = max(self.state["best"], overall)
        if best >= limit or not updates.working:
            return self.near(best < limit * release)
        least = int(np.argmin(np.where(updates.trained, updates.ratio, np.inf)))
        name, rate = parameter_name(record, header, least), updates.rate[least]
        at_rate = f" at a learning rate of {rate:.2g}" if np.isfinite(rate) else ""
        message = (
            f"a step changes the weights by {overall:.2g} of their norm{at_rate} (limit {limit:.2g}), and never did "
            f"more; the least is {name} with {updates.ratio[least]:.2g}: nothing is learned"
        )
        advice = "raise the learning rate (about 1e-3 of the weights' norm a step is usual)"
        return self.found(name, overall, limit, message, advice=advice, records=SLOW_RECORDS)

    def _rounded(self, record: Record, header: RunHeader, updates: Updates) -> Finding | None:
        """Weights kept in 16 bits whose entries mostly stay exactly what they were, updates being below their grid."""
        same, grid = record.metrics.get("param_unchanged"), record.metrics.get("param_epsilon")
        if same is None or grid is None or same.shape != updates.ratio.shape or grid.shape != same.shape:
            return self.unseen(cause="precision")
        if not bool(np.nanmax(grid) > LOW_PRECISION):
            return None
        coarse = updates.trained & (grid > LOW_PRECISION) & (updates.ratio < grid)
        norms = record.metrics.get("param_is_norm")
        if norms is not None and norms.shape == coarse.shape:
            coarse &= norms != 1  # weights that are all 1 stay so for long in healthy runs too
        share, limit = float(np.median(same[coarse])) if coarse.any() else 0.0, self.config.unchanged_share
        if 2 * int(coarse.sum()) < int(updates.trained.sum()) or 1 - share > (1 - limit) * self.config.release_factor:
            return None
        if share < limit or not updates.working:
            return self.near(True, cause="precision")
        most = int(np.argmax(np.where(coarse, same, -1.0)))
        name = parameter_name(record, header, most)
        message = (
            f"the step leaves {100 * share:.0f} % of the entries of half the weights exactly as they were (limit "
            f"{100 * limit:.0f} %), most in {name}: updates of {updates.ratio[most]:.2g} of the weights are below half "
            f"the spacing of their numbers (epsilon {grid[most]:.2g})"
        )
        advice = "keep the weights in float32 and compute in torch.autocast(dtype=torch.bfloat16)"
        return self.found(name, share, limit, message, advice=advice, cause="precision", records=SLOW_RECORDS)


class UpdateTooLarge(Detector):
    """A step changes a parameter by more than the largest norm it ever had, or all weights by a third of theirs."""

    kind = "update_too_large"
    symptom = "ever"
    shown_by = ("update_ratio",)
    advice = "lower the learning rate (by 10 as a first try), or warm it up"
    # the largest norm so far by parameter, and where the weights began
    begins_with: ClassVar[dict[str, Any]] = {"largest": None, "course": {}, "decay": {}}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding that names the worst parameter."""
        updates = updates_of(record, self.state["course"])
        if updates is None:
            yield self.unseen()
            return
        decay = decay_advice(record, header, self.state["decay"])
        largest = self.state["largest"]
        started = largest is not None and largest.shape == updates.norm.shape
        norm = np.where(np.isfinite(updates.norm), updates.norm, np.nan)
        # a scalar that crosses zero, or grows out of it, is no fault: the measure is the largest norm it had
        largest = self.state["largest"] = np.fmax(largest, norm) if started else norm
        with np.errstate(all="ignore"):
            relative = np.where(updates.trained, updates.ratio * updates.norm / largest, 0.0)
        worst, limit, overall = int(np.argmax(relative)), self.config.large_update, updates.overall
        value = float(max(relative[worst], ALL_TOGETHER * overall))
        if value <= limit:
            yield from said(self.near(value > limit / self.config.release_factor))
            return
        certain = overall > limit or (started and relative[worst] > ENORMOUS * limit)
        # an optimizer that looks where it steps (LBFGS) may overshoot once
        certain = certain and "step_evaluations" not in record.metrics
        name, rate = parameter_name(record, header, worst), updates.rate[worst]
        at_rate = f" at a learning rate of {rate:.2g}" if np.isfinite(rate) else ""
        message = (
            f"the step changes all weights together by {overall:.2g} of their norm (limit {limit / ALL_TOGETHER:.2g}), "
            f"and {name} by {relative[worst]:.2g} of the largest norm it had (limit {limit:.2g}){at_rate}"
        )
        value = max(float(relative[worst]), overall)
        yield self.found(name, value, limit, message, advice=decay, certain=bool(certain), records=LARGE_RECORDS)


class OverClipped(Detector):
    """Clipping takes almost all of every gradient, and the updates that are left are small."""

    kind, level = "over_clipped", WIRING
    shown_by = ("clip_ratio", "param_grad_norm_raw")

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the model."""
        del header
        clipped, steady = record.metrics.get("clip_ratio"), working(record, self.state)
        if clipped is None or clipped.size != 1 or not np.isfinite(clipped[0]):
            yield self.unseen()
            return
        ratio, limit, release = float(clipped[0]), self.config.clip_ratio, self.config.release_factor
        if ratio >= limit * release:
            return
        updates, small = updates_of(record, {}), self.config.clipped_update
        if updates is None:
            yield self.unseen()
            return
        overall = updates.overall
        if overall >= small * release:
            return
        if ratio >= limit or overall >= small or not steady:
            yield from said(self.near(True))
            return
        message = (
            f"clipping leaves {ratio:.2g} of the gradient (limit {limit:.2g}) at each of the last {SLOW_RECORDS} "
            f"records, and a step changes the weights by {overall:.2g} of their norm (limit {small:.2g})"
        )
        total = float(np.sqrt(np.nansum(np.square(record.metrics["param_grad_norm"]))))
        advice = f"raise max_norm (the gradient's norm is {total / ratio:.2g} before clipping)"
        scale = record.metrics.get("gradient_scale")
        if scale is not None and scale[0] * ratio >= 1:
            # what clipping left, times the scale, is what it was asked to leave: more than there was
            advice = (
                f"if max_norm is {total * scale[0]:.3g}, gradients are clipped while the loss scale is still in them: "
                f"call scaler.unscale_(optimizer) before clip_grad_norm_. Else {advice}"
            )
        yield self.found("", ratio, limit, message, advice=advice, records=SLOW_RECORDS)
