"""Weights & Biases as a sink.

run = wandb.init(project="p")
scope = flowscope.watch(model, optimizer, sinks=[WandbSink(run)])

Rows: `flowscope/loss`, `flowscope/gradient_product/min` and so on (`flowscope.sinks.reduction`), with
`flowscope/step` (the optimizer step) as their x axis. Alerts go to `run.alert` at once and to the table
`flowscope/alerts` at the end. Close the scope before `run.finish()`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Event, Record
from flowscope.sinks.reduction import StandingAlerts, listed, record_scalars

try:
    import wandb
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.wandb needs wandb, which is not installed: pip install "flowscope[wandb]".'
    ) from error

LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
COLUMNS = ["step", "state", "severity", "kind", "where", "message", "advice"]


class WandbSink:
    """Logs records and alerts to a run; never ends it.

    A row stands at the run's own step `max(optimizer step, run.step)`: Weights & Biases drops rows behind the run's
    step, and a record may come a step late. So the curves of a loop that logs with `step=` count on unharmed where its
    steps are optimizer steps; where they are epochs, log them with `run.define_metric` instead of `step=`.

    Args:
        run: what `wandb.init` returned; None takes the current run.
        metrics: names of the metrics to log; None: those that are meant for loggers (`Metric.logged`).
        prefix: of all names.
        notify: severities that are also sent as `run.alert` (mail, Slack).

    Raises:
        FlowscopeError: there is no run.
    """

    def __init__(
        self,
        run: Any = None,
        metrics: Iterable[str] | None = None,
        prefix: str = "flowscope",
        notify: Iterable[str] = ("warning", "error"),
    ) -> None:
        self._run: Any = wandb.run if run is None else run
        if self._run is None:
            raise FlowscopeError(
                "WandbSink(): there is no run; call wandb.init(...) first, or pass the run it returned."
            )
        self._metrics, self._prefix, self._notify = listed(metrics), prefix, frozenset(notify)
        self._standing = StandingAlerts()
        self._rows: list[list[Any]] = []
        self._last_step = -1
        self._run.define_metric(f"{prefix}/step", hidden=True)
        self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def write(self, event: Event) -> None:
        """Log a record or an alert."""
        if isinstance(event, Record):
            row = {**record_scalars(event, self._metrics), "alerts/standing": len(self._standing)}
            self._log(row, event.step)
        elif isinstance(event, Alert):
            self._standing.take(event)
            self._rows.append([getattr(event, name) for name in COLUMNS])
            if event.state == "raised" and event.severity in self._notify:
                # less than 64 characters; 1 s, since 0 means a minute: flowscope's own hysteresis limits how often
                title = f"flowscope: {event.kind}"[:63]
                self._run.alert(title, str(event), level=LEVELS[event.severity], wait_duration=1)

    def close(self) -> None:
        """Log the table of the alerts, once."""
        rows, self._rows = self._rows, []
        if rows:
            self._log({"alerts": wandb.Table(columns=list(COLUMNS), data=rows)}, rows[-1][0])

    def _log(self, row: dict[str, Any], step: int) -> None:
        at = max(step, self._run.step)
        # two rows at one step would be merged: the later replaces the earlier
        self._last_step = at = at + (at == self._last_step)
        named = {f"{self._prefix}/{name}": value for name, value in row.items()}
        self._run.log({**named, f"{self._prefix}/step": step}, step=at)
