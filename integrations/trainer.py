"""What the callbacks of trainers share: the arguments, and a scope whose alerts end a run the trainer's way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

import flowscope
from flowscope.arguments import alert_callbacks, listed
from flowscope.stopping import AlertAction, with_stop


class TrainerWatch:
    """Keeps what `watch` will be given until the trainer has a model; each callback's docstring says when.

    Args:
        mode: of `flowscope.wrap`; None wraps nothing.
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
        mode: str | None = None,
        log_dir: str | Path | None = None,
        every: int | Callable[[int], bool] = 10,
        on_alert: AlertAction | Iterable[AlertAction] | None = None,
        stop_on: str | Iterable[str] | None = None,
        **watch_options: Any,
    ) -> None:
        self.scope: flowscope.Scope | None = None
        self._mode = mode
        self._options = {"log_dir": log_dir, "every": every, **watch_options}
        self._on_alert, self._stop_on = alert_callbacks(on_alert), listed(stop_on)

    def _wrap(self, model: nn.Module, **options: Any) -> None:
        """Wrap, if asked to and not done yet."""
        if self._mode is not None and not flowscope.is_wrapped(model):
            flowscope.wrap(model, mode=self._mode, **options)

    def _watch(self, model: nn.Module, optimizer: Any, stop: AlertAction, **options: Any) -> flowscope.Scope:
        """Attach; `options` come before those that were given."""
        options = with_stop(self._options | options, stop, self._on_alert, self._stop_on)
        self.scope = flowscope.watch(model, optimizer, **options)
        return self.scope
