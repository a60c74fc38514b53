"""What the callbacks of trainers share: the arguments, and a scope whose alerts end a run the trainer's way.

`stop_on`, and `StopTraining` raised by an `on_alert` callable, end it: a trainer has a way to stop after the current
step, with its checkpoints and reports; an exception out of its `optimizer.step()` has none of that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import flowscope
from flowscope.arguments import alert_callbacks, check_names, stop_kinds
from flowscope.errors import StopTraining
from flowscope.faults import is_off
from flowscope.records import Alert, Event
from flowscope.trials.bench import Loss
from flowscope.trials.passing import Passing

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
        **watch_options: passed on to `flowscope.watch`.

    Attributes:
        scope: of the current run, or of the last one; None before.
        check_report: what the trials found; None before.
    """

    def __init__(
        self,
        mode: str | None = None,
        log_dir: str | Path | None = None,
        every: int | Callable[[int], bool] = 10,
        on_alert: AlertAction | Iterable[AlertAction] | None = None,
        stop_on: str | Iterable[str] | None = None,
        check: bool = False,
        **watch_options: Any,
    ) -> None:
        self.scope: flowscope.Scope | None = None
        self.check_report: flowscope.CheckReport | None = None
        self._check = check
        self._passing: Passing | None = None
        self._mode = mode
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

    def _await_batches(self, loss: Loss, ready: Callable[[nn.Module], object] = lambda model: None) -> None:
        """Begin to copy batches for the trials, if asked to."""
        self._passing = Passing(loss, ready) if self._check and not is_off() else None

    def _try_batches(self, model: nn.Module, optimizers: Sequence[Any], *, last: bool = False) -> None:
        """Make the trials where there is as much as they need, or will be no more; right after a step, and once."""
        if self._passing is not None and (self._passing.full or last):
            passing, self._passing = self._passing, None
            self.check_report = passing.check(model, optimizers)


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
