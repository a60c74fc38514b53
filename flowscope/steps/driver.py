"""What the table of `flowscope.steps.phase` asks for, done: reads gradients, ends steps, begins the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from flowscope.instruments.wiring import held_by
from flowscope.observation.observation import Observation
from flowscope.ranks.groups import several_processes
from flowscope.ranks.ranks import Ranks
from flowscope.recorder import Recorder
from flowscope.records import Record
from flowscope.schedule import Schedule
from flowscope.steps.ended import FAILED, EndedStep, EndedSteps
from flowscope.steps.glance import Glance
from flowscope.steps.light import LightSteps
from flowscope.steps.losses import Losses, StepLoss, Value
from flowscope.steps.numbers import StepCount
from flowscope.steps.optimizers import OptimizerClock, OwnOptimizers
from flowscope.steps.phase import ENDS, FOREIGN, UNTOUCHED, Action, Actions, Event, Phase, StepMachine
from flowscope.steps.scaler import ScalerWatch
from flowscope.torch_internals import scale_of_caller

STEPPED = frozenset({Event.AFTER, Event.LAST})
ENDING = frozenset({Event.LAST, Event.MARKED, Event.SKIPPED})
"""What ends a step."""


class StepDriver:
    """Feeds the machine with events and carries out its actions, for one scope.

    Args:
        own: the optimizers of the model.
        observation: the probes.
        recorder: makes the records.
        count: numbers the steps.
        schedule: the one `count` follows; the ranks compare it.

    Attributes:
        count: the number of the step under way.
        losses: which step a loss belongs to.
        ended: the steps on their way to records.
        ranks: the other processes.
        light: the steps of which little is looked at but the loss.
    """

    def __init__(
        self, own: OwnOptimizers, observation: Observation, recorder: Recorder, count: StepCount, schedule: Schedule
    ) -> None:
        self.own, self.observation, self._recorder, self.count = own, observation, recorder, count
        self.losses = Losses()
        self.ended = EndedSteps(self._finished, recorder.missed, recorder.pass_by, self.losses, observation.faults)
        self.ranks = Ranks(observation, schedule, recorder.prepare, count)
        self._machine = StepMachine()
        self._runs = 0
        self._scaler: ScalerWatch | None = None
        clock = OptimizerClock(own, self.on, self._missed, observation.hooks)
        glance = Glance(observation.view.parameters, recorder.recent_losses)
        self._clock, self.light = clock, LightSteps(own, clock, count, self.ended, observation, glance)
        observation.on_forward = self._forward_begins
        observation.on_run = partial(self.on, Event.RAN)

    def use_scaler(self, scaler: Any) -> None:
        """Ask this GradScaler for the loss scale and for steps it skips, unless another one is asked."""
        if self._scaler is None:
            skip = partial(self.on, Event.SKIPPED)
            self._scaler = ScalerWatch(scaler, skip, self._found, self.observation.hooks)
            self.light.stepped = self._scaler.stepped

    # -- events -------------------------------------------------------------------------------------------------------

    def on(self, event: Event, optimizer: Any = None) -> Actions:
        """Take an event and do what it asks for; returns that.

        Raises:
            StopTraining: an `on_alert` callable asked for it at a record made by this event.
        """
        actions = self._take(event, optimizer)
        if actions and actions[-1] in ENDS:
            self._attempt("stop", self._recorder.raise_stop)
        return actions

    def mark(self) -> None:
        """In a loop without an optimizer: the step ends here, unless this is one micro-batch of several."""
        if self.own.known:
            return
        ends = self._attempt("steps", self.own.marks.marked, otherwise=True)
        if self._machine.phase is Phase.UPDATING:  # no forward since the last call: what was read is read again
            self._take(Event.FAILED)
        self._take(Event.MARKED if ends else Event.HELD)

    def _settle(self) -> None:
        """What was waited for shows no more: the last call of `scope.step` ended a step."""
        if self.own.marks.settle():
            self._take(Event.LAST)

    def _take(self, event: Event, optimizer: Any = None) -> Actions:
        """As `on`, without a stop. What fails costs this step alone, which is a record without numbers then."""
        step = self.count.step
        try:
            with self.observation.faults.turn:
                self.light.leave()
                return self._do(event, optimizer)
        except Exception as error:
            self.observation.faults.report("steps", error, "is left out where it fails")
            if event in ENDING and self.count.step == step:
                self._missed()
            return ()

    def _missed(self) -> None:
        """A step has ended, and nothing could be read of it."""
        sampled = self.observation.faults.attempt("count of steps", self.count.sampling, otherwise=True)
        ended = EndedStep(StepLoss(self.count.step), sampled)
        self.count.step, self.count.ended = self.count.step + 1, True
        self.losses.under_way = StepLoss()
        if self._scaler is not None:
            self._attempt("loss scale", self._scaler.take_scale)  # else its update would tell of a step left out
        self._recorder.missed(ended)

    def pause(self) -> None:
        """Observe nothing until `resume`."""
        self.light.leave()
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
            if self.own.marks.settle():
                self._do(Event.FAILED)
            self._attempt("passes", self._look)
        actions = self._machine.on(event)
        self._set_switch()
        if optimizer is not None and event in STEPPED and (found := getattr(optimizer, "found_inf", None)) is not None:
            # a fused optimizer is called all the same, and leaves the weights as they are
            self.ended.found_inf.append(found.detach().clone())
        for action in actions:
            if action in ENDS:
                CARRY_OUT[action](self, optimizer)
            else:
                self._attempt(f"{action.name.lower()} of a step", CARRY_OUT[action], self, optimizer)
        return actions

    def _set_switch(self) -> None:
        machine, switch = self._machine, self.observation.switch
        switch.paused = machine.paused
        switch.stale = machine.deposits is FOREIGN
        switch.in_closure = machine.phase is Phase.CLOSURE

    def _forward_begins(self) -> bool:
        if self.light.on:  # compiled: its hooks are on
            return True
        self._clock.runs_here()
        if self.own.marks.waiting:
            ended = self._attempt("steps", self.own.marks.forward, otherwise=True)
            self._take(Event.LAST if ended else Event.FAILED)
        self._take(Event.FORWARD)
        # the process may end in this step: a record that waits for no loss is written before
        if (newest := self.ended.newest) is not None and (newest.loss.values or not self.losses.given):
            self.losses.silent = self.losses.silent or not newest.loss.values
            self._finish(newest=True)
        self._guard("ranks", self.ranks.others.forward_begins)
        return not self._machine.paused

    def _found(self, found: list[Tensor]) -> None:
        """What the scaler found in the gradients of the step that just ended (one optimizer of several was skipped)."""
        if (newest := self.ended.newest) is not None and newest.snapshot is not None:
            newest.found_inf += [value.detach().clone() for value in found]

    def _guard(self, fuse: str, call: Callable[..., Any], *args: Any) -> Any:
        return self.observation.faults.guard(fuse, call, *args)

    def _attempt(self, fuse: str, call: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        return self.observation.faults.attempt(fuse, call, *args, otherwise=otherwise)

    def _finish(self, **how: bool) -> None:
        with self.observation.faults.turn:
            if self._attempt("records", partial(self.ended.finish, **how), otherwise=FAILED) is FAILED:
                while self.ended:
                    self._recorder.missed(self.ended.popleft())
            if self.count.wanted and not self._machine.sampling and self.just_ended():
                self.begin()

    def _finished(self, ended: EndedStep) -> None:
        """A step becomes a record, if it is one; where one shows something between two samples, the next is sampled."""
        self._recorder.take(ended)
        if ended.record is None or several_processes():
            return
        if ended.sampled:
            self.count.lost = bool(ended.record.metrics["canary"].any())
        else:
            self.count.want()

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
        found_inf, self.ended.found_inf = self.ended.found_inf, []
        snapshot, sampled, self.count.ended = None, self._machine.observing, True
        self.count.samples += self._machine.sampling
        if sampled:
            snapshot = self._attempt("snapshot", self.observation.snapshot)
        ended = EndedStep(
            self.losses.end(self.count.step),
            sampled,
            snapshot,
            self._attempt("canary", self.observation.take_canary),
            flags,
            self._attempt("loss scale", self._scaler.take_scale) if self._scaler is not None else None,
            found_inf,
        )
        self.ended.append(ended)
        self.count.pace.step_ended(sampled=self._machine.sampling)
        if self._machine.sampling and not several_processes() and self._attempt("cost", self.count.follow):
            self._attempt("cost", self._recorder.tell_cost)
        self.count.step += 1
        # what the GradScaler skips, and what ends outside of an optimizer's step, enters no sum over ranks
        shared = self._machine.sampling and not flags
        self._attempt("begin of a step", self.begin)
        if self._guard("ranks", partial(self.ranks.step_ended, ended, sampled=shared)):
            self._attempt("begin of a step", self.begin)
        # a scaler tells only after the step whether it was skipped
        self._finish(newest=self._scaler is None and self.losses.none_comes())

    def begin(self) -> None:
        """Begin the step under way: decide whether it is sampled."""
        sampling = self._attempt("count of steps", self.count.sampling, otherwise=True)
        slow = self._attempt("count of steps", self.count.slow, otherwise=False)
        seldom = self._attempt("count of steps", self.count.seldom, otherwise=False)
        self._attempt("hooks", self._put_on, sampling)
        begin = partial(
            self.observation.begin_step, sampling=sampling, slow=sampling and slow, seldom=sampling and seldom
        )
        self._attempt("begin of a step", begin)
        self._machine.begin(sampling=sampling)
        self._set_switch()
        self._runs = self._attempt("passes", self.observation.runs, otherwise=0)
        if sampling and not self.own.known:
            self._attempt("remember of a step", partial(self.observation.before_update, updating=False))

    def _put_on(self, sampling: bool) -> None:
        """Hooks are on in sampled steps; where nothing else is asked of the others, none is then."""
        if sampling:
            self.observation.hooks.unpark()
        elif not self._machine.paused:
            self.observation.hooks.park(every=not several_processes() and self.light.fit())

    def _lighten(self) -> None:
        """Let the step under way be light, where nothing of it and of those before is left to do."""
        machine, done = self._machine, not self.ended and not several_processes()
        if done and not (machine.sampling or machine.paused) and machine.phase is Phase.ENDED and self.light.fit():
            self.light.begin()

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready: where the run is, and what its detectors have learned."""
        with self.observation.faults.turn:
            self.readable()
            detectors = self._recorder.detectors.state_dict()
            return {"step": self.count.step, "samples": self.count.samples, "detectors": detectors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the run whose state this is."""
        with self.observation.faults.turn:
            self.light.leave()
            self._recorder.detectors.load_state_dict(state["detectors"])
            self.count.step, self.count.samples = state["step"], state["samples"]
            self._machine.on(Event.LOAD)
            self.begin()

    def raise_stop(self) -> None:
        """Raise the `StopTraining` that an `on_alert` callable asked for."""
        self._recorder.raise_stop()

    # -- the user's calls ----------------------------------------------------------------------------------------------

    def told(self, value: Value | None, step: int | None) -> None:
        """`scope.step` was called with this loss and number: they are those of the step that ended, or is under way."""
        with self.observation.faults.turn:
            self.light.leave()
            # of a step that is not observed nothing tells whether the model has run
            ended = self.losses.claim(ran=self._machine.paused or not self.just_ended())
            if value is not None:
                self.losses.given = True
                (ended or self.losses.under_way).give(value)
            if step is not None and ended is None:
                self.count.step = step
            elif step is not None and ended is not None:
                ended.renumber(step)
                self.count.step = step + 1
                if self.just_ended():
                    self.begin()
            self._finish()
            self._attempt("light steps", self._lighten)

    def readable(self) -> list[Record]:
        """Wait for copies and make records of what is there; returns those that still wait for other ranks.

        Alerts among ranks come at the same step everywhere.
        """
        with self.observation.faults.turn:
            self.light.leave()
            self._settle()
            if self.ranks.others.joined:
                self._guard("ranks", self.ranks.poll)
            else:
                self._finish(everything=True)
            early = [ended for ended in self.ended if ended.record is not None]
            for ended in early:
                self._attempt("records", self._recorder.preview, ended)
            return [ended.record for ended in early if ended.record is not None]

    def last_words(self) -> None:
        """Make records of what ended, as far as no other rank is waited for: the process ends."""
        self.light.leave()
        self._finish(newest=True, everything=not self.ranks.others.joined)

    def forked(self) -> None:
        """This is a forked child: what has ended so far is the parent's to tell."""
        self.observation.faults.turn.renew()
        self.light.leave()
        self.ended.clear()
        self._recorder.outlet.forked = True

    def finish(self) -> None:
        """Let go of the other ranks, and make records of all that ended."""
        self.light.leave()
        self._settle()
        self._guard("ranks", self.ranks.close)
        self._finish(everything=True)

    def close(self) -> None:
        """Remove every hook, and let go of the model."""
        self._attempt("closing", self.observation.hooks.close)
        # what is still in some graph deposits nowhere
        self.observation.switch.paused = True
        self._attempt("closing", self.observation.close)
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
