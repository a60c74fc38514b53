"""Trackio as a sink: local, in one SQLite file a project.

run = trackio.init(project="p")
scope = flowscope.watch(model, optimizer, sinks=[TrackioSink(run)])

Names: `flowscope/loss`, `flowscope/gradient_product/min` and so on (`flowscope.sinks.reduction`), at the optimizer
step. Raised alerts go to `run.alert`. Close the scope before `trackio.finish()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Event, Record
from flowscope.sinks.reduction import StandingAlerts, listed, record_scalars

try:
    import trackio
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.trackio needs Trackio, which is not installed: pip install "flowscope[trackio]".'
    ) from error

LEVELS = {
    "info": trackio.AlertLevel.INFO,
    "warning": trackio.AlertLevel.WARN,
    "error": trackio.AlertLevel.ERROR,
}


class TrackioSink:
    """Logs records and alerts to a run; never ends it.

    Args:
        run: what `trackio.init` returned.
        metrics: names of the metrics to log; None: those that are meant for loggers (`Metric.logged`).
        prefix: of all names.
    """

    def __init__(self, run: Any, metrics: Iterable[str] | None = None, prefix: str = "flowscope") -> None:
        if not (callable(getattr(run, "log", None)) and callable(getattr(run, "alert", None))):
            raise FlowscopeError(
                f"TrackioSink(run): got {type(run).__name__}, expected the run that trackio.init(project=...) returned."
            )
        self._run, self._metrics, self._prefix = run, listed(metrics), prefix
        self._standing = StandingAlerts()

    def write(self, event: Event) -> None:
        """Log a record or an alert."""
        if isinstance(event, Record):
            numbers = {**record_scalars(event, self._metrics), "alerts_standing": len(self._standing)}
            self._run.log({f"{self._prefix}/{name}": value for name, value in numbers.items()}, step=event.step)
        elif isinstance(event, Alert):
            self._standing.take(event)
            if event.state == "raised":
                self._run.alert(f"flowscope: {event.kind}", str(event), level=LEVELS[event.severity])

    def close(self) -> None:
        """Nothing to release: the run is the caller's."""
