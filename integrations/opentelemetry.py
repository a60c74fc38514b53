"""OpenTelemetry metrics as a sink, for what your exporter sends to a collector (OTLP, Prometheus, ...).

sink = OpenTelemetrySink(attributes={"run": "a"})      # the meter provider that your program has set up
scope = flowscope.watch(model, optimizer, sinks=[sink])

    flowscope.step, flowscope.loss          of the latest record
    flowscope.gradient_product              attributes flow ("": the first) and stat (min, median, max)
    flowscope.alerts                        attributes kind and severity: how many stand; 0 after they are resolved
    flowscope.running                       1; 0 once the scope is closed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Event, Record, split_key
from flowscope.sinks.reduction import StandingAlerts, is_logged, listed, spread

try:
    from opentelemetry import metrics as otel
except ImportError as error:
    raise FlowscopeError(
        "flowscope.integrations.opentelemetry needs opentelemetry-api, which is not installed: "
        'pip install "flowscope[opentelemetry]".'
    ) from error


class OpenTelemetrySink:
    """Sets gauges of a meter to the latest record and the standing alerts; the provider's reader sends them.

    Args:
        provider: a `MeterProvider`; None takes the program's own (`opentelemetry.metrics.get_meter_provider()`), which
            does nothing where none was set up.
        attributes: on every gauge, to tell runs apart.
        metrics: names of the metrics to export; None: those that are meant for loggers (`Metric.logged`).
    """

    def __init__(
        self,
        provider: Any = None,
        attributes: Mapping[str, str] | None = None,
        metrics: Iterable[str] | None = None,
    ) -> None:
        self._meter = (otel.get_meter_provider() if provider is None else provider).get_meter("flowscope")
        self._attributes, self._metrics = dict(attributes or {}), listed(metrics)
        self._gauges: dict[str, Any] = {}
        self._standing = StandingAlerts()
        self._kinds: set[tuple[str, str]] = set()
        self._closed = False
        self._set("running", 1.0, "1 while the scope is open")

    def write(self, event: Event) -> None:
        """Set the gauges."""
        if self._closed:
            return
        if isinstance(event, Record):
            self._write_record(event)
        elif isinstance(event, Alert):
            self._standing.take(event)
            counts = self._standing.counts()
            self._kinds |= set(counts)
            for kind, severity in self._kinds:
                self._set("alerts", counts[kind, severity], "alerts that stand", kind=kind, severity=severity)

    def close(self) -> None:
        """Say that the run is over; the provider is the program's, and stays open."""
        if not self._closed:
            self._closed = True
            self._set("running", 0.0)

    def _write_record(self, record: Record) -> None:
        self._set("step", record.step, "optimizer step of the latest record")
        if record.loss is not None:
            self._set("loss", record.loss, "loss of the latest record")
        for key, array in record.metrics.items():
            metric, flow = split_key(key)
            if is_logged(key, record, self._metrics):
                for stat, value in spread(array).items():
                    self._set(metric, value, record.spec(key).says, flow=flow or "", stat=stat)

    def _set(self, name: str, value: float, words: str = "", **attributes: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(f"flowscope.{name}", description=words)
        self._gauges[name].set(value, {**self._attributes, **attributes})
