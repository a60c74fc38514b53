"""`update_too_small`, `update_too_large` and `over_clipped`: what a step changes, against the weights it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors.detector import Array, Detector, Finding, pack, parameter_name, unpack
from flowscope.detectors.rates import Course, Rate, Updates
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

    kind = "update_too_small"
    yields_to = frozenset({"stale_parameters", "over_clipped", "vanishing_gradient", "dead_units", "no_gradient"})

    def __init__(self, config: WatchConfig) -> None:
        super().__init__(config)
        self._course = Course()
        self._best = 0.0

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for small updates, one for updates lost to rounding."""
        updates = self._course.updates(record)
        if updates is None:
            yield Finding(self.kind, level="unseen")
            yield Finding(self.kind, cause="precision", level="unseen")
            return
        slow, rounded = self._slow(record, header, updates), self._rounded(record, header, updates)
        if slow is not None and rounded is not None and rounded.level == "beyond":
            slow = Finding(self.kind, level="unseen")  # what rounding swallows, a higher rate need not save
        for finding in (slow, rounded):
            if finding is not None:
                yield finding

    def _slow(self, record: Record, header: RunHeader, updates: Updates) -> Finding | None:
        limit, release = self.config.small_update, self.config.release_factor
        if self._best >= limit * release:
            return None  # the run has moved: small updates later are its schedule, or the end of what it can learn
        # a huge embedding of which a batch uses few rows hides the rest from the one, small biases move the other
        overall = max(updates.overall, updates.usual / USUAL_ABOVE_OVERALL)
        self._best = max(self._best, overall)
        if self._best >= limit * release:
            return None
        if self._best >= limit or not updates.working:
            return Finding(self.kind, level="near")
        least = int(np.argmin(np.where(updates.trained, updates.ratio, np.inf)))
        name, rate = parameter_name(record, header, least), updates.rate[least]
        at_rate = f" at a learning rate of {rate:.2g}" if np.isfinite(rate) else ""
        return Finding(
            self.kind,
            name,
            "warning",
            overall,
            limit,
            f"a step changes the weights by {overall:.2g} of their norm{at_rate} (limit {limit:.2g}), and never did "
            f"more; the least is {name} with {updates.ratio[least]:.2g}: nothing is learned",
            "raise the learning rate (about 1e-3 of the weights' norm a step is usual)",
            records=SLOW_RECORDS,
        )

    def _rounded(self, record: Record, header: RunHeader, updates: Updates) -> Finding | None:
        """Weights kept in 16 bits whose entries mostly stay exactly what they were, updates being below their grid."""
        same, grid = record.metrics.get("param_unchanged"), record.metrics.get("param_epsilon")
        if same is None or grid is None or same.shape != updates.ratio.shape or grid.shape != same.shape:
            return Finding(self.kind, cause="precision", level="unseen")
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
            return Finding(self.kind, cause="precision", level="near")
        most = int(np.argmax(np.where(coarse, same, -1.0)))
        name = parameter_name(record, header, most)
        return Finding(
            self.kind,
            name,
            "warning",
            share,
            limit,
            f"the step leaves {100 * share:.0f} % of the entries of half the weights exactly as they were (limit "
            f"{100 * limit:.0f} %), most in {name}: updates of {updates.ratio[most]:.2g} of the weights are below half "
            f"the spacing of their numbers (epsilon {grid[most]:.2g})",
            "keep the weights in float32 and compute in torch.autocast(dtype=torch.bfloat16)",
            cause="precision",
            records=SLOW_RECORDS,
        )

    def state_dict(self) -> dict[str, Any]:
        """The largest update so far and the learning rates' course."""
        return {"best": self._best, "course": self._course.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._best = state["best"]
        self._course.load_state_dict(state["course"])


class UpdateTooLarge(Detector):
    """A step changes a parameter by more than the largest norm it ever had, or all weights by a third of theirs."""

    kind = "update_too_large"

    def __init__(self, config: WatchConfig) -> None:
        super().__init__(config)
        self._course = Course()
        self._largest: Array | None = None

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding that names the worst parameter."""
        updates = self._course.updates(record)
        if updates is None:
            yield Finding(self.kind, level="unseen")
            return
        started = self._largest is not None and self._largest.shape == updates.norm.shape
        norm = np.where(np.isfinite(updates.norm), updates.norm, np.nan)
        # a scalar that crosses zero, or grows out of it, is no fault: the measure is the largest norm it had
        largest = np.fmax(self._largest, norm) if self._largest is not None and started else norm
        self._largest = largest
        with np.errstate(all="ignore"):
            relative = np.where(updates.trained, updates.ratio * updates.norm / largest, 0.0)
        worst, limit, overall = int(np.argmax(relative)), self.config.large_update, updates.overall
        value = float(max(relative[worst], ALL_TOGETHER * overall))
        if value <= limit:
            if value > limit / self.config.release_factor:
                yield Finding(self.kind, level="near")
            return
        certain = overall > limit or (started and relative[worst] > ENORMOUS * limit)
        name, rate = parameter_name(record, header, worst), updates.rate[worst]
        at_rate = f" at a learning rate of {rate:.2g}" if np.isfinite(rate) else ""
        yield Finding(
            self.kind,
            name,
            "error" if certain else "warning",
            max(float(relative[worst]), overall),
            limit,
            f"the step changes all weights together by {overall:.2g} of their norm (limit {limit / ALL_TOGETHER:.2g}), "
            f"and {name} by {relative[worst]:.2g} of the largest norm it had (limit {limit:.2g}){at_rate}",
            "lower the learning rate (by 10 as a first try), or warm it up",
            immediate=certain,
            records=LARGE_RECORDS,
        )

    def state_dict(self) -> dict[str, Any]:
        """The largest norm so far by parameter, and where the weights began."""
        largest = None if self._largest is None else pack(self._largest)
        return {"largest": largest, "course": self._course.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._largest = None if state["largest"] is None else unpack(state["largest"])
        self._course.load_state_dict(state["course"])


class OverClipped(Detector):
    """Clipping takes almost all of every gradient, and the updates that are left are small."""

    kind = "over_clipped"

    def __init__(self, config: WatchConfig) -> None:
        super().__init__(config)
        self._rate = Rate()

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for the model."""
        del header
        clipped, working = record.metrics.get("clip_ratio"), self._rate.working(record)
        if clipped is None or clipped.size != 1 or not np.isfinite(clipped[0]):
            yield Finding(self.kind, level="unseen")
            return
        ratio, limit, release = float(clipped[0]), self.config.clip_ratio, self.config.release_factor
        if ratio >= limit * release:
            return
        updates, small = Course().updates(record), self.config.clipped_update
        if updates is None:
            yield Finding(self.kind, level="unseen")
            return
        overall = updates.overall
        if overall >= small * release:
            return
        if ratio >= limit or overall >= small or not working:
            yield Finding(self.kind, level="near")
            return
        yield Finding(
            self.kind,
            "",
            "warning",
            ratio,
            limit,
            f"clipping leaves {ratio:.2g} of the gradient (limit {limit:.2g}) at each of the last {SLOW_RECORDS} "
            f"records, and a step changes the weights by {overall:.2g} of their norm (limit {small:.2g})",
            f"raise max_norm (the gradient's norm is {_total(record) / ratio:.2g} before clipping)",
            records=SLOW_RECORDS,
        )

    def state_dict(self) -> dict[str, Any]:
        """The learning rate's peak and last value."""
        return self._rate.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._rate.load_state_dict(state)


def _total(record: Record) -> float:
    return float(np.sqrt(np.nansum(np.square(record.metrics["param_grad_norm"]))))
