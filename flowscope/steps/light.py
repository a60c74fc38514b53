"""Steps of which little is looked at but the loss, from one sampled step to the next.

Between two samples the hooks of the model are off (flowscope/hooks/handles.py), the optimizers' own hook counts, and
`scope.step` keeps a number. What goes another way than the steps before (an optimizer nobody knew, a skipped step, a
call of the scope) ends this at once, and from there on all is done as in any step.

Where a gradient is not finite, its step is judged as the canary of any step judges it. Where a loss is not finite or
jumps, a rate jumps, or nothing writes to the weights any more, the next step is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from flowscope.arguments import loss_value
from flowscope.meter import TOLD
from flowscope.observation.observation import Observation
from flowscope.steps.ended import EndedStep, EndedSteps
from flowscope.steps.glance import Glance
from flowscope.steps.losses import LateLoss, StepLoss, Value
from flowscope.steps.numbers import StepCount
from flowscope.steps.optimizers import OptimizerClock, OwnOptimizers

SELDOM = 7
"""Rate and weights are looked at on each eighth step."""


class LightSteps:
    """The steps since the last one that was made in full.

    Args:
        own: the optimizers of the model.
        clock: listens to them otherwise.
        count: numbers the steps.
        ended: where a step goes that is to be judged after all.
        observation: whose hooks are off meanwhile.
        glance: what a loss and a rate are compared with.

    Attributes:
        on: whether the step under way is light.
        stepped: told of each step (a GradScaler's watch).
    """

    def __init__(
        self,
        own: OwnOptimizers,
        clock: OptimizerClock,
        count: StepCount,
        ended: EndedSteps,
        observation: Observation,
        glance: Glance,
    ) -> None:
        self._own, self._clock, self._count, self._ended = own, clock, count, ended
        self._observation, self._glance = observation, glance
        self.on = False
        self.stepped: Callable[[], object] = lambda: None
        self._values: list[Value | None] = []
        """What was given for each of these steps."""
        self._judged = 0
        """Of those that come late, so many were looked at."""
        self._made: dict[Optimizer, int] = {}
        """The steps of each optimizer meanwhile."""
        self._due = 0
        """The step that is sampled next."""

    def fit(self) -> bool:
        """Whether steps of this loop can be light: they end with an optimizer's step, and their loss comes after it."""
        losses, turns = self._ended.losses, self._observation.hooks.turns
        after = losses.given and not (losses.early or losses.late or losses.sparse)
        plain = bool(self._own.known) and turns.plain and not self._own.marks.waiting
        return after and plain and self._count.ended and self._observation.rests()

    def begin(self) -> None:
        """The step under way is light, and those after it, as far as one lies before the one that is sampled next."""
        self._due = self._count.next_sample()
        if self._due < self._count.step + 2:
            return
        self._made = dict.fromkeys(self._own.known, 0)
        self._values, self._judged = [], 0
        self._glance.begin(self._own.known[-1])
        self._observation.hooks.park(every=True)
        self._clock.rest(self._stepped)
        self.on = True

    def leave(self) -> None:
        """From here on all is done in full; what was left out is told."""
        if not self.on:
            return
        self.on = False
        self._clock.listen()
        for optimizer, steps in self._made.items():
            self._observation.hooks.turns.made(optimizer, steps)
        values, self._values, self._made = self._values, [], {}
        losses, first = self._ended.losses, self._count.step - len(values)
        losses.sparse = losses.sparse or None in values[:-1]
        for at, value in enumerate(values):
            loss = StepLoss(first + at)
            loss.values = [] if value is None else [value]
            if at < len(values) - 1 and not isinstance(value, LateLoss):
                self._ended.pass_by(loss)
            else:
                self._ended.append(EndedStep(loss, sampled=False))
                losses.unclaimed = loss if value is None else None

    # -- what the process tells meanwhile ------------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer has stepped."""
        if optimizer not in self._made:
            self._clock.hear(optimizer, args, kwargs)
            return
        step = self._count.step
        if not self._own.last(optimizer):
            self._made[optimizer] += 1
        elif step + 1 >= self._due or (not step & SELDOM and self._unusual(optimizer)):
            self.leave()
            self._clock.hear(optimizer, args, kwargs)
        elif (bad := self._glance.bad_gradient(optimizer)) is not None:
            self.leave()
            self._observation.hooks.canary.count("backward", bad)
            self._clock.hear(optimizer, args, kwargs)
            self._count.want()
        else:
            self._made[optimizer] += 1
            self._values.append(None)
            self._count.step = step + 1
            self._count.pace.step_ended(sampled=False, untimed=TOLD)
            self.stepped()

    def _unusual(self, optimizer: Optimizer) -> bool:
        return self._glance.has_changed(optimizer) and self._count.want()

    def told(self, loss: Any, step: int | None) -> bool:
        """Take the loss of the step that has ended; False where the call asks for more than that."""
        values = self._values
        if step is None and values and values[-1] is None:
            value = loss.item() if type(loss) is Tensor and loss.is_cpu and not loss.dim() else loss_value(loss)
            if isinstance(value, LateLoss):
                values[-1] = value
                self._read()
                return True
            if type(value) is float and not self._glance.is_unusual(value):
                values[-1] = value
                return True
            if type(value) is float:
                self._count.want()
        self.leave()
        return False

    def _read(self) -> None:
        """Look at the losses that have come from their device by now."""
        for value in self._values[self._judged :]:
            if isinstance(value, LateLoss) and not value.ready():
                return
            if value is not None and self._glance.is_unusual(float(value)):
                self._count.want()
                self.leave()
                return
            self._judged += 1
