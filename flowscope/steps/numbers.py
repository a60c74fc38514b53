"""The numbers of the steps, and which of them are sampled."""

from __future__ import annotations

from typing import Any

from flowscope.config import WatchConfig
from flowscope.faults import Faults
from flowscope.meter import Pace
from flowscope.schedule import FIRST_STEPS, Cadence, Schedule

FAR = 1000
"""So many steps ahead a sampled one is looked for."""
LOOKED = 5
"""The cost is looked at on each so many-th sample."""


class StepCount:
    """The number of the step under way, and which steps are sampled.

    Attributes:
        step: the number, from 0.
        samples: how many steps were sampled.
        ended: whether any step has ended.
        wanted: whether the next step is to be sampled beside the schedule.
        lost: whether the last sampled step showed values that are not finite: the next ones will, too.
        pace: how long steps take, and how much of it is ours.
    """

    def __init__(self, schedule: Schedule, config: WatchConfig, faults: Faults) -> None:
        self.step = self.samples = 0
        self.ended = self.wanted = self.lost = False
        self._schedule, self._config, self._faults = schedule, config, faults
        self.pace = Pace(faults.meter)
        self._beside, self._had = -1, False
        """The step that was sampled beside the schedule, and whether there was one since the last that was not."""

    def sampling(self) -> bool:
        """Whether the step is sampled."""
        if self._scheduled(self.step):
            self.wanted = self._had = False
            return True
        if self.wanted:
            self.wanted, self._had, self._beside = False, True, self.step
        return self.step == self._beside

    def _scheduled(self, step: int) -> bool:
        return self._faults.guard("schedule", lambda: bool(self._schedule(step))) is True

    def want(self) -> bool:
        """Sample the next step that begins, once between two of the schedule; whether that was left to do."""
        self.wanted = not (self._had or self.lost)
        return self.wanted

    def next_sample(self) -> int:
        """The next step after this one that the schedule samples, `FAR` after it at most."""
        ahead = range(self.step + 1, self.step + FAR)
        return next((step for step in ahead if self._scheduled(step)), self.step + FAR)

    def follow(self) -> bool:
        """A sampled step of the schedule has ended: where it follows the cost, whether another interval begins here."""
        cadence = self._schedule
        if not isinstance(cadence, Cadence) or self.step % cadence.interval or self.step < FIRST_STEPS:
            return False
        due = self.step // cadence.interval % LOOKED == 0
        cost = self.pace.cost() if due else None
        return cost is not None and cadence.follow(cost, self.step)

    def told(self) -> dict[str, Any]:
        """What it costs, JSON-ready, as far as it is known: see `RunHeader.cost`."""
        cost, cadence, first = self.pace.cost(), self._schedule, self.pace.first
        found: dict[str, Any] = {} if first is None else {"first_steps": first / 1e9}
        if isinstance(cadence, Cadence):
            found |= {"budget": cadence.budget, "interval": cadence.interval}
        if cost is not None:
            found |= {"sample": cost.sample, "light_step": cost.light, "bare_step": cost.bare}
            steps = [step for step in range(self.step, self.step + FAR) if self._scheduled(step)]
            found["share"] = cost.share(FAR / max(1, len(steps)))
        return {name: float(f"{value:.3g}") for name, value in found.items()}

    def slow(self) -> bool:
        """Whether the slow metrics are computed, should it be sampled."""
        every = self._config.slow_every
        return every > 0 and self.samples % every == 0

    def seldom(self) -> bool:
        """Whether what costs more than most is looked at, should it be sampled."""
        return self.samples < FIRST_STEPS or self.samples % self._config.seldom_every == 0
