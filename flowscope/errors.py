"""The exceptions that flowscope raises on purpose."""

from __future__ import annotations

from typing import Any


class FlowscopeError(Exception):
    """A request flowscope cannot fulfil: says what, where, got, expected, and the call that fixes it."""


class CannotJudgeError(Exception):
    """Raised by a trial of `flowscope.check`, with the reason, where what it needs is not there."""


class StopTraining(FlowscopeError):  # noqa: N818 - a signal, as StopIteration is
    """Ends a run from an alert: what `flowscope.actions.Stop` raises, and what an `on_alert` callable may raise.

    It leaves `optimizer.step()` or `scope.step()` after the step is complete, on every rank at the same step. It is the
    only exception of an `on_alert` callable that is not caught.

    Attributes:
        alert: the `Alert` that asked for the stop, None where none was named.
    """

    def __init__(self, message: str, alert: Any = None) -> None:
        super().__init__(message)
        self.alert = alert
