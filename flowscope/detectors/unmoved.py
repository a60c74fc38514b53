"""`update_too_small` where nothing changes at all: to the last digit, or because the learning rate came to nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import ANY_FLOW, OUTCOME, Array, Detector, Finding, Flags, said
from flowscope.detectors.held import FOREIGN, Held, held_in
from flowscope.detectors.rates import largest_rate
from flowscope.detectors.rows import module_of, parameter_name
from flowscope.records import Record, RunHeader

RATE_RECORDS = 3
"""A warm-up from 0 has left it by then."""
STILL_RECORDS = 8
"""Records in a row in which not one entry changed: a GradScaler that nobody knows of may skip the first steps."""
ROUNDING = 1e-6
"""An expected change below this share of the weights may be lost to rounding (in 16 bits: below their epsilon)."""
CARRIED = 0.1
"""More than this was in `.grad` already: micro-batches are being accumulated."""

GONE = 0.01
"""A rate below this share of its peak trains nothing."""
GONE_STEPS = 20
"""It has come to nothing where it stays so for this many steps, and for as many as were made at full rate before."""
FEW_STEPS, FEW_DROP, DROP = 50, 0.5, 0.1
"""After fewer full steps than these, the loss should have halved to call it learned; after more, a tenth is enough."""


class Unmoved(Detector):
    """Weights that stay what they are from the start, and a rate that comes to nothing before anything is learned."""

    kind, level = "update_too_small", OUTCOME
    shown_by = ("update_ratio",)
    # whether anything ever moved; per parameter its largest rate, and its records with gradient and without change
    begins_with: ClassVar[dict[str, Any]] = {"moved": False, "rate": None, "same": None, "schedule": {}}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state["schedule"] = {"peak": 0.0, "sum": 0.0, "step": -1.0, "rate": 0.0, "gone": -1.0}
        self.state |= {"first": deque(maxlen=5), "latest": deque(maxlen=20)}

    @property
    def name(self) -> str:
        """Beside the detector of small updates."""
        return "unmoved"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for each cause."""
        held = held_in(record)
        if held is None:
            yield self.unseen(ANY_FLOW)
            return
        self._learn(held, record)
        schedule = self._schedule(record)
        if not held.steps.size:
            yield from said(self._unstepped(held, record), schedule)
            return
        members = held.turn & (held.gradient > 0)
        if not members.any():
            yield from (self.unseen(cause=cause) for cause in ("rate", "still", "one"))
            yield from said(schedule)
            return
        rate = self._rate(held, members, record, header)
        still = None if rate is not None else self._still(held, members, record, header)
        yield from said(rate, still, self._one(held, members, record, header), schedule)

    def _learn(self, held: Held, record: Record) -> None:
        trains = held.turn if held.steps.size else held.trainable
        ratio = record.metrics.get("update_ratio")
        if ratio is not None and ratio.shape == trains.shape:
            self.state["moved"] = self.state["moved"] or bool((ratio[trains & ~held.still] > 0).any())
        self.state["rate"] = np.fmax(_like(self.state["rate"], trains), held.rate)
        same = np.nan_to_num(_like(self.state["same"], trains))
        counted = np.where(held.turn & held.still & self._should_move(held, record), same + 1, same)
        # what has moved once is no parameter that never moves
        self.state["same"] = np.where(held.turn & ~held.still | (same < 0), -1.0, counted)

    @staticmethod
    def _should_move(held: Held, record: Record) -> Flags:
        """Whether rate and gradient are large enough that no rounding hides the change."""
        norm, grid = record.metrics.get("param_norm"), record.metrics.get("param_epsilon")
        if norm is None or norm.shape != held.gradient.shape:
            return np.zeros(held.gradient.shape, dtype=bool)
        finest = ROUNDING if grid is None or grid.shape != norm.shape else np.fmax(ROUNDING, 2 * grid)
        with np.errstate(all="ignore"):
            expected = held.rate * held.gradient / norm
        large: Flags = (expected > finest) | (norm == 0) | np.isnan(held.rate)
        return large & (held.gradient > 0) & np.not_equal(held.rate, 0)

    # -- the causes ----------------------------------------------------------------------------------------------------

    def _unstepped(self, held: Held, record: Record) -> Finding | None:
        """A loop without an optimizer of ours: `scope.step` marks steps that change nothing."""
        learning = held.trainable & (held.gradient > 0)
        carried = record.metrics.get("grad_carried", np.zeros(1))
        if self.state["moved"] or held.facts[FOREIGN] > 0 or bool((carried > CARRIED).any()):
            return None
        if not learning.any() or not bool(held.still[held.trainable].all()):
            return self.unseen(cause="unstepped")
        message = (
            f"{int(learning.sum())} parameters have a gradient and none of the model's weights changes: no optimizer "
            "has stepped since watch, and nothing else updates them"
        )
        advice = "call optimizer.step() after backward, with its parentheses"
        return self.found("", 0.0, 0.0, message, advice=advice, records=STILL_RECORDS, cause="unstepped")

    def _rate(self, held: Held, members: Flags, record: Record, header: RunHeader) -> Finding | None:
        """A rate that was exactly 0 in every record so far."""
        zero = members & (self.state["rate"] == 0)
        if not zero.any():
            return None
        count, total = int(zero.sum()), int(members.sum())
        first = parameter_name(record, header, int(np.argmax(zero)))
        what = "all parameters" if count == total else f"{count} of {total} parameters with a gradient"
        message = f"the learning rate of {what} is exactly 0 since the first step (the first is {first}): nothing moves"
        advice = "look at the rate the optimizer was given, and whether scheduler.step() is called once a step"
        return self.found(
            "" if count == total else module_of(first) or first, 0.0, 0.0, message, advice=advice, records=RATE_RECORDS,
            severity="warning" if 2 * count > total else "info", cause="rate",
        )  # fmt: skip

    def _still(self, held: Held, members: Flags, record: Record, header: RunHeader) -> Finding | None:
        if self.state["moved"] or not bool(held.still[members].all()):
            return None
        first, rate = parameter_name(record, header, int(np.argmax(members))), largest_rate(record)
        at_rate = f" at a learning rate of {rate:.2g}" if np.isfinite(rate) else ""
        message = (
            f"not one entry of the {int(members.sum())} parameters with a gradient has changed since the start"
            f"{at_rate} (the first is {first})"
        )
        advice = "look whether optimizer.step() adds its update to the weights, and raise the learning rate"
        return self.found("", 0.0, 0.0, message, advice=advice, records=STILL_RECORDS, cause="still")

    def _one(self, held: Held, members: Flags, record: Record, header: RunHeader) -> Finding | None:
        """Parameters that never move while others do, though their gradient and rate would move them."""
        never = members & (self.state["same"] >= STILL_RECORDS)
        if not never.any() or bool(never[members].all()):
            return None
        count, first = int(never.sum()), parameter_name(record, header, int(np.argmax(never)))
        message = (
            f"{count} of {int(members.sum())} parameters have a gradient and a rate, and not one of their entries has "
            f"changed since the start (the first is {first}): the optimizer steps past them"
        )
        advice = f"look whether the optimizer updates {first} itself, and not a copy, a view or a cache of it"
        return self.found(module_of(first) or first, 0.0, 0.0, message, advice=advice, records=1, cause="one")

    def _schedule(self, record: Record) -> Finding | None:
        """The rate has come to nothing while the loss is where it began."""
        course, rate = self.state["schedule"], largest_rate(record)
        given = record.metrics.get("step_losses", np.array([np.nan if record.loss is None else record.loss]))
        losses = given[np.isfinite(given)].tolist()
        first, latest = self.state["first"], self.state["latest"]
        first.extend(losses[: first.maxlen - len(first)])
        latest.extend(losses)
        if not np.isfinite(rate):
            return self.unseen(cause="schedule")
        steps = record.step - course["step"]
        before = course["rate"] if course["step"] >= 0 and steps > 1 else rate
        course["sum"] += steps * 0.5 * (rate + before)
        course |= {"peak": max(course["peak"], rate), "step": float(record.step), "rate": rate}
        if rate > GONE * course["peak"] or course["peak"] == 0:
            course["gone"] = -1.0
            return None
        course["gone"] = float(record.step) if course["gone"] < 0 else course["gone"]
        full = course["sum"] / course["peak"]
        if record.step - course["gone"] < max(GONE_STEPS, full) or len(first) < 3 or len(latest) < 3:
            return self.unseen(cause="schedule")
        began, now = float(np.median(first)), float(np.median(latest))
        share = FEW_DROP if full < FEW_STEPS else DROP
        if not began - now < share * abs(began):
            return None
        message = (
            f"the learning rate fell from {course['peak']:.2g} to {rate:.2g} after as much as {full:.0f} full steps, "
            f"and the loss is hardly below where it began ({began:.3g}, now {now:.3g})"
        )
        advice = (
            "look whether scheduler.step() is called once a batch where its numbers are epochs, and raise its length"
        )
        return self.found("", rate, GONE * course["peak"], message, advice=advice, records=1, cause="schedule")


def _like(values: Array | None, flags: Flags) -> Array:
    return values if values is not None and values.shape == flags.shape else np.full(flags.shape, np.nan)
