"""What flowscope itself costs: the time in its outermost calls, beside the time of a step in which it does nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from time import thread_time_ns
from typing import Any, NamedTuple

DISPATCH = 1500
"""Nanoseconds that torch takes to come to a hook of ours and back, beside what the hook does (measured: 1.4 us)."""
STEPS = 64
"""The median of so many steps is the time of one."""
SAMPLES = 10
"""The mean of so many samples is what one costs: one in ten also runs the slow probes."""
ENOUGH = 5
"""With fewer of either nothing is known."""
TOLD = 3000
"""Nanoseconds that `scope.step` takes in a step of which it only keeps the loss, which is not timed."""


class Cost(NamedTuple):
    """Seconds.

    Attributes:
        sample: of our own in a sampled step, and in what follows from it.
        light: of our own in a step that is not sampled.
        bare: that such a step takes without them.
    """

    sample: float
    light: float
    bare: float

    def share(self, interval: float) -> float:
        """Our own time over that of the bare step, where each `interval`-th step is sampled."""
        return (self.sample / interval + self.light) / self.bare


class Meter:
    """The time in the outermost calls of one scope.

    What is queued on a device is not in it.

    Attributes:
        own: nanoseconds so far, with what it took to come there.
        clock: in nanoseconds. The processor time of the thread, as a busy machine inflates what is long more than what
            is short; where a device has a thread of its own for backward, the time that goes by.
    """

    def __init__(self) -> None:
        self.own = 0
        self.clock: Callable[[], int] = thread_time_ns
        self._inside = False

    def time(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(*args)`, and count its time unless it is a part of what is counted already."""
        if self._inside:
            return call(*args)
        self._inside, begun = True, self.clock()
        try:
            return call(*args)
        finally:
            self.own += self.clock() - begun + DISPATCH
            self._inside = False


class Pace:
    """How long steps take, and how much of it is ours.

    Args:
        meter: of the scope.

    Attributes:
        first: our own nanoseconds in the first steps, before the first that was not sampled; None until then.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._at = self._own = self._since = self._steps = 0
        """When the last step ended, and our own time by then; that since the last sample began, and the steps."""
        self.first: int | None = None
        self._light: deque[int] = deque(maxlen=STEPS)
        self._bare: deque[int] = deque(maxlen=STEPS)
        self._sampled_bare: deque[int] = deque(maxlen=STEPS)
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES)

    def step_ended(self, *, sampled: bool, untimed: int = 0) -> None:
        """A step has ended, in which so much of ours was not timed; what follows from a sampled one comes after it."""
        self._meter.own += untimed
        at, own = self._meter.clock(), self._meter.own
        took, spent = at - self._at, own - self._own
        if sampled and self._steps:
            self._samples.append((self._since, self._steps))
            self._since = self._steps = 0
        if self._at and sampled:
            self._sampled_bare.append(took - spent)
        elif self._at:
            self._light.append(spent)
            self._bare.append(took - spent)
        if not sampled and self.first is None:
            self.first = own
        self._since, self._steps, self._at, self._own = self._since + spent, self._steps + 1, at, own

    def cost(self) -> Cost | None:
        """What a sample and the steps between two cost; None while too few were seen."""
        bare = self._bare if len(self._bare) >= ENOUGH else self._sampled_bare
        if len(self._samples) < ENOUGH or len(bare) < ENOUGH:
            return None
        light = median(self._light) if self._light else 0.0
        sample = fmean(own - (steps - 1) * light for own, steps in self._samples)
        return Cost(max(sample, 0.0) / 1e9, light / 1e9, max(median(bare), 1.0) / 1e9)
