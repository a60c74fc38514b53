"""The exceptions that flowscope raises on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence, with a space before it, that names what was probably meant; "" where nothing is near."""
    spelled = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(str(name).lower(), spelled, n=2)
    near += [low for low in spelled if len(name) > 3 and low not in near and name.lower() in low][: 2 - len(near)]
    return f" Did you mean {' or '.join(repr(spelled[low]) for low in near)}?" if near else ""


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
