"""What the table of `flowscope.steps.phase` asks for, done: reads gradients, ends steps, begins the next one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from flowscope.config import WatchConfig
from flowscope.faults import Faults
from flowscope.instruments.wiring import held_by
from flowscope.observation.observation import Observation
from flowscope.ranks.ranks import Ranks
from flowscope.recorder import Recorder
from flowscope.records import Record
from flowscope.schedule import FIRST_STEPS, Schedule
from flowscope.steps.ended import EndedStep, EndedSteps
from flowscope.steps.losses import Losses, Value
from flowscope.steps.optimizers import OptimizerClock, OwnOptimizers
from flowscope.steps.phase import ENDS, FOREIGN, UNTOUCHED, Action, Actions, Event, Phase, StepMachine
from flowscope.steps.scaler import ScalerWatch
from flowscope.torch_internals import scale_of_caller

STEPPED = frozenset({Event.AFTER, Event.LAST})


class StepCount:
    """The number of the step under way, and which steps are sampled.

    Attributes:
        step: the number, from 0.
        samples: how many steps were sampled.
        ended: whether any step has ended.
    """

    def __init__(self, schedule: Schedule, config: WatchConfig, faults: Faults) -> None:
        self.step = self.samples = 0
        self.ended = False
        self._schedule, self._config, self._faults = schedule, config, faults

    def sampling(self) -> bool:
        """Whether the step is sampled."""
        return bool(self._faults.guard("schedule", self._schedule, self.step))

    def slow(self) -> bool:
        """Whether the slow metrics are computed, should it be sampled."""
        every = self._config.slow_every
        return every > 0 and self.samples % every == 0

    def seldom(self) -> bool:
        """Whether what costs more than most is looked at, should it be sampled."""
        return self.samples < FIRST_STEPS or self.samples % self._config.seldom_every == 0


class StepDriver:
    """Feeds the machine with events and carries out its actions, for one scope.

    Args:
        own: the optimizers of the model.
        observation: the probes.
        recorder: makes the records.
        count: numbers the steps.
        schedule: the one `count` follows; the ranks compare it.

    Attributes:
        losses: which step a loss belongs to.
        ended: the steps on their way to records.
        ranks: the other processes.
    """

    def __init__(
        self, own: OwnOptimizers, observation: Observation, recorder: Recorder, count: StepCount, schedule: Schedule
    ) -> None:
        self.own, self.observation, self._recorder, self._count = own, observation, recorder, count
        self.losses = Losses()
        self.ended = EndedSteps(recorder.take, self.losses)
        self.ranks = Ranks(observation, observation.config, schedule, recorder.prepare)
        self._machine = StepMachine()
        self._found_inf: list[Tensor] = []
        self._runs = 0
        self._scaler: ScalerWatch | None = None
        self._clock = OptimizerClock(own, self.on, observation.hooks)
        observation.on_forward = self._forward_begins
        observation.on_run = partial(self.on, Event.RAN)

    def use_scaler(self, scaler: Any) -> None:
        """Ask this GradScaler for the loss scale and for steps it skips, unless another one is asked."""
        if self._scaler is None:
            skip, optimizers = partial(self.on, Event.SKIPPED), self.own
            self._scaler = ScalerWatch(scaler, skip, self._found, lambda: optimizers.known)

    # -- events -------------------------------------------------------------------------------------------------------

    def on(self, event: Event, optimizer: Any = None) -> Actions:
        """Take an event and do what it asks for; returns that.

        Raises:
            StopTraining: an `on_alert` callable asked for it at a record made by this event.
        """
        actions = self._do(event, optimizer)
        if actions and actions[-1] in ENDS:
            self._recorder.raise_stop()
        return actions

    def mark(self) -> None:
        """In a loop without an optimizer: the step ends here."""
        if not self.own.known:
            self._guard("step", self._do, Event.MARKED)

    def pause(self) -> None:
        """Observe nothing until `resume`."""
        self._look()
        self.on(self._machine.pausing())

    def resume(self) -> None:
        """Observe again: at once where nothing of the step under way was missed, else from the next on."""
        self.on(Event.RESUME)

    def just_ended(self) -> bool:
        """Whether a step has ended and the model has not run since."""
        self._look()
        return self._machine.phase is Phase.ENDED

    def _look(self) -> None:
        """The model may have run in this step without being called itself."""
        if self._machine.phase in UNTOUCHED and self.observation.runs() != self._runs:
            self._machine.on(Event.RAN)

    def _do(self, event: Event, optimizer: Any = None) -> Actions:
        if event is Event.FOUND:
            self._look()
        actions = self._machine.on(event)
        self._set_switch()
        if optimizer is not None and event in STEPPED and (found := getattr(optimizer, "found_inf", None)) is not None:
            # a fused optimizer is called all the same, and leaves the weights as they are
            self._found_inf.append(found.detach().clone())
        for action in actions:
            CARRY_OUT[action](self, optimizer)
        return actions

    def _set_switch(self) -> None:
        machine, switch = self._machine, self.observation.switch
        switch.paused = machine.paused
        switch.stale = machine.deposits is FOREIGN
        switch.in_closure = machine.phase is Phase.CLOSURE

    def _forward_begins(self) -> bool:
        self._do(Event.FORWARD)
        if self._machine.paused:
            return False
        self._guard("ranks", self.ranks.others.forward_begins)
        return True

    def _found(self, found: list[Tensor]) -> None:
        """What the scaler found in the gradients of the step that just ended (one optimizer of several was skipped)."""
        if (newest := self.ended.newest) is not None and newest.snapshot is not None:
            newest.found_inf += [value.detach().clone() for value in found]

    def _guard(self, part: str, call: Callable[..., Any], *args: Any) -> Any:
        return self.observation.faults.guard(part, call, *args)

    # -- actions (flowscope.steps.phase.Action) ------------------------------------------------------------------------

    def _note_scale(self, optimizer: Any) -> None:
        in_step = optimizer is not None
        known = self._scaler.scale() if self._scaler is not None else None
        self.observation.scaled_by(scale_of_caller() if known is None and in_step else known)

    def _read(self, optimizer: Any) -> None:
        # a lone optimizer's gradients are read with those that no optimizer holds
        held = held_by(optimizer) if len(self.own.known) > 1 else None
        self.observation.read_gradients(held, getattr(optimizer, "grad_scale", None))

    def _measure(self, optimizer: Any) -> None:
        if len(self.own.known) > 1:
            self.observation.read_gradients()
        self.observation.after_update()

    def _join(self, optimizer: Any) -> None:
        if (newest := self.ended.newest) is not None and newest.snapshot is not None:
            newest.snapshot.join(optimizer)
        # where optimizers step inside backward, the rest of that backward belongs to the step that ended
        self.observation.drop()

    def _end(self, *flags: str) -> None:
        found_inf, self._found_inf = self._found_inf, []
        snapshot, self._count.ended = None, True
        if self._machine.observing:
            self._count.samples += 1
            snapshot = self._guard("records", self.observation.snapshot)
        ended = EndedStep(
            self.losses.end(self._count.step),
            snapshot,
            self.observation.take_canary(),
            flags,
            self._scaler.take_scale() if self._scaler is not None else None,
            found_inf,
        )
        self.ended.append(ended)
        self._count.step += 1
        # what the GradScaler skips, and what ends outside of an optimizer's step, enters no sum over ranks
        sampled = self._machine.sampling and not flags
        self.begin()
        self.observation.faults.guard("ranks", self.ranks.step_ended, ended, sampled=sampled)
        self._guard("records", self.ended.finish)

    def begin(self) -> None:
        """Begin the step under way: decide whether it is sampled."""
        sampling = self._count.sampling()
        slow, seldom = self._count.slow(), self._count.seldom()
        self.observation.begin_step(sampling=sampling, slow=sampling and slow, seldom=sampling and seldom)
        self._machine.begin(sampling=sampling)
        self._set_switch()
        self._runs = self.observation.runs()
        if sampling and not self.own.known:
            self.observation.before_update(updating=False)

    def load(self, step: int, samples: int) -> None:
        """Go on at this step, with a run of which so many steps were sampled."""
        self._count.step, self._count.samples = step, samples
        self._machine.on(Event.LOAD)
        self.begin()

    # -- the user's calls ----------------------------------------------------------------------------------------------

    def told(self, value: Value | None, step: int | None) -> None:
        """`scope.step` was called with this loss and number: they are those of the step that ended, or is under way."""
        ended = self.losses.claim(ran=not self.just_ended())
        if value is not None:
            (ended or self.losses.under_way).give(value)
        if step is not None and ended is None:
            self._count.step = step
        elif step is not None and ended is not None:
            ended.renumber(step)
            self._count.step = step + 1
            if self.just_ended():
                self.begin()
        self._guard("records", self.ended.finish)

    def readable(self) -> list[Record]:
        """Wait for copies and make records of what is there; returns those that still wait for other ranks.

        Alerts among ranks come at the same step everywhere.
        """
        if self.ranks.others.joined:
            self._guard("ranks", self.ranks.poll)
        else:
            self._guard("records", partial(self.ended.finish, everything=True))
        early = [ended for ended in self.ended if ended.record is not None]
        for ended in early:
            self._recorder.preview(ended)
        return [ended.record for ended in early if ended.record is not None]

    def finish(self) -> None:
        """Let go of the other ranks, and make records of all that ended."""
        self._guard("ranks", self.ranks.close)
        self._guard("records", partial(self.ended.finish, everything=True))

    def close(self) -> None:
        """Remove every hook, and let go of the model."""
        self.observation.hooks.close()
        if self._scaler is not None:
            self._scaler.close()
        # what is still in some graph deposits nowhere
        self.observation.switch.paused = True
        self._guard("records", self.observation.close)
        self.ended.clear()


CARRY_OUT: dict[Action, Callable[[StepDriver, Any], None]] = {
    Action.DROP: lambda driver, _: driver.observation.drop(),
    Action.REVIEW: lambda driver, _: driver.observation.review(),
    Action.REPLAY: lambda driver, _: driver.observation.replay(),
    Action.REMEMBER: lambda driver, _: driver.observation.before_update(),
    Action.SCALE: StepDriver._note_scale,
    Action.READ: StepDriver._read,
    Action.MEASURE: StepDriver._measure,
    Action.FORGET: lambda driver, _: driver.observation.update_failed(),
    Action.JOIN: StepDriver._join,
    Action.END: lambda driver, _: driver._end(),
    Action.SKIP: lambda driver, _: driver._end("skipped"),
}
