"""`watch` and its `Scope`: owns the instruments, turns steps into records, hands them to detectors and sinks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flowscope import arguments
from flowscope.arguments import AlertCallback, WatchArguments
from flowscope.config import WatchConfig, make_config
from flowscope.detectors import Detector
from flowscope.errors import FlowscopeError
from flowscope.faults import LOGGER, Faults, is_off
from flowscope.hooks.hooks import Hooks
from flowscope.instruments import Instrument, specs_of
from flowscope.model.plan import FlowPlan, display_path
from flowscope.model.view import ModelView
from flowscope.observation.observation import Observation
from flowscope.ranks.groups import is_first_process
from flowscope.recorder import Recorder
from flowscope.records import Alert, Record
from flowscope.schedule import Schedule, make_schedule
from flowscope.sinks import Run, Sink
from flowscope.steps.backward_losses import BackwardLosses
from flowscope.steps.driver import StepCount, StepDriver
from flowscope.steps.optimizers import OwnOptimizers
from flowscope.steps.unstepped import Unstepped
from flowscope.summary import summarize

NO_FLOWS = FlowPlan((), ())
NOTHING = WatchArguments(None, None, make_schedule(10), (), (), None, (), None, (), (), WatchConfig())
"""The arguments of a scope that observes nothing."""
OFF = "Nothing is watched: FLOWSCOPE_OFF=1."

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
    instruments: Iterable[Instrument | type[Instrument]] | Instrument | type[Instrument] = (),
    detectors: Iterable[Detector | type[Detector]] | Detector | type[Detector] = (),
    reference: str | Path | None = None,
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
        instruments: further kinds of numbers to record, classes or instances of `flowscope.instruments.Instrument` (a
            `PointStatistic` for a number per depth); `config={"instruments": {name: False}}` switches off one, also of
            flowscope's own.
        detectors: classes or instances of your own (`flowscope.detectors.Detector`, `Limit`), beside the built-in ones.
        reference: good runs of this recipe, a folder with three of them or more or a golden profile (docs/corridor.md):
            the alert `parted_from_reference` tells when, where and in what this run parts from them.
        config: `WatchConfig` or a dict of its keys.

    Returns:
        The scope. It observes nothing, and takes every call, where the environment says `FLOWSCOPE_OFF=1`, and where a
        model cannot be read at all (which is logged once).

    Raises:
        FlowscopeError: the model has no parameters or is watched already, or an argument is of the wrong kind.
    """
    if is_off():
        return Scope(nn.Module(), NOTHING)
    if is_off():
        return Scope(nn.Module(), NOTHING)
    arguments.check_model(model)
    return Scope(
        model,
        WatchArguments(
            optimizer=optimizer,
            log_dir=arguments.folder(log_dir),
            schedule=make_schedule(every),
            callbacks=arguments.alert_callbacks(on_alert),
            sinks=arguments.named_sinks(sinks),
            flows=arguments.flow_paths(flows),
            gates=arguments.gate_patterns(gates),
            scaler=scaler,
            instruments=arguments.listed(instruments),
            detectors=[*arguments.own_detectors(detectors), *arguments.reference_detectors(reference)],
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
        self.flows = NO_FLOWS
        self.automatic = False
        self._faults = Faults()
        self._recorder = Recorder(self.config, self._faults, given.callbacks, given.detectors)
        self._count = StepCount(given.schedule, self.config, self._faults)
        self._closed = False
        self._driver: StepDriver | None = None
        self._unstepped: Unstepped | None = None
        self._model = weakref.ref(model)
        if not is_off():
            self._try_to_attach(model, given)

    def _try_to_attach(self, model: nn.Module, given: WatchArguments) -> None:
        """Attach; where the model is one that we cannot read, say so once, and be a scope that observes nothing."""
        hooks = Hooks(self._faults)
        try:
            self._attach(model, given, hooks)
        except BaseException as error:
            self._driver = None
            hooks.close()
            self._recorder.outlet.close()
            _WATCHED.pop(model, None)
            if isinstance(error, FlowscopeError) or not isinstance(error, Exception):
                raise
            self._faults.report(f"watching {type(model).__name__}", error)

    def _attach(self, model: nn.Module, given: WatchArguments, hooks: Hooks) -> None:
        view = ModelView(model, given.flows, given.gates)
        try:
            self.flows = view.flows
        except FlowscopeError:
            raise
        except Exception as error:
            self._faults.report("flows", error)
            self.flows = view.flows = NO_FLOWS
        # sinks before hooks: an unwritable log_dir must leave the model untouched
        if writes := is_first_process():
            self._recorder.outlet.open(given.log_dir, self.config, quiet=bool(given.callbacks))
        observation = Observation(view, self.config, hooks, given.instruments)
        self._recorder.specs.update(specs_of([*observation.instruments, *(c for _, c in view.connections)]))
        own = OwnOptimizers(model, given.optimizer)
        hooks.optimizers = lambda: own.known
        some, tell = (lambda: view.parameters.some(3).values()), self._recorder.tell
        self._unstepped = Unstepped(own, hooks.turns, some, tell)
        driver = StepDriver(own, observation, self._recorder, self._count, given.schedule)
        if given.scaler is not None:
            driver.use_scaler(given.scaler)
        self._faults.guard("ranks", driver.ranks.others.attach)
        # a sink that says so sees the events of every rank, others write once a run
        self._recorder.outlet.sinks += [
            (part, s) for part, s in given.sinks if writes or getattr(s, "every_rank", False)
        ]
        self._driver = driver
        self._bind(given.callbacks)
        observation.owner = self
        _WATCHED[model] = weakref.ref(self)
        for note in self.flows.notes:
            LOGGER.info("flowscope: %s", note)
        if not len(self.flows):
            LOGGER.warning("flowscope: no depth axis found in %s; only parameter metrics.", type(model).__name__)
        driver.begin()

    def _bind(self, callbacks: Sequence[AlertCallback]) -> None:
        """Actions (flowscope.actions) know their scope, and some see all events."""
        for number, callback in enumerate(callbacks):
            if callable(bind := getattr(callback, "bind", None)):
                self._faults.guard(f"on_alert callback {number}", bind, self)
            if isinstance(callback, Sink):
                self._recorder.outlet.sinks.append((f"action {type(callback).__name__} {number}", callback))

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
        driver = self._open("step")
        value, number = arguments.loss_value(loss), arguments.step_number(step)
        if driver is None:
            return
        driver.observation.hooks.turns.leaf_loss = isinstance(loss, Tensor) and loss.is_leaf and loss.requires_grad
        driver.mark()
        if self._unstepped is not None and not self._count.ended:
            self._unstepped.called()
        driver.told(value, number)
        self._recorder.raise_stop()

    def _open(self, call: str) -> StepDriver | None:
        """What drives the steps; None where nothing is watched (`FLOWSCOPE_OFF=1`, or attaching failed)."""
        if self._closed:
            raise FlowscopeError(
                f"scope.{call}() after scope.close(): got a closed scope, expected an open one; call "
                "flowscope.watch again."
            )
        return self._driver

    def pause(self) -> None:
        """Observe nothing until `resume`; steps are still counted."""
        if (driver := self._open("pause")) is not None:
            driver.pause()

    def resume(self) -> None:
        """Observe again, from the next step on (the one under way where nothing of it was missed)."""
        if (driver := self._open("resume")) is not None:
            driver.resume()

    @property
    def records(self) -> list[Record]:
        """The records so far (bounded: `WatchConfig.max_records`); waits for copies under way."""
        early = self._driver.readable() if self._driver is not None else []
        return [*self._recorder.records, *early]

    @property
    def alerts(self) -> list[Alert]:
        """The alerts so far, raised and resolved in order (bounded: `WatchConfig.max_alerts`)."""
        if self._driver is not None:
            self._driver.readable()
        return list(self._recorder.alerts)

    @property
    def forwards(self) -> int:
        """How many forward passes in training the model has begun."""
        return self._driver.observation.passes.forwards if self._driver is not None else 0

    def losses_of_backward(self) -> BackwardLosses | None:
        """Where a launcher that sees backward passes tells of them: each step takes its own loss; None once closed."""
        if self._driver is None:
            return None
        told = BackwardLosses(self._driver.observation.view.parameters)
        self._driver.losses.at_end = told.take
        return told

    def use_scaler(self, scaler: Any) -> None:
        """Take over a GradScaler that was made after attaching; as `watch(scaler=...)`."""
        if self._driver is not None:
            self._driver.use_scaler(scaler)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that are known to hold the model's parameters, in the order they step."""
        return [*self._driver.own.known] if self._driver is not None else []

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
        plan = OFF if is_off() else self.flows
        if not records and self._unstepped is not None:
            plan = f"{self._unstepped.reason()}\n{plan}"
        return summarize(self._recorder.covered(), records, alerts, self._faults.failed, plan)

    def report(self, path: str | Path) -> Path:
        """Write the run so far as one HTML file that opens from disk, and return its path; waits for copies under way.

        It holds what `records` and `alerts` hold; `flowscope report RUN` reads the whole run from its log_dir.

        Raises:
            FlowscopeError: there is no record yet, or the file cannot be written.
        """
        from flowscope.views.report import write_report

        records, alerts = self.records, self.alerts
        if not records:
            raise FlowscopeError("scope.report(path): there is no record yet, expected a training step before it.")
        return write_report(Run(self._recorder.covered(), records, alerts), path)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state (step, schedule position, detectors), for the training checkpoint."""
        if self._driver is not None:
            self._driver.readable()
        detectors = self._recorder.detectors.state_dict()
        return {"step": self._count.step, "samples": self._count.samples, "detectors": detectors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`: the next step has its number, detectors neither warm up nor repeat an alert."""
        driver = self._open("load_state_dict")
        try:
            step, samples = int(state["step"]), int(state["samples"])
            self._recorder.detectors.load_state_dict(state["detectors"])
        except (KeyError, TypeError, ValueError) as error:
            raise FlowscopeError(
                f"scope.load_state_dict(state): got {state!r:.80} ({type(error).__name__}: {error}), expected what "
                "scope.state_dict() returned."
            ) from None
        if driver is None:
            self._count.step, self._count.samples = step, samples  # a checkpoint hands them on
        else:
            driver.load(step, samples)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Finish what is pending, remove every hook, close the sinks. Idempotent; records and alerts stay readable."""
        if self._closed:
            return
        self._closed = True
        if self._driver is None:
            return
        try:
            self._driver.finish()
            if self._unstepped is not None:
                self._unstepped.close(forwards=self.forwards, ended=self._count.ended)
        finally:
            self._driver.close()
            if (model := self._model()) is not None:
                _WATCHED.pop(model, None)
            # the scope keeps neither model nor optimizer alive
            self._driver = None
            self._faults.guard("coverage", self._recorder.tell_coverage)
            self._recorder.outlet.close()

    def _repr_html_(self) -> str:
        from flowscope.notebook import scope_html

        return scope_html(self._recorder.header, self.records, self.alerts)

    def __enter__(self) -> Scope:
        """The scope itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close."""
        self.close()


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
