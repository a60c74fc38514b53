"""`watch` and its `Scope`: owns the instruments, turns steps into records, hands them to detectors and sinks."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowscope import arguments
from flowscope._version import __version__
from flowscope.arguments import AlertCallback, WatchArguments
from flowscope.config import WatchConfig, make_config
from flowscope.detectors import Detector
from flowscope.errors import FlowscopeError
from flowscope.faults import LOGGER, Faults, door, is_off
from flowscope.hooks.hooks import Hooks
from flowscope.instruments import Instrument, specs_of
from flowscope.model.keras_layers import opened, untrained
from flowscope.model.plan import FlowPlan, display_path
from flowscope.model.view import ModelView
from flowscope.observation.observation import Observation
from flowscope.ranks.groups import files_of, is_first_process, several_processes
from flowscope.recorder import Recorder
from flowscope.records import Alert, Alerts, Record, RunHeader
from flowscope.schedule import Schedule, make_schedule
from flowscope.sinks import Run, Sink
from flowscope.steps.backward_losses import BackwardLosses
from flowscope.steps.driver import StepDriver
from flowscope.steps.marks import Marks
from flowscope.steps.numbers import StepCount
from flowscope.steps.optimizers import OwnOptimizers
from flowscope.steps.unstepped import Unstepped
from flowscope.summary import summarize

NO_FLOWS = FlowPlan((), ())
OFF = "Nothing is watched: FLOWSCOPE_OFF=1."

_WATCHED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Scope]] = weakref.WeakKeyDictionary()
_TOLD_CLOSED: weakref.WeakSet[Scope] = weakref.WeakSet()
"""Closed scopes among ranks that were called again, which is said once."""


@arguments.spelled
def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    log_dir: str | Path | None = None,
    every: int | Schedule | None = None,
    budget: float | None = None,
    on_alert: AlertCallback | Sequence[AlertCallback] | None = None,
    sinks: Iterable[Sink] = (),
    flows: Sequence[str] | None = None,
    gates: Sequence[str] | str | None = None,
    parameters: Sequence[str] | str | None = None,
    scaler: Any = None,
    instruments: Iterable[Instrument | type[Instrument]] | Instrument | type[Instrument] = (),
    detectors: Iterable[Detector | type[Detector]] | Detector | type[Detector] = (),
    reference: str | Path | None = None,
    config: WatchConfig | dict[str, Any] | None = None,
) -> Scope:
    """Attach to a model and observe its training from the next step on. Never changes or stops the training.

    A model that is watched already goes over to the new scope; the earlier one is closed, and that is said.

    Args:
        model: any module with parameters; attach before its first compiled call.
        optimizer: the optimizer, or a list in the order they step; its step hook marks the end of a step. Without one,
            the one that holds the model's parameters is found when it first steps; `scope.step()` is the fallback.
        log_dir: folder for `flowscope.jsonl` and the TensorBoard files; None writes nothing. One that holds another run
            is left alone: NAME-2 beside it is taken, and said. It is the same run where `load_state_dict` was called,
            or where its first record is of a later step than 0.
        every: sample step k when k < 10 or k % every == 0, or a pure function `step -> bool`. None follows the cost.
        budget: the share of a step's time that flowscope may take: after the first ten steps each 10th, 20th, 40th, ...
            is sampled. None, without `every`, is a budget of 0.01 with each 80th at the least. Not beside `every`.
        on_alert: called with each `Alert`, raised or resolved; a callable or a list of them.
        sinks: further objects with `write(event)` and `close()`.
        flows: module paths to use as the depth axis instead of the discovered ones (`flowscope.find_flows(model)`).
        gates: patterns of modules of the model whose outputs are gates in (0, 1), beside those that are found: modules
            that give a sigmoid something is multiplied by. The gates of wrapped blocks are seen without it.
        parameters: patterns of the parameters to record ("blocks.*.attn.*"); one that begins with "!" leaves out
            ("!embed.*"). The others are trained as ever, and nothing is said of them.
        scaler: the GradScaler, so that gradients are the true (unscaled) ones and a skipped step is a record.
        instruments: further kinds of numbers to record, classes or instances of `flowscope.instruments.Instrument` (a
            `PointStatistic` for a number per depth); `config={"instruments": {name: False}}` switches off one, also of
            flowscope's own.
        detectors: classes or instances of your own (`flowscope.detectors.Detector`, `Limit`), beside the built-in ones.
        reference: a good run of this recipe (docs/reference.md), or several, a folder with three of them or more or a
            golden profile (docs/corridor.md): the alert `parted_from_reference` tells when, where and in what this run
            parts from them.
        config: `WatchConfig` or a dict of its keys.

    Returns:
        The scope. It observes nothing, and takes every call, where the environment says `FLOWSCOPE_OFF=1`, and where a
        model cannot be read at all (which is logged once).

    Raises:
        FlowscopeError: the model has no parameters, or an argument is of the wrong kind or unknown.
    """
    scope = Scope()
    if is_off():
        return scope

    def attach() -> None:
        seen = opened(model)
        arguments.check_model(seen)
        callbacks = arguments.alert_callbacks(on_alert)
        arguments.check_actions(callbacks, detectors, reference)
        scope._attach(
            seen,
            WatchArguments(
                optimizer=optimizer,
                log_dir=arguments.folder(log_dir),
                schedule=make_schedule(every, budget),
                callbacks=callbacks,
                sinks=arguments.named_sinks(sinks),
                flows=arguments.flow_paths(flows),
                gates=arguments.gate_patterns(gates),
                parameters=[*arguments.parameter_patterns(parameters), *(f"!{name}" for name in untrained(seen))],
                scaler=scaler,
                instruments=arguments.listed(instruments),
                detectors=[*arguments.own_detectors(detectors), *arguments.reference_detectors(reference)],
                config=make_config(config),
            ),
        )

    scope._faults.enter(f"watching {type(model).__name__}", attach)
    return scope


class Scope:
    """What `watch` returns. Use as a context manager, or call `close()` at the end of training.

    Attributes:
        flows: the flows being watched (`FlowPlan`, printable).
        config: the `WatchConfig` in force.
        automatic: attached by `flowscope run`; gives way to a `watch` of the script's own.
    """

    def __init__(self) -> None:
        self.config, self.flows, self.automatic = WatchConfig(), NO_FLOWS, False
        self._faults = Faults()
        self._closed = False
        self._recorder: Recorder | None = None
        self._driver: StepDriver | None = None
        self._unstepped: Unstepped | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._loaded: dict[str, Any] = {"step": 0, "samples": 0, "detectors": {}}
        """The state that a scope which observes nothing hands on from one checkpoint to the next."""

    def _attach(self, model: nn.Module, given: WatchArguments) -> None:
        """Observe the model from here on, as far as it can be read; else leave nothing behind."""
        hooks = Hooks(self._faults)
        recorder = Recorder(given.config, self._faults, given.callbacks, given.detectors)
        try:
            # before any hook: an unwritable log_dir must leave the model untouched
            opens, folder = files_of(model, given.log_dir)
            if opens:
                recorder.outlet.open(folder, given.config, quiet=bool(given.callbacks))
            _replace(model)
            view = ModelView(model, given.flows, given.gates, given.parameters)
            driver = self._look_through(view, given, hooks, recorder)
            # a sink that says so sees the events of every rank, others write once a run
            recorder.outlet.sinks += [
                (f, s) for f, s in given.sinks if is_first_process() or getattr(s, "every_rank", False)
            ]
            self._bind(recorder, given.callbacks)
            driver.begin()
        except BaseException:
            self._faults.remove_all(hooks.handles)
            self._faults.attempt("closing", recorder.outlet.close)
            raise
        self.config, self._recorder, self._driver, self._model = given.config, recorder, driver, weakref.ref(model)
        driver.observation.owner = self
        _WATCHED[model] = weakref.ref(self)
        for note in self.flows.notes:
            LOGGER.info("flowscope: %s", note)
        if not len(self.flows):
            LOGGER.warning("flowscope: no depth axis found in %s; only parameter metrics.", type(model).__name__)

    def _look_through(self, view: ModelView, given: WatchArguments, hooks: Hooks, recorder: Recorder) -> StepDriver:
        enter = self._faults.enter
        self.flows = view.flows = enter("flows", lambda: view.flows, otherwise=NO_FLOWS)
        view.connections = enter("connections", lambda: view.connections, otherwise=[])
        observation = Observation(view, given.config, hooks, given.instruments)
        recorder.specs.update(specs_of([*observation.instruments, *(c for _, c in view.connections)]))
        some = lambda: view.parameters.some(8).values()  # noqa: E731
        own = OwnOptimizers(view.model, given.optimizer, Marks(hooks.turns, some))
        hooks.optimizers = lambda: own.known
        self._unstepped = Unstepped(own, hooks.turns, some, recorder.tell)
        count = StepCount(given.schedule, given.config, self._faults)
        recorder.cost = count.told
        driver = StepDriver(own, observation, recorder, count, given.schedule)
        if given.scaler is not None:
            driver.use_scaler(given.scaler)
        self._faults.guard("ranks", driver.ranks.others.attach)
        observation.on_forward = partial(self._unstepped.forward, driver.count, observation.on_forward)
        return driver

    def _bind(self, recorder: Recorder, callbacks: Sequence[AlertCallback]) -> None:
        """Actions (flowscope.actions) know their scope, and some see all events."""
        for number, callback in enumerate(callbacks):
            if callable(bind := getattr(callback, "bind", None)):
                self._faults.guard(f"on_alert callback {number}", bind, self)
            if isinstance(callback, Sink):
                recorder.outlet.sinks.append((f"action {type(callback).__name__} {number}", callback))

    # -- the user's calls -------------------------------------------------------------------------------------------

    @door()
    def step(self, loss: Tensor | float | None = None, step: int | None = None) -> None:
        """Give the loss of a step; without an optimizer, also mark the end of the step. Never synchronises.

        Args:
            loss: a scalar tensor or number; of a tensor of several the mean is taken, which is said once. It belongs to
                the step that ended since the previous call, else to the one under way; several are averaged. A loop
                that gives each loss before the optimizer's step goes on so: a loss that comes after a new forward does
                not belong to a step that has its loss already.
            step: renumbers the step the call belongs to; the count goes on from there.

        Raises:
            FlowscopeError: the scope is closed, `loss` is neither a tensor nor a number, or `step` no step number.
        """
        if (driver := self._driver) is None or not driver.light.on or not driver.light.told(loss, step):
            self._faults.meter.time(self._step, loss, step)

    def _step(self, loss: Tensor | float | None, step: int | None) -> None:
        driver = self._open("step")
        value, number = arguments.loss_value(loss), arguments.step_number(step)
        if driver is None:
            return
        driver.observation.hooks.turns.leaf_loss = isinstance(loss, Tensor) and loss.is_leaf and loss.requires_grad
        if (told := arguments.of_several(loss)) is not None:
            driver.observation.hooks.warn_once(told)
        driver.mark()
        if self._unstepped is not None and not driver.count.ended:
            self._faults.attempt("never_stepped", self._unstepped.called)
        driver.told(value, number)
        driver.raise_stop()

    def _open(self, call: str) -> StepDriver | None:
        """What drives the steps; None where nothing is watched (`FLOWSCOPE_OFF=1`, or attaching failed).

        Raises:
            FlowscopeError: the scope is closed. Among ranks it is a line in the log instead: an error in one rank's
                loop would end all of them.
        """
        if self._closed and several_processes() and call != "load_state_dict":
            if self not in _TOLD_CLOSED:
                _TOLD_CLOSED.add(self)
                LOGGER.warning("flowscope: scope.%s() after scope.close() does nothing.", call)
            return None
        if self._closed:
            raise FlowscopeError(
                f"scope.{call}() after scope.close(): got a closed scope, expected an open one; call "
                "flowscope.watch again."
            )
        return self._driver

    @door()
    def pause(self) -> None:
        """Observe nothing until `resume`; steps are still counted."""
        if (driver := self._open("pause")) is not None:
            driver.pause()

    @door()
    def resume(self) -> None:
        """Observe again, from the next step on (the one under way where nothing of it was missed)."""
        if (driver := self._open("resume")) is not None:
            driver.resume()

    @property
    @door(lambda scope: [*scope._recorder.records])
    def records(self) -> list[Record]:
        """The records so far (bounded: `WatchConfig.max_records`); waits for copies under way."""
        if self._recorder is None:
            return []
        early = self._driver.readable() if self._driver is not None else []
        return [*self._recorder.records, *early]

    @property
    @door(lambda scope: [*scope._recorder.alerts])
    def alerts(self) -> list[Alert]:
        """The alerts so far, raised and resolved in order (bounded: `WatchConfig.max_alerts`)."""
        if self._recorder is None:
            return Alerts()
        if self._driver is not None:
            self._driver.readable()
        return Alerts(self._recorder.alerts)

    @property
    @door(lambda scope: 0)
    def forwards(self) -> int:
        """How many forward passes in training the model has begun, but for those between two samples."""
        return self._driver.observation.passes.forwards if self._driver is not None else 0

    @door()
    def losses_of_backward(self) -> BackwardLosses | None:
        """Where a launcher that sees backward passes tells of them: each step takes its own loss; None once closed."""
        if self._driver is None:
            return None
        told = BackwardLosses(self._driver.observation.view.parameters)
        self._driver.losses.at_end = told.take
        return told

    @door()
    def use_scaler(self, scaler: Any) -> None:
        """Take over a GradScaler that was made after attaching; as `watch(scaler=...)`."""
        if self._driver is not None:
            self._driver.use_scaler(scaler)

    @property
    @door(lambda scope: [])
    def optimizers(self) -> list[Any]:
        """The optimizers that are known to hold the model's parameters, in the order they step."""
        return [*self._driver.own.known] if self._driver is not None else []

    @door(lambda scope: set())
    def parameters_at(self, where: str) -> set[int]:
        """The ids of the parameters that an alert's place (`Alert.where`) means; all of them for the root ("")."""
        model, place = self._model(), where.partition(":")[0].partition("#")[0]
        names = model.named_parameters(remove_duplicate=False) if model is not None else ()
        return {
            id(parameter)
            for name, parameter in names
            if not place or display_path(name) == place or display_path(name).startswith(place + ".")
        }

    @door(lambda scope: f"flowscope: no summary; failed: {scope._faults.failed}")
    def summary(self) -> str:
        """A few lines for people: the last record's profile, what stands, what never got a gradient, what failed."""
        records, alerts = self.records, self.alerts
        plan = OFF if is_off() else self.flows
        if not records and self._unstepped is not None:
            plan = f"{self._unstepped.reason()}\n{plan}"
        return summarize(self._header(), records, alerts, self._faults.failed, plan)

    @door(lambda scope: Path())
    def report(self, path: str | Path) -> Path:
        """Write the run so far as one HTML file that opens from disk, and return its path; waits for copies under way.

        It holds what `records` and `alerts` hold; `flowscope report RUN` reads the whole run from its log_dir.

        Raises:
            FlowscopeError: there is no record yet, or the file cannot be written.
        """
        from flowscope.views.report import write_report

        run = self.run
        if not run.records:
            raise FlowscopeError("scope.report(path): there is no record yet, expected a training step before it.")
        return write_report(run, path)

    @property
    @door(lambda scope: Run())
    def run(self) -> Run:
        """The run so far as `flowscope.read_run` gives a recorded one: `scope.run.to_pandas("gain")`."""
        return Run(self._header(), self.records, self.alerts)

    def _header(self) -> RunHeader:
        return self._recorder.covered() if self._recorder is not None else RunHeader(__version__, (), {})

    @door(lambda scope: scope._loaded)
    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state (step, schedule position, detectors), for the training checkpoint."""
        if self._driver is not None:
            self._loaded = self._driver.state_dict()
        return self._loaded

    @door()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`: the next step has its number, detectors neither warm up nor repeat an alert."""
        driver = self._open("load_state_dict")
        try:
            self._loaded = {
                "step": int(state["step"]),
                "samples": int(state["samples"]),
                "detectors": state["detectors"],
            }
            if driver is not None:
                driver.load_state_dict(self._loaded)
                self.resumes()
        except (KeyError, TypeError, ValueError) as error:
            raise FlowscopeError(
                f"scope.load_state_dict(state): got {state!r:.80} ({type(error).__name__}: {error}), expected what "
                "scope.state_dict() returned."
            ) from None

    @door()
    def resumes(self) -> None:
        """Say that the run in `log_dir` goes on here, as `load_state_dict` does; for trainers that resume."""
        if self._recorder is not None:
            self._recorder.outlet.continues = True

    @property
    @door(lambda scope: None)
    def log_dir(self) -> Path | None:
        """Where the files of this run are; None where none are written."""
        return self._recorder.outlet.folder if self._recorder is not None else None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @door()
    def close(self) -> None:
        """Finish what is pending, remove every hook, close the sinks. Idempotent; records and alerts stay readable."""
        if self._closed:
            return
        self._closed = True
        if (driver := self._driver) is None:
            return
        attempt, handles = self._faults.attempt, driver.observation.hooks.handles
        try:
            attempt("closing", driver.finish)
            attempt("never_stepped", self._unstep)
            self._loaded = attempt("closing", driver.state_dict, otherwise=self._loaded)
        finally:
            self._faults.closing = True
            attempt("closing", driver.close)
            self._faults.remove_all(handles)
            if (model := self._model()) is not None:
                _WATCHED.pop(model, None)
            # the scope keeps neither model nor optimizer alive
            self._driver = None
            if self._recorder is not None:
                attempt("coverage", self._recorder.tell_cost)
                attempt("closing", self._recorder.outlet.close)

    def _unstep(self) -> None:
        if self._unstepped is not None and self._driver is not None:
            self._unstepped.close(forwards=self.forwards, ended=self._driver.count.ended)

    @door(lambda scope: "")
    def _repr_html_(self) -> str:
        from flowscope.notebook import scope_html

        return scope_html(self._header(), self.records, self.alerts)

    def __enter__(self) -> Scope:
        """The scope itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close."""
        self.close()


def _drivers() -> list[StepDriver]:
    scopes = [reference() for reference in [*_WATCHED.values()]]
    return [scope._driver for scope in scopes if scope is not None and scope._driver is not None]


def _in_forked_child() -> None:
    for driver in _drivers():
        driver.observation.faults.attempt("fork", driver.forked)


def _at_exit() -> None:
    """The last finished step is on disk, though nobody closed the scope."""
    for driver in _drivers():
        driver.observation.faults.attempt("the end of the process", driver.last_words)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


def _replace(model: nn.Module) -> None:
    """Close the scope that watches the model already: a cell of a notebook that is run again."""
    scope = _WATCHED.get(model)
    if scope is not None and (live := scope()) is not None and not live._closed:
        if not live.automatic:
            LOGGER.warning(
                "flowscope: this %s was watched already; the earlier scope is closed, and the new one takes over.",
                type(model).__name__,
            )
        live.close()
