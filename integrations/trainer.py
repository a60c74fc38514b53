"""What the callbacks of trainers share: the arguments, and a scope whose alerts end a run the trainer's way.

`stop_on`, and `StopTraining` raised by an `on_alert` callable, end it: a trainer has a way to stop after the current
step, with its checkpoints and reports; an exception out of its `optimizer.step()` has none of that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import flowscope
from flowscope.arguments import alert_callbacks, check_names, stop_kinds
from flowscope.config import WatchConfig
from flowscope.errors import FlowscopeError, StopTraining
from flowscope.faults import LOGGER, is_off
from flowscope.model.keras_layers import opened
from flowscope.records import Alert, Event
from flowscope.sinks import Sink
from flowscope.trials.bench import Loss
from flowscope.trials.passing import Passing

ATTACHED = ("scope", "_passing")
"""What of a callback belongs to one training, and is not saved with it."""
AlertAction = Callable[[Alert], object]


class TrainerWatch:
    """Keeps what `watch` will be given until the trainer has a model; each callback's docstring says when.

    Args:
        mode: of `flowscope.wrap`; None wraps nothing.
        log_dir: as in `flowscope.watch`.
        every: likewise.
        on_alert: likewise; `StopTraining` ends the run like `stop_on`.
        stop_on: alert kinds or severities that end it.
        check: make the trials of `flowscope.check` on a copy of the model and of the first batches, and print them.
        flows: as in `flowscope.watch`.
        gates: likewise.
        sinks: likewise.
        config: likewise.
        **watch_options: passed on to `flowscope.watch`.

    Attributes:
        scope: of the current run, or of the last one; None before.
        check_report: what the trials found; None before.
    """

    def __init__(
        self,
        mode: str | None = None,
        log_dir: str | Path | None = None,
        every: int | Callable[[int], bool] | None = None,
        on_alert: AlertAction | Iterable[AlertAction] | None = None,
        stop_on: str | Iterable[str] | None = None,
        check: bool = False,
        # by name, since a command line (LightningCLI) takes what it finds in a signature
        flows: Sequence[str] | None = None,
        gates: Sequence[str] | str | None = None,
        sinks: Iterable[Sink] = (),
        config: WatchConfig | dict[str, Any] | None = None,
        **watch_options: Any,
    ) -> None:
        self.scope: flowscope.Scope | None = None
        self.check_report: flowscope.CheckReport | None = None
        self._check = check
        self._passing: Passing | None = None
        self._mode = mode
        further = {"flows": flows, "gates": gates, "sinks": sinks, "config": config}
        watch_options |= {name: value for name, value in further.items() if value is not None and value != ()}
        self._options = {"log_dir": log_dir, "every": every, **watch_options}
        check_names(watch_options, [*inspect.signature(flowscope.watch).parameters])
        self._on_alert, self._stop_on = alert_callbacks(on_alert), _stop_kinds(stop_on, watch_options)

    def _wrap(self, model: nn.Module, **options: Any) -> None:
        """Wrap, if asked to and not done yet."""
        if self._mode is not None and not flowscope.is_wrapped(model):
            flowscope.wrap(model, mode=self._mode, **options)

    def _watch(
        self, model: nn.Module, optimizer: Any, stop: AlertAction, step: int = 0, **options: Any
    ) -> flowscope.Scope:
        """Attach; `options` come before those that were given."""
        options = with_stop(self._options | options, stop, self._on_alert, self._stop_on)
        again, self.scope = self.scope is not None, flowscope.watch(model, optimizer, **options)
        if again or step > 0:
            self.scope.resumes()
        return self.scope

    def __getstate__(self) -> dict[str, Any]:
        """What was given, without what is attached to a model: a trainer may save its callbacks."""
        return {name: value for name, value in vars(self).items() if name not in ATTACHED} | dict.fromkeys(ATTACHED)

    def _await_batches(self, loss: Loss, ready: Callable[[nn.Module], object] = lambda model: None) -> None:
        """Begin to copy batches for the trials, if asked to."""
        self._passing = Passing(loss, ready) if self._check and not is_off() else None

    def _try_batches(self, model: nn.Module, optimizers: Sequence[Any], *, last: bool = False) -> None:
        """Make the trials where there is as much as they need, or will be no more; right after a step, and once."""
        if self._passing is not None and (self._passing.full or last):
            passing, self._passing = self._passing, None
            self.check_report = passing.check(model, optimizers)


class BareWatch(TrainerWatch):
    """For trainers whose models exist before their callbacks hear of them: nothing is wrapped, no trial made.

    Args:
        log_dir: as in `flowscope.watch`.
        every: likewise.
        on_alert: likewise; `StopTraining` ends the run like `stop_on`.
        stop_on: alert kinds or severities that end it.
        **watch_options: passed on to `flowscope.watch`.

    Attributes:
        scope: of the current run, or of the last one; None before.
    """

    def __init__(
        self,
        log_dir: str | Path | None = None,
        every: int | Callable[[int], bool] | None = None,
        on_alert: AlertAction | Iterable[AlertAction] | None = None,
        stop_on: str | Iterable[str] | None = None,
        **watch_options: Any,
    ) -> None:
        super().__init__(None, log_dir, every, on_alert, stop_on, **watch_options)
        self._stop_asked = False

    def _ask_stop(self, alert: Alert) -> None:
        self._stop_asked = True

    def _begin(self, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
        """Attach; a later run of the same callback goes on with its state.

        A model without parameters (its layers are not built yet, say) is told of, and ends no run.
        """
        before = self.scope.state_dict() if self.scope is not None else None
        self._end()
        self._stop_asked = False
        if next(opened(model).parameters(), None) is None:
            self.scope = None
            LOGGER.warning("flowscope: nothing is watched: %s has no parameters yet", type(model).__name__)
            return
        scope = self._watch(model, optimizer, self._ask_stop, **options)
        if before:
            scope.load_state_dict(before)

    def _end(self) -> None:
        """Detach and finish the files."""
        if self.scope is not None:
            self.scope.close()


def module_in(model: Any) -> nn.Module | None:
    """The module that a trainer's model is or holds (`model_body`, `module`, `model`); None, and one line, without."""
    held = [model, *(getattr(model, name, None) for name in ("model_body", "module", "model"))]
    found = next((one for one in held if isinstance(one, nn.Module)), None)
    if found is None:
        LOGGER.warning("flowscope: nothing is watched: %s is no torch.nn.Module and holds none", type(model).__name__)
    return found


def loss_in(output: Any) -> Tensor | float | None:
    """The loss in what a training step returned: itself, its entry "loss", that of the first of a list of such."""
    if isinstance(output, (Tensor, Real)):
        return output  # type: ignore[return-value]
    if isinstance(output, Mapping):
        return loss_in(output.get("loss"))
    return loss_in(output[0]) if isinstance(output, list) and output and isinstance(output[0], Mapping) else None


class LossReader:
    """Hands losses to a scope; where a step's output holds none, this is told once and steps go on without.

    Args:
        fix: what the line says to do.
    """

    def __init__(self, fix: str) -> None:
        self._fix = fix
        self._told = False

    def hand_over(self, scope: flowscope.Scope, output: Any) -> None:
        """The step that made this output has ended."""
        loss = loss_in(output)
        try:
            scope.step(loss=loss)
        except FlowscopeError:  # a complex loss, say
            loss = None
            scope.step()
        if loss is None and not self._told:
            self._told = True
            LOGGER.warning("flowscope: no loss is seen in a step's output (%s): %s", type(output).__name__, self._fix)


class StopSink:
    """Calls `stop(alert)` for each raised alert of the chosen kinds or severities.

    A sink and not a callback: where the user gives no callback, alerts still go to the console.
    """

    every_rank = True
    """All ranks see the same alerts at the same step, and all have to stop."""

    def __init__(self, stop_on: Iterable[str], stop: Callable[[Alert], object]) -> None:
        self._stop_on = frozenset(stop_on)
        self._stop = stop

    def write(self, event: Event) -> None:
        """Stop, if this alert was asked for."""
        if isinstance(event, Alert) and event.state == "raised" and self._stop_on & {event.kind, event.severity}:
            self._stop(event)

    def close(self) -> None:
        """Nothing to release."""


class _Translated:
    """An `on_alert` callable whose `StopTraining` becomes a call of `stop`; all else about it stays."""

    def __init__(self, action: AlertAction, stop: Callable[[Alert], object]) -> None:
        self._action, self._stop = action, stop

    def __call__(self, alert: Alert) -> None:
        try:
            self._action(alert)
        except StopTraining:
            self._stop(alert)

    def __getattr__(self, name: str) -> Any:
        # flowscope.actions also have bind, write and close
        return getattr(self._action, name)


def with_stop(
    options: Mapping[str, Any],
    stop: Callable[[Alert], object],
    on_alert: AlertAction | Iterable[AlertAction] | None,
    stop_on: str | Iterable[str] | None,
) -> dict[str, Any]:
    """The arguments of `flowscope.watch` with which alerts end a run the trainer's way.

    Args:
        options: the other arguments.
        stop: called with the alert where `stop_on` names it, or where one of `on_alert` raises `StopTraining`.
        on_alert: as in `flowscope.watch`.
        stop_on: alert kinds or severities.
    """
    return {
        **options,
        "on_alert": [_Translated(action, stop) for action in alert_callbacks(on_alert)],
        "sinks": [*options.get("sinks", ()), StopSink(_stop_kinds(stop_on, options), stop)],
    }


def _stop_kinds(stop_on: str | Iterable[str] | None, options: Mapping[str, Any]) -> list[str]:
    return stop_kinds(stop_on, options.get("detectors"), options.get("reference"))
