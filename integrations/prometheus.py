"""Prometheus as a sink, for long jobs: a text file for node_exporter's textfile collector, or a registry of yours.

sink = PrometheusSink("/var/lib/node_exporter/train.prom", labels={"run": "a"})
scope = flowscope.watch(model, optimizer, sinks=[sink])

    flowscope_step, flowscope_loss, flowscope_record_timestamp_seconds     of the latest record
    flowscope_gradient_product{flow="",stat="min"} ...                     flowscope.sinks.reduction; flow "": the first
    flowscope_alerts{kind="vanishing_gradient",severity="error"}           how many stand; 0 after they are resolved
    flowscope_running                                                      1; 0 once the scope is closed
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Event, Record, split_key
from flowscope.sinks.reduction import StandingAlerts, is_logged, listed, spread

try:
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
except ImportError as error:
    raise FlowscopeError(
        "flowscope.integrations.prometheus needs prometheus-client, which is not installed: "
        'pip install "flowscope[prometheus]".'
    ) from error


class PrometheusSink:
    """Keeps gauges at the latest record and the standing alerts.

    Args:
        path: a file that ends in .prom, replaced as a whole at each event; its folder must exist. None writes none.
        registry: where the gauges are registered until `close`, for example `prometheus_client.REGISTRY` with
            `prometheus_client.start_http_server(port)`; None makes one.
        labels: on every gauge, to tell runs apart.
        metrics: names of the metrics to export; None: those that are meant for loggers (`Metric.logged`).

    Raises:
        FlowscopeError: the path is no .prom file in an existing folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
        metrics: Iterable[str] | None = None,
    ) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None and (self._path.suffix != ".prom" or not self._path.parent.is_dir()):
            raise FlowscopeError(
                f"PrometheusSink(path): got {os.fspath(self._path)!r}, expected a file that ends in .prom (the "
                "textfile collector reads no other) in a folder that exists."
            )
        self._registry = CollectorRegistry() if registry is None else registry
        self._labels, self._metrics = dict(labels or {}), listed(metrics)
        self._gauges: dict[str, Gauge] = {}
        self._standing = StandingAlerts()
        self._kinds: set[tuple[str, str]] = set()
        self._closed = False
        self._set("running", 1.0, "1 while the scope is open")

    def write(self, event: Event) -> None:
        """Set the gauges and replace the file."""
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
        self._write_file()

    def close(self) -> None:
        """Write the file a last time and take the gauges out of the registry; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._set("running", 0.0, "")
        try:
            self._write_file()
        finally:
            for gauge in self._gauges.values():
                self._registry.unregister(gauge)

    def _write_record(self, record: Record) -> None:
        self._set("step", record.step, "optimizer step of the latest record")
        self._set("record_timestamp_seconds", time.time(), "when the latest record was written")
        if record.loss is not None:
            self._set("loss", record.loss, "loss of the latest record")
        for key, array in record.metrics.items():
            metric, flow = split_key(key)
            if is_logged(key, record, self._metrics):
                for stat, value in spread(array).items():
                    self._set(metric, value, record.spec(key).says or metric, flow=flow or "", stat=stat)

    def _set(self, name: str, value: float, words: str, **labels: str) -> None:
        labels |= self._labels
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"flowscope_{name}", words, sorted(labels), registry=self._registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def _write_file(self) -> None:
        if self._path is not None:
            write_to_textfile(os.fspath(self._path), self._registry)
