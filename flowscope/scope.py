"""`watch` and its `Scope`: owns the probes, turns steps into records, hands them to detectors and sinks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from flowscope.arguments import (
    AlertCallback,
    WatchArguments,
    alert_callbacks,
    check_model,
    flow_paths,
    folder,
    gate_patterns,
    loss_value,
    named_sinks,
    step_number,
)
from flowscope.config import WatchConfig, make_config
from flowscope.discovery.plan import FlowPlan, display_path
from flowscope.discovery.view import ModelView
from flowscope.distributed import Ranks
from flowscope.errors import FlowscopeError
from flowscope.faults import LOGGER, Faults
from flowscope.instruments import specs_of
from flowscope.instruments.wiring import held_by
from flowscope.losses import LateLoss
from flowscope.optimizers import OptimizerClock
from flowscope.probes.hooks import Hooks
from flowscope.probes.observation import Observation
from flowscope.probes.process_groups import is_first_process
from flowscope.recorder import EndedStep, Recorder
from flowscope.records import Alert, Record
from flowscope.scaler import ScalerWatch, scale_of_caller
from flowscope.schedule import Schedule, make_schedule
from flowscope.sinks import ConsoleSink, JsonlSink, Run, Sink
from flowscope.summary import summarize

_WATCHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Scope]] = weakref.WeakKeyDictionary()


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    log_dir: str | Path | None = None,
    every: int | Schedule = 10,
    on_alert: AlertCallback | Sequence[AlertCallback] | None = None,
    sinks: Iterable[Sink] = (),
    flows: Sequence[str] | None = None,
    gates: Sequence[str] | str | None = None,
    scaler: Any = None,
    config: WatchConfig | dict[str, Any] | None = None,
) -> Scope:
    """Attach to a model and observe its training from the next step on. Never changes or stops the training.

    Args:
        model: any module with parameters; attach before its first compiled call.
        optimizer: the optimizer, or a list in the order they step; its step hook marks the end of a step. Without one,
            the one that holds the model's parameters is found when it first steps; `scope.step()` is the fallback.
        log_dir: folder for `flowscope.jsonl` and the TensorBoard files; None writes nothing.
        every: sample step k when k < 10 or k % every == 0, or a pure function `step -> bool`.
        on_alert: called with each `Alert`, raised or resolved; a callable or a list of them.
        sinks: further objects with `write(event)` and `close()`.
        flows: module paths to use as the depth axis instead of the discovered ones (`flowscope.find_flows(model)`).
        gates: patterns of modules of the model whose outputs are gates in (0, 1), beside those that are found: modules
            that give a sigmoid something is multiplied by. The gates of wrapped blocks are seen without it.
        scaler: the GradScaler, so that gradients are the true (unscaled) ones and a skipped step is a record.
        config: `WatchConfig` or a dict of its keys.

    Raises:
        FlowscopeError: the model has no parameters or is watched already, or an argument is of the wrong kind.
    """
    check_model(model)
    return Scope(
        model,
        WatchArguments(
            optimizer=optimizer,
            log_dir=folder(log_dir),
            schedule=make_schedule(every),
            callbacks=alert_callbacks(on_alert),
            sinks=named_sinks(sinks),
            flows=flow_paths(flows),
            gates=gate_patterns(gates),
            scaler=scaler,
            config=make_config(config),
        ),
    )


class Scope:
    """What `watch` returns. Use as a context manager, or call `close()` at the end of training.

    Attributes:
        flows: the flows being watched (`FlowPlan`, printable).
        config: the `WatchConfig` in force.
        automatic: attached by `flowscope run`; gives way to a `watch` of the script's own.
    """

    def __init__(self, model: nn.Module, given: WatchArguments) -> None:
        _check_watched(model)
        self.config = given.config
        self._schedule = given.schedule
        view = ModelView(model, given.flows, given.gates)
        self.flows: FlowPlan = view.flows
        self._faults = Faults()
        self._hooks = Hooks(self._faults)
        self._recorder = Recorder(self.config, self._faults, given.callbacks)
        self.automatic = False
        self._closed = False
        self._step = 0
        self._samples = 0
        self._runs_at_end = -1  # no step has ended
        self._ended_unclaimed = False
        self._losses: list[Any] = []
        self._found_inf: list[Tensor] = []
        self._pending: deque[EndedStep] = deque()
        self._replays: list[Any] = []
        self._updating = False
        self._working = False
        # sinks before hooks: an unwritable log_dir must leave the model untouched
        try:
            self._add_own_sinks(given.log_dir)
            self._observation = Observation(view, self.config, self._hooks)
            self._recorder.specs.update(specs_of([*self._observation.instruments, *(c for _, c in view.connections)]))
            self._ranks = Ranks(self._observation, self.config, self._schedule, self._recorder.prepare)
            self._observation.on_forward = partial(self._faults.guard, "ranks", self._ranks.forward_begins)
            self._hooks.optimizers = self._clock_optimizers
            self._clock = OptimizerClock(model, given.optimizer, self, self._hooks)
            self._scaler = self._watch_scaler(given.scaler) if given.scaler is not None else None
        except BaseException:
            self._hooks.close()
            self._recorder.close()
            raise
        self._faults.guard("ranks", self._ranks.attach)
        # a sink that says so sees the events of every rank, others write once a run
        writes = is_first_process()
        self._recorder.sinks += [(part, s) for part, s in given.sinks if writes or getattr(s, "every_rank", False)]
        self._bind(given.callbacks)
        self._observation.owner = self
        _WATCHED[model] = weakref.ref(self)
        self._model = weakref.ref(model)
        for note in self.flows.notes:
            LOGGER.info("flowscope: %s", note)
        if not len(self.flows):
            LOGGER.warning("flowscope: no depth axis found in %s; only parameter metrics.", type(model).__name__)
        self._begin_step()

    def _add_own_sinks(self, log_dir: str | Path | None) -> None:
        own = self._recorder.sinks
        if not is_first_process():
            return
        if log_dir is not None:
            from flowscope.sinks.tensorboard import TensorBoardSink

            own.append(("sink JsonlSink", JsonlSink(log_dir)))
            own.append(("sink TensorBoardSink", TensorBoardSink(log_dir, self.config.images_every)))
        console = self.config.console
        if console in ("alerts", "records") or (console == "auto" and not self._recorder.callbacks):
            own.append(("sink ConsoleSink", ConsoleSink(records=console == "records")))

    def _bind(self, callbacks: Sequence[AlertCallback]) -> None:
        """Actions (flowscope.actions) know their scope, and some see all events."""
        for number, callback in enumerate(callbacks):
            if callable(bind := getattr(callback, "bind", None)):
                self._faults.guard(f"on_alert callback {number}", bind, self)
            if callable(getattr(callback, "write", None)) and callable(getattr(callback, "close", None)):
                self._recorder.sinks.append((f"action {type(callback).__name__} {number}", cast("Sink", callback)))

    # -- the user's calls -------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None, step: int | None = None) -> None:
        """Give the loss of a step; without an optimizer, also mark the end of the step. Never synchronises.

        Args:
            loss: a scalar tensor or number. It belongs to the step that ended since the previous call, else to the one
                under way; several are averaged. A loop that gives each loss before the optimizer's step goes on so: a
                loss that comes after a new forward does not belong to a step that has its loss already.
            step: renumbers the step the call belongs to; the count goes on from there.

        Raises:
            FlowscopeError: the scope is closed, `loss` is neither a tensor nor a number, or `step` no step number.
        """
        self._check_open("step")
        value, step = loss_value(loss), step_number(step)
        if not self._clock.optimizers:
            self._faults.guard("step", self._end_unmarked_step)
        ended, self._ended_unclaimed = self._ended_unclaimed, False
        if ended and self._pending and self._pending[-1].losses and not self.just_ended():
            ended = False
        if value is not None:
            self._claim(value, ended=ended)
        if step is not None:
            self._renumber(step, ended=ended)
        self._faults.guard("records", self._finish_pending, False)
        self._raise_stop()

    def _raise_stop(self) -> None:
        """Raise the `StopTraining` that an `on_alert` callable asked for."""
        stop, self._recorder.stop = self._recorder.stop, None
        if stop is not None:
            raise stop

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise FlowscopeError(
                f"scope.{call}() after scope.close(): got a closed scope, expected an open one; call "
                "flowscope.watch again."
            )

    def _claim(self, value: LateLoss | float, *, ended: bool) -> None:
        """A loss belongs to the step that ended since the previous call, else to the one under way."""
        if not ended:
            self._losses.append(value)
        elif self._pending:
            self._pending[-1].losses.append(value)
        elif (record := self._just_recorded()) is not None and record.loss is None:
            # the record was read before its loss came
            record.loss = float(value)
            earlier = record.metrics.get("step_losses", np.full(1, np.nan))
            record.metrics["step_losses"] = np.append(earlier[:-1], record.loss)

    def _just_recorded(self) -> Record | None:
        records = self._recorder.records
        return records[-1] if records and records[-1].step == self._step - 1 else None

    def pause(self) -> None:
        """Observe nothing until `resume`; steps are still counted."""
        self._check_open("pause")
        self._observation.pause()

    def resume(self) -> None:
        """Observe again, from the next step on (the one under way where nothing of it was missed)."""
        self._check_open("resume")
        self._observation.resume()

    @property
    def records(self) -> list[Record]:
        """The records so far (bounded: `WatchConfig.max_records`); waits for copies under way."""
        self._finish_readable()
        early = [e for e in self._pending if e.record is not None]
        for ended in early:
            self._recorder.preview(ended)
        return [*self._recorder.records, *(e.record for e in early if e.record is not None)]

    def _finish_readable(self) -> None:
        """Wait for copies, and make records of what is there. Alerts among ranks come at the same step everywhere."""
        if not self._closed and self._ranks.joined:
            self._faults.guard("ranks", self._ranks.poll)
        else:
            self._faults.guard("records", self._finish_pending, True)

    @property
    def alerts(self) -> list[Alert]:
        """The alerts so far, raised and resolved in order (bounded: `WatchConfig.max_alerts`)."""
        self._finish_readable()
        return list(self._recorder.alerts)

    @property
    def forwards(self) -> int:
        """How many forward passes in training the model has begun."""
        return 0 if self._closed else self._observation.passes.forwards

    def give_loss(self, loss: Tensor) -> None:
        """A loss of the step under way, for launchers that see the backward itself; never ends a step."""
        if not self._closed:
            self._losses.append(loss_value(loss))

    def use_scaler(self, scaler: Any) -> None:
        """Take over a GradScaler that was made after attaching; as `watch(scaler=...)`."""
        if not self._closed and self._scaler is None:
            self._scaler = self._watch_scaler(scaler)

    def _watch_scaler(self, scaler: Any) -> ScalerWatch:
        return ScalerWatch(scaler, self._step_skipped, self._scaler_found, self._clock_optimizers)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that are known to hold the model's parameters, in the order they step."""
        return list(self._clock_optimizers())

    def parameters_at(self, where: str) -> set[int]:
        """The ids of the parameters that an alert's place (`Alert.where`) means; all of them for the root ("")."""
        model, place = self._model(), where.partition(":")[0].partition("#")[0]
        names = model.named_parameters(remove_duplicate=False) if model is not None else ()
        return {
            id(parameter)
            for name, parameter in names
            if not place or display_path(name) == place or display_path(name).startswith(place + ".")
        }

    def summary(self) -> str:
        """A few lines for people: the last record's profile, what stands, what never got a gradient, what failed."""
        records, alerts = self.records, self.alerts
        return summarize(self._recorder.header, records, alerts, self._faults.failed, self.flows)

    def report(self, path: str | Path) -> Path:
        """Write the run so far as one HTML file that opens from disk, and return its path; waits for copies under way.

        It holds what `records` and `alerts` hold; `flowscope report RUN` reads the whole run from its log_dir.

        Raises:
            FlowscopeError: there is no record yet, or the file cannot be written.
        """
        from flowscope.panels.report import write_report

        records, alerts = self.records, self.alerts
        if not records:
            raise FlowscopeError("scope.report(path): there is no record yet, expected a training step before it.")
        return write_report(Run(self._recorder.header, records, alerts), path)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state (step, schedule position, detectors), for the training checkpoint."""
        self._finish_readable()
        return {"step": self._step, "samples": self._samples, "detectors": self._recorder.detectors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`: the next step has its number, detectors neither warm up nor repeat an alert."""
        self._check_open("load_state_dict")
        try:
            step, samples = int(state["step"]), int(state["samples"])
            self._recorder.detectors.load_state_dict(state["detectors"])
        except (KeyError, TypeError, ValueError) as error:
            raise FlowscopeError(
                f"scope.load_state_dict(state): got {state!r:.80} ({type(error).__name__}: {error}), expected what "
                "scope.state_dict() returned."
            ) from None
        self._step, self._samples = step, samples
        self._begin_step()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Finish what is pending, remove every hook, close the sinks. Idempotent; records and alerts stay readable."""
        if self._closed:
            return
        self._closed = True
        try:
            self._faults.guard("ranks", self._ranks.close)
            self._faults.guard("records", self._finish_pending, True)
        finally:
            self._hooks.close()
            if self._scaler is not None:
                self._scaler.close()
            if (model := self._model()) is not None:
                _WATCHED.pop(model, None)
            # what is still in some graph deposits nowhere, and the scope keeps neither model nor optimizer alive
            self._observation.switch.paused = True
            self._faults.guard("records", self._observation.close)
            self._pending.clear()
            if not self._working:
                self._release()
            self._recorder.close()

    def _release(self) -> None:
        del self._observation, self._clock, self._scaler, self._ranks

    def _repr_html_(self) -> str:
        from flowscope.notebook import scope_html

        return scope_html(self._recorder.header, self.records, self.alerts)

    def __enter__(self) -> Scope:
        """The scope itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close."""
        self.close()

    # -- the step (called by the optimizer clock) ---------------------------------------------------------------------

    def before_optimizer(self, optimizer: Any, *, last: bool, closure: bool) -> None:
        """An optimizer of the model is about to step."""
        del last
        self._observation.switch.in_closure = closure
        if not self._observing() or closure:
            if self._observing() and not self._updating:
                self._updating = True
                self._observation.before_update()
            return
        if not self._updating:
            self._updating = True
            self._replays = self._observation.replay_time()
            self._observation.before_update()
            self._observation.scaled_by(self._scaler.scale() if self._scaler is not None else scale_of_caller())
        self._read_gradients(optimizer)

    def _read_gradients(self, optimizer: Any) -> None:
        # a lone optimizer's gradients are read with those that no optimizer holds
        alone = len(self._clock.optimizers) == 1
        held = None if alone else held_by(optimizer)
        self._observation.read_gradients(held, getattr(optimizer, "grad_scale", None))

    def after_optimizer(self, optimizer: Any, *, last: bool, closure: bool) -> None:
        """An optimizer has stepped; the last one ends the step."""
        self._observation.switch.in_closure = False
        if self._observing():
            if closure:
                self._replays = self._replays or self._observation.replay_time()
                self._read_gradients(optimizer)
            if last:
                if len(self._clock.optimizers) > 1:
                    self._observation.read_gradients()
                self._observation.after_update()
        if (found := getattr(optimizer, "found_inf", None)) is not None:
            # a fused optimizer is called all the same, and leaves the weights as they are
            self._found_inf.append(found.detach().clone())
        if last:
            self._end_step()
            self._raise_stop()

    def step_failed(self) -> None:
        """The optimizer raised: what it was about to use is read again."""
        self._updating = False
        self._observation.update_failed()

    def foreign_step(self) -> None:
        """What is pending belongs to an optimizer that is not ours, unless ours steps before the next forward."""
        self._observation.switch.stale = True

    def just_ended(self) -> bool:
        """Whether a step has ended and the model has not run since."""
        return self._observation.runs() == self._runs_at_end

    def joins(self, optimizer: Any) -> None:
        """An optimizer unknown so far steps right after the step's end: it belongs to that step."""
        if self._pending and self._pending[-1].snapshot is not None:
            self._pending[-1].snapshot.join(optimizer)
        # where optimizers step inside backward, the rest of that backward belongs to the step that ended
        self._observation.drop()

    def _step_skipped(self) -> None:
        """The GradScaler found inf and skipped the optimizer."""
        self._end_step(flags=("skipped",))
        self._raise_stop()

    def _scaler_found(self, found: list[Tensor]) -> None:
        """What the scaler found in the gradients of the step that just ended (one optimizer of several was skipped)."""
        if self._pending and self._pending[-1].snapshot is not None:
            self._pending[-1].found_inf += [value.detach().clone() for value in found]

    def _observing(self) -> bool:
        switch = self._observation.switch
        return switch.sampling and not switch.paused

    def _end_unmarked_step(self) -> None:
        if self._observing():
            self._replays = self._observation.replay_time()
            self._observation.scaled_by(self._scaler.scale() if self._scaler is not None else None)
            self._observation.read_gradients()
            self._observation.after_update()
        self._end_step()

    def _begin_step(self) -> None:
        sampling = bool(self._faults.guard("schedule", self._schedule, self._step))
        slow = sampling and self.config.slow_every > 0 and self._samples % self.config.slow_every == 0
        self._observation.begin_step(sampling=sampling, slow=slow)
        if sampling and not self._clock_optimizers():
            self._observation.before_update(updating=False)

    def _clock_optimizers(self) -> list[Any]:
        return self._clock.optimizers if hasattr(self, "_clock") else []

    def _end_step(self, flags: tuple[str, ...] = ()) -> None:
        snapshot = None
        if self._observing():
            self._samples += 1
            snapshot = self._faults.guard("records", self._observation.snapshot, self._clock.optimizers, self._replays)
        scale = self._scaler.take_scale() if self._scaler is not None else None
        canary = self._observation.take_canary()
        self._pending.append(EndedStep(self._step, snapshot, canary, self._losses, flags, scale, self._found_inf))
        self._losses, self._found_inf, self._replays, self._updating = [], [], [], False
        self._ended_unclaimed = True
        self._runs_at_end = self._observation.runs()
        self._step += 1
        # what the GradScaler skips, and what ends outside of an optimizer's step, enters no sum over ranks
        sampled = self._observation.switch.sampling and "skipped" not in flags
        self._begin_step()
        self._faults.guard("ranks", partial(self._ranks.step_ended, self._pending[-1], sampled=sampled))
        self._faults.guard("records", self._finish_pending, False)

    def _renumber(self, step: int, *, ended: bool) -> None:
        if not ended:
            self._step = step
            return
        if self._pending:
            self._pending[-1].step = step
        elif (record := self._just_recorded()) is not None:
            record.step = step
        self._step = step + 1
        if self.just_ended():
            self._begin_step()

    # -- from pending steps to records --------------------------------------------------------------------------------

    def _finish_pending(self, everything: bool) -> None:
        """Turn ended steps into records; the newest waits for its loss until the next one ends, unless `everything`."""
        if self._working:
            return
        self._working = True
        try:
            while self._pending:
                newest = len(self._pending) == 1
                pending = self._pending[0]
                if not everything and ((newest and self._ended_unclaimed) or not pending.ready()):
                    return
                self._pending.popleft()
                self._recorder.take(pending)
        finally:
            self._working = False
            if self._closed and self._recorder.closed and hasattr(self, "_observation"):
                self._release()  # closed from inside an alert's callback


def _check_watched(model: nn.Module) -> None:
    scope = _WATCHED.get(model)
    if scope is not None and (live := scope()) is not None and not live._closed:
        if live.automatic:
            live.close()
            return
        raise FlowscopeError(
            f"watch(model): this {type(model).__name__} is watched already. Call scope.close() on the "
            "first scope, or use it."
        )
