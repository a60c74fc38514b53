"""`assert_trains`: `flowscope.check` for a test suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from flowscope.trials.bench import Loss
from flowscope.trials.findings import CheckReport
from flowscope.trials.sitting import check


def assert_trains(model: nn.Module, loss: Loss, batches: Iterable[Any], **options: Any) -> CheckReport:
    """Raise unless a model passes the trials of `flowscope.check`; notes are allowed.

    Args:
        model: the model.
        loss: `loss(model, batch)` returns the training loss, one number.
        batches: an iterable; the first three are used.
        **options: of `flowscope.check`: `optimizer`, `trials`, `only`, `skip`.

    Returns:
        The report.

    Raises:
        AssertionError: a trial failed, or none could judge; the message is the report.
        FlowscopeError: as in `flowscope.check`.
    """
    report = check(model, loss, batches, **options)
    if report.status:
        raise AssertionError(f"{type(model).__name__} does not train as it should:\n{report}")
    return report
