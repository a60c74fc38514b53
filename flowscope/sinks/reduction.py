"""From records and alerts to a few numbers, for loggers that keep one curve a name.

A logger with a curve for each layer and metric is unreadable and slow; three numbers over depth (least, middle,
largest) say whether to look at the profile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from flowscope.records import Alert, Record, split_key


def spread(values: Iterable[float]) -> dict[str, float]:
    """The least, the middle and the largest of the values that were seen (NaN: not seen); empty where none was."""
    array = np.asarray(values, dtype=np.float64)
    seen = array[~np.isnan(array)]
    if not seen.size:
        return {}
    return {"min": float(seen.min()), "median": float(np.median(seen)), "max": float(seen.max())}


def record_scalars(record: Record, metrics: Iterable[str] | None = None) -> dict[str, float]:
    """A record as a few named numbers.

    Args:
        record: the record.
        metrics: names of metrics, without a flow; those the record lacks are left out. None: those that are meant for
            loggers (`Metric.logged`).

    Returns:
        `loss`, where one was given, and per metric `METRIC/min`, `METRIC/median`, `METRIC/max` over depth of the first
        flow, `METRIC/FLOW/...` of the others; `METRIC` alone where it is a single number. What was not seen is absent.
    """
    wanted = listed(metrics)
    out: dict[str, float] = {} if record.loss is None else {"loss": record.loss}
    for key, array in record.metrics.items():
        metric, flow = split_key(key)
        if not is_logged(key, record, wanted):
            continue
        name = metric if flow is None else f"{metric}/{flow}"
        numbers = spread(array)
        if array.size == 1 and numbers:
            out[name] = numbers["median"]
        else:
            out |= {f"{name}/{which}": value for which, value in numbers.items()}
    return out


def listed(metrics: Iterable[str] | None) -> frozenset[str] | None:
    """The names of metrics that a logger was asked for; None where it was not told which."""
    return None if metrics is None else frozenset(metrics)


def is_logged(key: str, record: Record, wanted: Collection[str] | None) -> bool:
    """Whether a logger gets a metric: one of those wanted, or where none are named one that is meant for loggers."""
    return record.spec(key).logged if wanted is None else split_key(key)[0] in wanted


class StandingAlerts:
    """Which alerts are raised and not yet resolved."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str, str | None], Alert] = {}

    def take(self, alert: Alert) -> None:
        """Follow an alert that was raised or resolved."""
        place = (alert.kind, alert.where, alert.flow)
        if alert.state == "raised":
            self._standing[place] = alert
        else:
            self._standing.pop(place, None)

    def __len__(self) -> int:
        """How many stand."""
        return len(self._standing)

    def counts(self) -> Counter[tuple[str, str]]:
        """How many stand, by (kind, severity)."""
        return Counter((alert.kind, alert.severity) for alert in self._standing.values())
