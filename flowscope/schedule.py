"""When to sample: a schedule is a pure function `step -> bool`. Steps count from 0."""

from __future__ import annotations

from collections.abc import Callable

from flowscope.errors import FlowscopeError

Schedule = Callable[[int], bool]

FIRST_STEPS = 10
"""The first steps are all sampled: a Post-LN stack loses its gradient within 40 steps, and baselines come from here."""


def make_schedule(every: int | Schedule) -> Schedule:
    """Return the schedule that `every` describes.

    Args:
        every: an int n (step k is sampled when k < 10 or k % n == 0), or a pure function of the step.

    Raises:
        FlowscopeError: `every` is neither a positive int nor callable.
    """
    if callable(every):
        return every
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise FlowscopeError(
            f"watch(every=...): got {every!r}, expected a positive int (sample each n-th step) or a function "
            "step -> bool. every=1 samples each step; to stop sampling call scope.pause()."
        )
    return lambda step: step < FIRST_STEPS or step % every == 0
