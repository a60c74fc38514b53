"""The clock that ranks share: which step of one rank is which of another's.

A rank's own count of steps tells nothing: it stands still where the rank leaves a step out. How many collectives of the
training a rank has entered does tell, as the training itself only goes on where all enter the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from flowscope.ranks.gathering import KEPT
from flowscope.ranks.wire import NEVER, Stamp
from flowscope.steps.losses import StepLoss
from flowscope.torch_internals import sequence_of

FAR = 1 << 40


class Clock:
    """Gives each step that ends a stamp.

    A stamp is (collectives entered in the groups of the training, forwards begun since the last of them, steps ended
    since). The second tells steps without any collective apart, the third a step that was made again.

    Attributes:
        groups: those whose collectives count.
        stamp: of the last step that ended.
        before: of the one before it.
        begun: how many forwards have begun since.
        uneven: whether the last step took another number of collectives and forwards than the one before it: this rank
            may have left one out.
    """

    def __init__(self) -> None:
        self.groups: tuple[Any, ...] = ()
        self.stamp = self.before = NEVER
        self.uneven = False
        self._entered = self._forwards = self.begun = 0
        self._taken = -1, -1
        self._steps: dict[Stamp, StepLoss] = {}

    def counts(self) -> bool:
        """Whether there is anything to count by."""
        return bool(self.groups) and all(sequence_of(group) >= 0 for group in self.groups)

    def _look(self) -> None:
        entered = sum(sequence_of(group) for group in self.groups)
        if entered != self._entered:
            self._entered, self._forwards = entered, 0

    def forward_begins(self) -> Stamp:
        """A training forward of the model begins; returns the largest stamp that no step of this rank has any more."""
        self._look()
        self._forwards += 1
        self.begun += 1
        return self._entered, self._forwards - 1, FAR

    def step_ended(self, step: StepLoss) -> None:
        """A step has ended; its number may still change."""
        self._look()
        again = self.stamp[2] + 1 if self.stamp[:2] == (self._entered, self._forwards) else 0
        taken = self._entered - self.stamp[0], self.begun
        self.uneven = self.stamp != NEVER and taken != self._taken
        self._taken, self.begun = taken, 0
        self.before, self.stamp = self.stamp, (self._entered, self._forwards, again)
        if self.groups:  # else nobody can know other numbers
            self._steps[self.stamp] = step
        if len(self._steps) > KEPT:
            del self._steps[next(iter(self._steps))]

    def catch_up(self, numbers: Mapping[Stamp, int]) -> int:
        """Give this rank's steps the largest number that a rank has for them.

        Args:
            numbers: those known of some steps.

        Returns:
            By how much the numbers of the steps to come grow.
        """
        grown = 0
        for stamp in sorted(numbers):
            behind = numbers[stamp] - self._steps[stamp].step if stamp in self._steps else 0
            for later, step in self._steps.items():
                if behind > 0 and later >= stamp:
                    step.renumber(step.step + behind)
            grown += max(behind, 0)
        return grown


def fingerprint(stamps: Iterable[object]) -> float:
    """A whole number that a double holds, and that tells these from others."""
    return float(int.from_bytes(hashlib.sha256(repr([*stamps]).encode()).digest()[:6], "big"))
