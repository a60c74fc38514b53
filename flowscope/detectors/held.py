"""What detectors of wiring share: what the optimizers of a record hold, and what they found there.

A record of a run that does not say how often its optimizers stepped (0.1, or without parameter metrics) says nothing
here: what cannot be read is not what is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowscope.detectors.detector import Array, Flags
from flowscope.records import Record

LEFT, BACKWARDS, LEAF_LOSS, FOREIGN = range(4)
"""Rows of `gradient_facts`."""


@dataclass(frozen=True)
class Held:
    """The parameters of one record and their optimizers.

    Attributes:
        steps: [K] of each optimizer since it is watched; empty where none of the model's has stepped.
        trainable: [N] which parameters ask for a gradient.
        held: [N] which of these an optimizer holds.
        turn: [N] which of these belong to an optimizer that stepped in this training step.
        gradient: [N] norms of the gradients that it used, NaN where there was none.
        left: [N] norms at the end of backward, NaN where not read.
        waiting: [N] steps of its optimizer that found no gradient in a parameter which never had one.
        cleared: [N] which of those backward gave one that was gone when the optimizer stepped.
        called: [N] of those, 1 where its module has run, 0 where not, NaN where that is not known.
        idle: [N] of those with gradients of exactly 0 only, which were given nothing in this step.
        weighted: [N] of those, above 0 where the loss multiplies all that is made of them by 0, 2 where a term of it
            has no graph beside; NaN where not known.
        still: [N] which the step left exactly as they were.
        rate: [N] learning rates, NaN where not known.
        facts: [4] what is known where there are no gradients, or no optimizer; NaN elsewhere.
    """

    steps: Array
    trainable: Flags
    held: Flags
    turn: Flags
    gradient: Array
    left: Array
    waiting: Array
    cleared: Flags
    called: Array
    idle: Flags
    weighted: Array
    still: Flags
    rate: Array
    facts: Array

    @property
    def lost(self) -> Flags:
        """Parameters whose gradient was there after backward, and gone (or zero) when the optimizer stepped."""
        return (self.left > 0) & ~(self.gradient > 0)

    @property
    def step(self) -> float:
        """How often the optimizer that stepped most often did."""
        return float(np.max(self.steps, initial=0.0))


def held_in(record: Record) -> Held | None:
    """What the optimizers hold, None where the record does not say."""
    metrics = record.metrics
    steps, facts = metrics.get("steps_made"), metrics.get("gradient_facts")
    columns = [metrics.get(f"param_{name}") for name in ("trainable", "optimized", "grad_norm")]
    asks, optimized, gradient = columns
    if (steps is None and facts is None) or asks is None or optimized is None or gradient is None:
        return None
    if not asks.shape == optimized.shape == gradient.shape:
        return None

    def column(name: str, otherwise: float) -> Array:
        found = metrics.get(f"param_{name}")
        return found if found is not None and found.shape == gradient.shape else np.full(gradient.shape, otherwise)

    trainable = asks == 1
    held = trainable & (optimized == 1)
    return Held(
        np.zeros(0) if steps is None else steps,
        trainable,
        held,
        held & _turn(record, column("optimizer", 0.0)),
        gradient,
        column("grad_norm_raw", np.nan),
        column("waiting", 0.0),
        column("cleared", 0.0) == 1,
        column("called", np.nan),
        column("idle", 0.0) == 1,
        column("zero_weight", np.nan),
        column("still", 0.0) == 1,
        column("lr", np.nan),
        np.full(4, np.nan) if facts is None else facts,
    )


def _turn(record: Record, optimizer: Array) -> Flags:
    turns = record.metrics.get("optimizer_turns")
    if turns is None:  # one optimizer: its step made the record
        return np.ones(optimizer.shape, dtype=bool)
    known = ~np.isnan(optimizer)
    made = np.zeros(optimizer.shape, dtype=bool)
    made[known] = turns[optimizer[known].astype(int)] > 0
    return made
