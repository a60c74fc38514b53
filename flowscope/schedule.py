"""When to sample: a schedule is a pure function `step -> bool`, or follows a cost. Steps count from 0."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real

from flowscope.errors import FlowscopeError
from flowscope.meter import Cost

Schedule = Callable[[int], bool]

FIRST_STEPS = 10
"""The first steps are all sampled: a Post-LN stack loses its gradient within 40 steps, and baselines come from here."""
BUDGET = 0.01
"""The share of a step that flowscope may take where nothing else is asked for."""
SHORTEST, LONGEST = 10, 80
"""Each so many steps one is sampled. A sparse watcher is a blind one: beyond `LONGEST` only who asks for a budget."""
STAYS = 100
"""So many intervals in a row are alike before one is twice as long: faults show early, and short runs are dense."""
SLACK = 0.8
"""The interval is halved again where the cost would be within this share of the budget."""


class Cadence:
    """Steps 0 to 9, and each that the interval divides: of 10 steps, 20, 40, ... as the cost asks for.

    What a longer interval samples, a shorter one samples too.

    Args:
        budget: the share of a bare step that may be ours.
        longest: the longest interval; None for any.
    """

    def __init__(self, budget: float = BUDGET, longest: int | None = LONGEST) -> None:
        self.budget, self._longest = budget, longest
        self.interval, self._since = SHORTEST, 0

    def __call__(self, step: int) -> bool:
        """Whether a step is sampled."""
        return step < FIRST_STEPS or step % self.interval == 0

    def follow(self, cost: Cost, step: int) -> bool:
        """Take another interval from this sampled step on where the cost asks for it; whether it did."""
        now = self.interval
        longer = self._longest is None or now < self._longest
        if step - self._since < STAYS * now:
            return False
        if longer and cost.share(now) > self.budget and step % (2 * now) == 0:
            self.interval = 2 * now
        elif now > SHORTEST and cost.share(now / 2) < SLACK * self.budget:
            self.interval = now // 2
        self._since = step if self.interval != now else self._since
        return self.interval != now


def make_schedule(every: int | Schedule | None, budget: float | None = None) -> Schedule:
    """Return the schedule that `every` or `budget` describes.

    Args:
        every: an int n (step k is sampled when k < 10 or k % n == 0), or a pure function of the step.
        budget: the share of a step that may be ours: the interval follows.

    Raises:
        FlowscopeError: `every` is neither a positive int nor callable, `budget` is no share, or both are given.
    """
    if every is not None and budget is not None:
        raise FlowscopeError(
            f"watch(every={every!r:.40}, budget={budget!r:.40}): got both, expected one of them. every fixes which "
            "steps are sampled, budget lets their number follow the cost."
        )
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget <= 1:
            raise FlowscopeError(
                f"watch(budget=...): got {budget!r:.40}, expected a share of the step's time, above 0 and at most 1: "
                "budget=0.01 lets flowscope take one hundredth."
            )
        return Cadence(float(budget), None)
    if every is None:
        return Cadence()
    if callable(every):
        return every
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise FlowscopeError(
            f"watch(every=...): got {every!r}, expected a positive int (sample each n-th step) or a function "
            "step -> bool. every=1 samples each step; to stop sampling call scope.pause()."
        )
    return lambda step: step < FIRST_STEPS or step % every == 0
