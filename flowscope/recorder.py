"""From ended steps to records: finishes them, judges them, and hands records and alerts to sinks and callbacks."""

from __future__ import annotations

import platform
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowscope._version import __version__
from flowscope.arguments import AlertCallback
from flowscope.config import WatchConfig
from flowscope.detectors import Detector, DetectorSet, Finding
from flowscope.errors import StopTraining
from flowscope.faults import Faults
from flowscope.hooks.canary import Canary
from flowscope.instruments import METRICS
from flowscope.metrics import Metric
from flowscope.observation.snapshot import Snapshot
from flowscope.records import Alert, Event, FlowLayout, Record, RunHeader, split_key
from flowscope.sinks import ConsoleSink, JsonlSink, Sink
from flowscope.steps.ended import EndedStep
from flowscope.steps.losses import LossesSinceRecord

TOLD_AFTER = 10
"""After so many records a run says for the first time what silence covers."""


class Outlet:
    """The sinks of one scope, each under the name that its faults are reported by.

    Attributes:
        sinks: in the order they get events.
        closed: whether no more events go out.
    """

    def __init__(self, faults: Faults) -> None:
        self.sinks: list[tuple[str, Sink]] = []
        self.closed = False
        self._faults = faults
        self._told_unsampled = False

    def open(self, log_dir: str | Path | None, config: WatchConfig, *, quiet: bool) -> None:
        """Begin with the sinks of our own.

        Args:
            log_dir: folder for the files, None for none.
            config: says when images are written and what goes to the console.
            quiet: whether alerts have somewhere else to go.
        """
        if log_dir is not None:
            from flowscope.sinks.tensorboard import TensorBoardSink

            self.sinks.append(("sink JsonlSink", JsonlSink(log_dir)))
            try:
                self.sinks.append(("sink TensorBoardSink", TensorBoardSink(log_dir, config.images_every)))
            except OSError as error:  # it writes as it opens: a disk that fails then costs this sink alone
                self._faults.report("sink TensorBoardSink", error)
        console = config.console
        if console in ("alerts", "records") or (console == "auto" and not quiet):
            self.sinks.append(("sink ConsoleSink", ConsoleSink(records=console == "records")))

    def emit(self, event: Event) -> None:
        """Send an event to every sink that has not failed.

        What the canary alone saw goes to the sinks that keep a run whole (`takes_unsampled`), once between two sampled
        records: a run that is lost writes no line a step.
        """
        unsampled = isinstance(event, Record) and "unsampled" in event.flags
        if self.closed or (unsampled and self._told_unsampled):
            return
        self._told_unsampled = unsampled or (self._told_unsampled and not isinstance(event, Record))
        for part, sink in self.sinks:
            if not unsampled or getattr(sink, "takes_unsampled", False):
                self._faults.guard(part, sink.write, event)

    def close(self) -> None:
        """Close the sinks."""
        self.closed = True
        for part, sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                self._faults.report(part, error)


class Recorder:
    """The plain-number half of a scope: header, records, alerts, detectors, sinks and callbacks."""

    def __init__(
        self,
        config: WatchConfig,
        faults: Faults,
        callbacks: Sequence[AlertCallback],
        detectors: Sequence[Detector | type[Detector]] = (),
    ) -> None:
        self.faults, self.callbacks = faults, callbacks
        self.specs: dict[str, Metric] = dict(METRICS)
        self.records: deque[Record] = deque(maxlen=config.max_records)
        self.alerts: deque[Alert] = deque(maxlen=config.max_alerts)
        self.detectors = DetectorSet(config, further=detectors)
        self.detectors.faults = faults
        shown_by = self.detectors.shown_by
        extremes = {d.kind: d.extreme for d in self.detectors.detectors if d.extreme}
        told: dict[str, Any] = {"shown_by": shown_by, "extremes": extremes}
        self.header = RunHeader(__version__, (), {}, config.model_dump(mode="json"), _environment(), **told)
        self.outlet = Outlet(faults)
        self.stop: StopTraining | None = None
        self._losses = LossesSinceRecord()
        self._headed: set[str] = set()
        """The metrics that the header speaks of, by key."""

    def take(self, ended: EndedStep) -> None:
        """Make a record of an ended step and send it on; of an unsampled one only where its canary speaks."""
        losses = ended.loss.settle()
        self._losses.add(ended.loss)
        self._note_skip(ended)
        canary = _canary(ended, losses)
        if ended.snapshot is None:
            if not canary.any() or "skipped" in ended.flags:
                return
            record: Record | None = Record(ended.step, ended.loss.mean(), flags=("unsampled", *ended.flags))
        else:
            self.prepare(ended)
            self.preview(ended)
            record = ended.record
        if record is None:
            return
        record.flow_names = tuple(flow.name for flow in self.header.flows)
        record.metrics["canary"] = canary
        record.metric_labels = {**record.metric_labels, "canary": Canary.KINDS}
        judged = record
        if ended.snapshot is not None:
            if (since := self._losses.take()) is not None:
                record.metrics["step_losses"] = since
            # an alert that only one rank raises would stop that one alone
            judged = replace(record, metrics={**record.metrics}) if ended.unshared else record
            record.metrics |= ended.unshared
            self.records.append(record)
            ended.loss.shown_in(record)
        self.outlet.emit(record)
        self._judge(judged)

    def prepare(self, ended: EndedStep) -> None:
        """Make the record of a sampled step, unless it is made."""
        if ended.record is not None or ended.snapshot is None:
            return
        self._note_skip(ended)
        ended.record = record = self._sampled(ended, ended.snapshot)
        if record is not None and ended.note:
            record.notes = (*record.notes, ended.note)

    @staticmethod
    def preview(ended: EndedStep) -> None:
        """Give a record what may have come since it was made: flags, step number and loss, as far as they are here."""
        if (record := ended.record) is not None:
            record.flags, record.step = ended.flags, ended.step
            record.loss = ended.loss.mean()

    @staticmethod
    def _note_skip(ended: EndedStep) -> None:
        """A fused optimizer is called all the same where the GradScaler found inf; of several, others may step."""
        found, ended.found_inf = ended.found_inf, []
        if "skipped" not in ended.flags and any(float(value) > 0 for value in found):
            ended.flags = (*ended.flags, "skipped")

    def _sampled(self, ended: EndedStep, snapshot: Snapshot) -> Record | None:
        made = self.faults.guard("records", snapshot.record, ended.step)
        if made is None:
            return None
        record: Record = made[0]
        record.flags, record.specs = ended.flags, self.specs
        if "skipped" in ended.flags:
            record.metrics = {k: v for k, v in record.metrics.items() if not record.spec(k).of_gradient}
        if ended.scale is not None:
            _unscale(record, float(ended.scale))
            record.metrics["loss_scale"] = np.array([float(ended.scale)])
        gap = self.faults.guard("rank_gap", ended.rank_gap) if ended.rank_gap is not None else None
        if gap is not None:
            record.metrics["rank_gap"] = gap
            record.metric_labels = {**record.metric_labels, "rank_gap": record.metric_labels.get("param_norm", ())}
        self._update_header(made[1], record, made[2])
        return record

    def covered(self) -> RunHeader:
        """The header with the line on what silence covers by now."""
        line = self.faults.guard("coverage", self.detectors.covered, self.header)
        return replace(self.header, coverage=line or "")

    def tell_coverage(self) -> None:
        """Write the header again with that line."""
        if self.records and (told := self.covered()) != self.header:
            self.header = told
            self.outlet.emit(told)

    def _judge(self, record: Record) -> None:
        alerts = self.faults.guard("detectors", self.detectors.check, record, self.header) or []
        if alerts or self.detectors.coverage.records == TOLD_AFTER:
            self.tell_coverage()
        self._send(alerts)

    def tell(self, finding: Finding) -> None:
        """Send on what is known before there is any record; as nothing has ended, it belongs to the first step."""
        alerts = self.faults.guard("detectors", self.detectors.tell, finding, 0) or []
        if alerts and not self._headed:
            self.outlet.emit(self.header)
        self._send(alerts)

    def _send(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self.alerts.append(alert)
            self.outlet.emit(alert)
            for number, callback in enumerate(self.callbacks):
                try:
                    self.faults.guard(f"on_alert callback {number}", callback, alert)
                except StopTraining as stop:
                    # every alert of this record reaches every callback first; the scope raises it at the step's end
                    self.stop = self.stop or stop

    def _update_header(self, layouts: list[FlowLayout], record: Record, setup: dict[str, Any]) -> None:
        """Write the header again when a flow, the rows of a metric or what is known of the set-up changed."""
        flows = {flow.name: flow for flow in self.header.flows}
        flows.update({layout.name: layout for layout in layouts})
        labels = {**self.header.labels, **record.metric_labels, "canary": Canary.KINDS}
        same = labels == self.header.labels and tuple(flows.values()) == self.header.flows
        if same and not setup and record.metrics.keys() <= self._headed:
            return
        self._headed |= record.metrics.keys()
        names = {split_key(key)[0] for key in (*labels, *record.metrics)} | {*self.header.metrics, "step_losses"}
        metrics = {name: metric for name, metric in self.specs.items() if name in names}
        setup = {**self.header.setup, **setup}
        told = replace(self.header, flows=tuple(flows.values()), labels=labels, metrics=metrics, setup=setup)
        if told == self.header:
            return
        self.header = told
        self.outlet.emit(self.header)

    def raise_stop(self) -> None:
        """Raise the `StopTraining` that an `on_alert` callable asked for."""
        stop, self.stop = self.stop, None
        if stop is not None:
            raise stop


def _canary(ended: EndedStep, losses: list[float]) -> NDArray[np.float64]:
    canary = np.zeros(len(Canary.KINDS))
    for part in ended.canary.read():
        canary += part[:, 0]
    canary[Canary.KINDS.index("loss")] += sum(not np.isfinite(value) for value in losses)
    return canary


def _unscale(record: Record, scale: float) -> None:
    """Activation gradients arrive multiplied by the loss scale; ratios need no correction."""
    for key in record.metrics:
        if record.spec(key).times_loss_scale:
            record.metrics[key] = record.metrics[key] / scale


def _environment() -> dict[str, str]:
    return {
        "flowscope": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
    }
