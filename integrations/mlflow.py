"""MLflow as a sink.

with mlflow.start_run():
    scope = flowscope.watch(model, optimizer, sinks=[MlflowSink()])

Metrics: `flowscope/loss`, `flowscope/gradient_product/min` and so on (`flowscope.sinks.reduction`), at the optimizer
step. Alerts: the artifact `flowscope/alerts.txt` and the tag `flowscope.alerts`, which names what stands.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Event, Record
from flowscope.sinks.reduction import StandingAlerts, listed, record_scalars

try:
    import mlflow
    from mlflow.entities import Metric
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.mlflow needs MLflow, which is not installed: pip install "flowscope[mlflow]".'
    ) from error

MOST = 1000
"""Batches whose end `close` waits for, the newest: several threads of MLflow send them, in any order."""


class MlflowSink:
    """Logs records and alerts to a run; never ends it.

    Args:
        run_id: the run; None takes the active one.
        tracking_uri: where it is; None takes the current one.
        metrics: names of the metrics to log; None: those that are meant for loggers (`Metric.logged`).
        prefix: of all names.
        synchronous: False sends records from MLflow's own thread, and `close` waits.

    Attributes:
        waits_for_server: whether `watch` writes from a thread of its own, so that no step waits for a far-away server.

    Raises:
        FlowscopeError: there is no run.
    """

    def __init__(
        self,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        metrics: Iterable[str] | None = None,
        prefix: str = "flowscope",
        *,
        synchronous: bool = True,
    ) -> None:
        if run_id is None:
            if (active := mlflow.active_run()) is None:
                raise FlowscopeError(
                    "MlflowSink(): there is no active run; call mlflow.start_run() first, or pass run_id=."
                )
            run_id = active.info.run_id
        self._run_id = run_id
        self.waits_for_server = synchronous and (tracking_uri or mlflow.get_tracking_uri()).startswith("http")
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._metrics, self._prefix, self._synchronous = listed(metrics), prefix, synchronous
        self._standing = StandingAlerts()
        self._lines: list[str] = []
        self._under_way: deque[Any] = deque(maxlen=MOST)

    def write(self, event: Event) -> None:
        """Log a record or an alert; raises what the store raises."""
        if isinstance(event, Record):
            now = int(time.time() * 1000)
            numbers = {**record_scalars(event, self._metrics), "alerts_standing": float(len(self._standing))}
            batch = [Metric(f"{self._prefix}/{name}", value, now, event.step) for name, value in numbers.items()]
            sent = self._client.log_batch(self._run_id, metrics=batch, synchronous=self._synchronous)
            if sent is not None:
                self._under_way.append(sent)
        elif isinstance(event, Alert):
            self._standing.take(event)
            self._lines.append(str(event))
            self._client.log_text(self._run_id, "\n".join(self._lines) + "\n", f"{self._prefix}/alerts.txt")
            kinds = sorted({kind for kind, _ in self._standing.counts()})
            self._client.set_tag(self._run_id, f"{self._prefix}.alerts", ", ".join(kinds) or "none")

    def close(self) -> None:
        """Wait for what is under way."""
        while self._under_way:
            self._under_way.popleft().wait()
