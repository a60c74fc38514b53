"""From ended steps to records: finishes them, judges them, and hands records and alerts to sinks and callbacks."""

from __future__ import annotations

import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from flowscope.faults import LOGGER, Faults
from flowscope.hooks.canary import Canary
from flowscope.instruments import METRICS
from flowscope.metrics import Metric
from flowscope.records import Alert, Event, FlowLayout, Record, RunHeader, split_key
from flowscope.sinks import ConsoleSink, JsonlSink, Sink, folders
from flowscope.steps.ended import EndedStep
from flowscope.steps.losses import LossesSinceRecord, StepLoss

TOLD_AFTER = 10
"""After so many records a run says for the first time what silence covers."""
UNREAD = "a fault of flowscope: the numbers of this step could not be read"


class Outlet:
    """The sinks of one scope, each under the name that its faults are reported by.

    Attributes:
        sinks: in the order they get events.
        closed: whether no more events go out.
        forked: whether this is a forked child, which has written nothing yet.
        continues: whether the run in the folder goes on here: its state was loaded, or a trainer resumes it.
        folder: where the files are, None where none are written.
    """

    def __init__(self, faults: Faults) -> None:
        self.sinks: list[tuple[str, Sink]] = []
        self.closed = self.forked = self.continues = False
        self.folder: Path | None = None
        self._faults = faults
        self._told_unsampled = False
        self._files: Callable[[Path], list[tuple[str, Sink]]] = lambda folder: []
        """Opens the files of this run."""
        self._held = False
        """Whether the folder holds a run, and nothing has told yet if it is this one."""
        self._header: RunHeader | None = None

    def open(self, log_dir: str | Path | None, config: WatchConfig, *, quiet: bool) -> None:
        """Begin with the sinks of our own.

        Args:
            log_dir: folder for the files, None for none.
            config: says when images are written and what goes to the console.
            quiet: whether alerts have somewhere else to go.
        """
        if log_dir is not None:
            self.folder, self._files = Path(log_dir), partial(self._opened, config.images_every)
            self._held = folders.holds_run(self.folder)
            if self._held:
                JsonlSink(self.folder).close()  # refused here or not at all
            else:
                self.sinks += self._files(self.folder)
                folders.begin(self.folder)
        console = config.console
        if console in ("alerts", "records") or (console == "auto" and not quiet):
            self.sinks.append(("sink ConsoleSink", ConsoleSink(records=console == "records")))

    def _opened(self, images_every: int, folder: Path) -> list[tuple[str, Sink]]:
        from flowscope.sinks.tensorboard import TensorBoardSink

        opened: list[tuple[str, Sink]] = [("sink JsonlSink", JsonlSink(folder))]
        try:
            opened.append(("sink TensorBoardSink", TensorBoardSink(folder, images_every)))
        except OSError as error:  # it writes as it opens: a disk that fails then costs this sink alone
            self._faults.report("sink TensorBoardSink", error)
        return opened

    def emit(self, event: Event) -> None:
        """Send an event to every sink that has not failed.

        What the canary alone saw goes to the sinks that keep a run whole (`takes_unsampled`), once between two sampled
        records: a run that is lost writes no line a step.
        """
        unsampled = isinstance(event, Record) and "unsampled" in event.flags
        if self.closed or (unsampled and self._told_unsampled):
            return
        if self.forked:
            self._faults.guard("files of a forked process", self._move)
        if self._held and not isinstance(event, RunHeader):
            self._faults.guard("files", self._settle, event.step)
        if isinstance(event, RunHeader):
            self._header = event
        self._told_unsampled = unsampled or (self._told_unsampled and not isinstance(event, Record))
        for fuse, sink in self.sinks:
            if not unsampled or getattr(sink, "takes_unsampled", False):
                tries = self._faults.attempt if getattr(sink, "keeps_trying", False) else self._faults.guard
                tries(fuse, sink.write, event)

    def _settle(self, step: int) -> None:
        """The first event tells whether the run in the folder goes on here; else it is left alone."""
        self._held = False
        if self.folder is None:
            return
        if not (self.continues or step > 0) and folders.holds_run(self.folder):
            taken, self.folder = self.folder, folders.sibling(self.folder)
            LOGGER.warning("flowscope: %s holds another run; this one is written to %s.", taken, self.folder)
        folders.begin(self.folder)
        self._begin(self._files(self.folder))

    def _move(self) -> None:
        """A forked child that trains on is a run of its own: the parent's file has its own steps."""
        self.forked = self._held = False
        ours = self._files(self.folder / f"fork-{os.getpid()}") if self.folder is not None else []
        names = {fuse for fuse, _ in ours}
        for fuse, sink in self.sinks:
            if fuse in names:
                sink.close()
        self.sinks = [(fuse, sink) for fuse, sink in self.sinks if fuse not in names]
        self._begin(ours)

    def _begin(self, ours: list[tuple[str, Sink]]) -> None:
        """Write to these files too, before all else, with the header first."""
        self.sinks = [*ours, *self.sinks]
        if self._header is not None:
            for fuse, sink in ours:
                self._faults.attempt(fuse, sink.write, self._header)

    def close(self) -> None:
        """Close the sinks."""
        self.closed = True
        if self.folder is not None and not self._held:
            folders.end(self.folder)
        for fuse, sink in self.sinks:
            self._faults.attempt(fuse, sink.close)


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
        self.detectors = DetectorSet(config, further=detectors, faults=faults)
        shown_by = self.detectors.shown_by
        extremes = {d.kind: d.extreme for d in self.detectors.detectors if d.extreme}
        behind = {entry: said for d in self.detectors.detectors for entry, said in d.behind.items()}
        told: dict[str, Any] = {"shown_by": shown_by, "extremes": extremes, "behind": behind}
        self.cost: Callable[[], Mapping[str, Any]] = dict
        """What it costs (`RunHeader.cost`)."""
        self.header = RunHeader(__version__, (), {}, config.model_dump(mode="json"), _environment(), **told)
        self.outlet = Outlet(faults)
        self.stop: StopTraining | None = None
        self._losses = LossesSinceRecord()
        self._headed: set[str] = set()
        """The metrics that the header speaks of, by key."""

    def take(self, ended: EndedStep) -> None:
        """Make a record of an ended step and send it on; of an unsampled one only where its canary speaks.

        What fails on the way is left out, and the record goes on without it.
        """
        attempt = self.faults.attempt
        losses = attempt("losses", ended.loss.settle, otherwise=[])
        together = "dropped" not in ended.flags
        if together:
            attempt("losses", self._losses.add, ended.loss)
        attempt("skipped steps", self._note_skip, ended)
        canary = attempt("canary", _canary, ended, losses, otherwise=np.zeros(len(Canary.KINDS)))
        if ended.sampled:
            self.prepare(ended)
            attempt("records", self.preview, ended)
        elif canary.any() and "skipped" not in ended.flags:
            ended.record = Record(ended.step, ended.loss.mean(), flags=("unsampled", *ended.flags))
        if (record := ended.record) is None:
            return
        record.flow_names = tuple(flow.name for flow in self.header.flows)
        record.metrics["canary"] = canary
        record.metric_labels = {**record.metric_labels, "canary": Canary.KINDS}
        judged = record
        if ended.sampled:
            if (since := attempt("losses", self._losses.take)) is not None:
                record.metrics["step_losses"] = since
            # an alert that only one rank raises would stop that one alone
            judged = replace(record, metrics={**record.metrics}) if ended.unshared else record
            record.metrics |= ended.unshared
            self.records.append(record)
            attempt("losses", ended.loss.shown_in, record)
        attempt("sinks", self.outlet.emit, record)
        if together:  # else what each rank judges would be another thing
            attempt("detectors", self._judge, judged)

    @property
    def recent_losses(self) -> Sequence[float]:
        """The last losses that records have shown."""
        return self._losses.recent

    def pass_by(self, loss: StepLoss) -> None:
        """A step has ended of which nothing but its loss is told."""
        self._losses.add(loss)

    def missed(self, ended: EndedStep) -> None:
        """Of a step whose record could not be made: one without numbers, so that nothing ends in silence."""
        if ended.sampled and (not self.records or self.records[-1].step != ended.loss.step):
            self.records.append(Record(ended.loss.step, flags=ended.flags, notes=(UNREAD,)))
            self.faults.attempt("sinks", self.outlet.emit, self.records[-1])

    def prepare(self, ended: EndedStep) -> None:
        """Make the record of a sampled step, unless it is made."""
        if ended.record is not None or not ended.sampled:
            return
        self.faults.attempt("skipped steps", self._note_skip, ended)
        made = None if ended.snapshot is None else self.faults.attempt("records", ended.snapshot.record, ended.step)
        record, layouts, setup = made or (Record(ended.step, notes=(UNREAD,)), [], {})
        record.flags, record.specs, ended.record = ended.flags, self.specs, record
        self.faults.attempt("loss scale", _scaled, record, ended.scale)
        if ended.rank_gap is not None:
            record.metrics["rank_gap"] = ended.rank_gap
            record.metric_labels = {**record.metric_labels, "rank_gap": record.metric_labels.get("param_norm", ())}
        self.faults.attempt("header", self._update_header, layouts, record, setup)
        if ended.note:
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

    def covered(self) -> RunHeader:
        """The header with the line on what silence covers by now."""
        line = self.faults.attempt("coverage", self.detectors.covered, self.header)
        return replace(self.header, coverage=line or "", cost=self.faults.attempt("cost", self.cost) or {})

    def tell_coverage(self) -> None:
        """Write the header again with that line."""
        if self.records and (told := self.covered()) != self.header:
            self.header = told
            self.outlet.emit(told)

    def tell_cost(self) -> None:
        """Write the header again with what it costs by now."""
        if self.records:
            self.header = self.covered()
            self.outlet.emit(self.header)

    def _judge(self, record: Record) -> None:
        alerts = self.faults.attempt("detectors", self.detectors.check, record, self.header) or []
        if alerts or self.detectors.coverage.records == TOLD_AFTER:
            self.faults.attempt("coverage", self.tell_coverage)
        self._send(alerts)

    def tell(self, finding: Finding) -> None:
        """Send on what is known before there is any record; as nothing has ended, it belongs to the first step."""
        alerts = self.faults.attempt("detectors", self.detectors.tell, finding, 0) or []
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
    for counts in ended.canary.read() if ended.canary is not None else ():
        canary += counts[:, 0]
    canary[Canary.KINDS.index("loss")] += sum(not np.isfinite(value) for value in losses)
    return canary


def _scaled(record: Record, scale: Any) -> None:
    """Of a step that the GradScaler skipped the gradient is no gradient; of others it was multiplied by the scale."""
    if "skipped" in record.flags:
        record.metrics = {k: v for k, v in record.metrics.items() if not record.spec(k).of_gradient}
    if scale is not None:
        _unscale(record, float(scale))
        record.metrics["loss_scale"] = np.array([float(scale)])


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
