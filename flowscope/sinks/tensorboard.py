"""TensorBoard event files: a tensor per metric and record for the flowscope tab, and enough for plain TensorBoard.

Tags (FLOW is a flow's name; METRIC@FLOW only for flows after the first, as in `Record.metrics`):

    flowscope/METRIC, flowscope/METRIC@FLOW   plugin flowscope: the whole profile; NaN is "not seen"
    flowscope/header                          plugin flowscope: [1] JSON of the RunHeader, once a layout
    flowscope/alerts                          plugin flowscope: [n] JSON of all alerts of the step so far
    flow/loss, flow/FLOW/METRIC/{min,median,max}, parameters/update_ratio/{min,median,max}   scalars
    depth/FLOW/gradient_product, depth/FLOW/cosine_matrix                                    images
    alerts                                    text: the latest alerts as a table
    custom_scalars__config__                  the layout of the dashboard Custom Scalars

`flowscope/header` and the layout stand at step 0. An event of `flowscope/alerts` replaces an earlier one of its step.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from flowscope.metrics import Metric, described
from flowscope.records import Alert, Event, Record, RunHeader, split_key
from flowscope.sinks import images, protobufs
from flowscope.sinks.append_file import AppendFile
from flowscope.sinks.binning import extent, log10
from flowscope.sinks.reduction import spread

LEAST = 1e-30
HISTORY = 128
TABLE_ROWS = 30
FIRST, BEGINNING = 10, "flowscope_beginning/"
"""So many records also stand under tags of their own, which begin so."""

_files = itertools.count()


class TensorBoardSink:
    """Writes an event file that `tensorboard --logdir` shows, with or without the flowscope plugin.

    Each event goes to the file at once, in one piece and in the calling thread (tensorboard's `EventFileWriter` writes
    from a thread of its own, where a full disk shows up late and as a traceback on stderr).

    Args:
        log_dir: the folder of the run, created where it is missing.
        images_every: each n-th record also writes images; 0 never.

    Raises:
        FlowscopeError: the folder cannot be written.
    """

    keeps_trying = True

    def __init__(self, log_dir: str | os.PathLike[str], images_every: int = 10) -> None:
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self._file = AppendFile(log_dir, f"events.out.tfevents.{unique}.flowscope")
        self._writer = RecordWriter(self._file)
        self.path = self._file.path
        self._images_every = images_every
        self._image_due: dict[str, int] = {}
        self._header: RunHeader | None = None
        self._layout_due = True
        self._tags_seen: set[str] = set()
        self._count = 0
        self._history: dict[str, deque[tuple[int, NDArray[np.float64]]]] = {}
        self._alerts: deque[Alert] = deque(maxlen=TABLE_ROWS)
        self._alerts_of_step: list[Alert] = []
        self._begin()

    def _begin(self) -> None:
        self._write_proto(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event: Event) -> None:
        """Write the event.

        Raises:
            OSError: it did not fit (it is written with a later event) or the sink is closed; what was written before
                stays readable.
        """
        if self._file.renew():
            self._begin()
            if self._header is not None:
                self._write_header(self._header)
        if isinstance(event, RunHeader):
            self._write_header(event)
        elif isinstance(event, Record):
            self._write_record(event)
        else:
            self._write_alert(event)

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        self._file.close()

    def _write_header(self, header: RunHeader) -> None:
        self._header = header
        self._layout_due = True
        self._tags_seen.clear()
        self._history.clear()
        self._image_due.clear()
        self._add([protobufs.strings("flowscope/header", [json.dumps(header.to_json(), default=str)], {})], 0)

    def _write_record(self, record: Record) -> None:
        drawn = {key: array for key, array in record.metrics.items() if array.size and record.spec(key).drawn}
        # TensorBoard keeps a sample of a long run in memory: its beginning stays under a name of its own
        places = ("flowscope/", BEGINNING) if self._count < FIRST else ("flowscope/",)
        values = [
            protobufs.profile(f"{place}{key}", array, self._content(key, record))
            for place in places
            for key, array in drawn.items()
        ]
        values += self._scalars(record)
        if self._layout_due:
            # only now is it known which charts have something to show
            self._add([protobufs.layout(self._charts(record))], 0)
            self._layout_due = False
        values += self._images(record)
        self._count += 1
        self._add(values, record.step)

    def _write_alert(self, alert: Alert) -> None:
        # one of TensorBoard's loaders keeps a single event per tag and step, so an event repeats the step's alerts
        if self._alerts_of_step and self._alerts_of_step[0].step != alert.step:
            self._alerts_of_step.clear()
        self._alerts_of_step.append(alert)
        self._alerts.append(alert)
        texts = [json.dumps(a.to_json(), default=str) for a in self._alerts_of_step]
        self._add(
            [protobufs.strings("flowscope/alerts", texts, {}), protobufs.text("alerts", alert_table(self._alerts))],
            alert.step,
        )

    def _content(self, key: str, record: Record) -> dict[str, Any]:
        metric, flow = split_key(key)
        labels = self._header.labels if self._header else record.metric_labels
        return {"metric": metric, "flow": flow, "labels": list(labels.get(key, ()))}

    def _first_flow(self, record: Record) -> str:
        names = record.flow_names or [flow.name for flow in (self._header.flows if self._header else ())]
        return names[0] if names else "network"

    def _place(self, key: str, record: Record) -> tuple[str, Metric] | None:
        """Where the scalars of a metric stand: (prefix of the tags, metric); None for metrics without scalars."""
        spec, flow = record.spec(key), split_key(key)[1]
        if spec.charted is None:
            return None
        return (f"flow/{flow or self._first_flow(record)}" if spec.per_flow else spec.rows), spec

    def _scalars(self, record: Record) -> Iterator[Any]:
        if record.loss is not None:
            yield protobufs.scalar("flow/loss", record.loss)
        for key, array in record.metrics.items():
            if place := self._place(key, record):
                prefix, spec = place
                yield from _spread(f"{prefix}/{spec.name}", array)
                if spec.charted == "log":
                    yield from _spread(f"{prefix}/log10_{spec.name}", np.log10(np.maximum(array, LEAST)))

    def _charts(self, record: Record) -> dict[str, dict[str, list[str]]]:
        charts: dict[str, dict[str, list[str]]] = {} if record.loss is None else {"loss": {"loss": ["flow/loss"]}}
        keys = {**record.metrics, **(self._header.labels if self._header else {})}
        places = [place for key in keys if (place := self._place(key, record))]
        order = list(described(record.specs))
        for prefix, spec in sorted(places, key=lambda place: order.index(place[1].name)):
            metric = f"log10_{spec.name}" if spec.charted == "log" else spec.name
            title = f"{metric}: median, band from min to max"
            tags = [f"{prefix}/{metric}/{name}" for name in ("median", "min", "max")]
            charts.setdefault(prefix, {})[title] = tags
        return charts

    def _images(self, record: Record) -> Iterator[Any]:
        if not self._images_every:
            return
        for key, array in record.metrics.items():
            metric, flow = split_key(key)
            if metric == "gradient_product" and array.ndim == 1 and array.size:
                history = self._history.setdefault(key, deque(maxlen=HISTORY))
                if history and history[-1][1].shape != array.shape:
                    history.clear()
                history.append((record.step, array))
            elif metric != "cosine_matrix" or array.ndim != 2 or not array.size:
                continue
            # slow metrics are not in every record: they are drawn in the first that is due and has them
            if self._count < self._image_due.get(key, 0):
                continue
            self._image_due[key] = self._count + self._images_every
            name = flow or self._first_flow(record)
            labels = self._content(key, record)["labels"]
            if metric == "gradient_product":
                png = gradient_image(name, labels, list(self._history[key]))
                words = "norm dL/dx_l over norm dL/dx_L, depth by step; dark at the top: no gradient at the input"
            else:
                png = cosine_image(name, labels, array, record.step)
                words = "cosine of each pair of depths; bright off the diagonal: the blocks between change nothing"
            yield protobufs.image(f"depth/{name}/{metric}", png, words)

    def _add(self, values: list[Any], step: int) -> None:
        fresh = set()
        for value in values:
            # TensorBoard reads the metadata of a tag once a file; with the labels inside they are not small
            if value.tag in self._tags_seen:
                value.ClearField("metadata")
            fresh.add(value.tag)
        self._write_proto(
            event_pb2.Event(wall_time=time.time(), step=int(step), summary=summary_pb2.Summary(value=values))
        )
        self._tags_seen |= fresh

    def _write_proto(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


def _spread(tag: str, values: NDArray[np.float64]) -> Iterator[Any]:
    """The least, the middle and the largest value over depth; none where nothing was seen."""
    for name, number in spread(values).items():
        yield protobufs.scalar(f"{tag}/{name}", number)


def gradient_image(flow: str, labels: list[str], history: list[tuple[int, NDArray[np.float64]]]) -> bytes:
    """The gradient product over depth (downwards, input at the top) and recent records (to the right), as PNG."""
    values = log10(np.stack([profile for _, profile in history], axis=1))
    low, high = extent(values, (-1.0, 0.0))
    # at least two decades, so that noise does not look like a slope
    limits = (min(np.floor(low), np.ceil(high) - 2), float(np.ceil(high)))
    first, last = history[0][0], history[-1][0]
    return images.heat_map(
        values,
        f"gradient product of {flow}, steps {first} to {last}",
        images.Axis("depth, input at the top", _row_names(flow, labels, values.shape[0])),
        images.Axis("step", [str(step) for step, _ in history]),
        unit="|dL/dx_l| / |dL/dx_L|",
        log=True,
        limits=limits,
    )


def cosine_image(flow: str, labels: list[str], matrix: NDArray[np.float64], step: int) -> bytes:
    """The cosine of each pair of depths as PNG."""
    lowest, _ = extent(matrix)
    return images.heat_map(
        matrix,
        f"cosine between depths of {flow}, step {step}",
        images.Axis("depth, input at the top", _row_names(flow, labels, matrix.shape[0])),
        images.Axis("row number, input on the left", [str(i) for i in range(matrix.shape[0])]),
        unit="cosine",
        log=False,
        limits=(0.0 if lowest >= 0 else -1.0, 1.0),
    )


def _row_names(flow: str, labels: list[str], count: int) -> list[str]:
    # the title names the flow; what is left tells the rows apart
    return [labels[i].removeprefix(f"{flow}.") if i < len(labels) else str(i) for i in range(count)]


def alert_table(alerts: deque[Alert]) -> str:
    """The latest alerts as a Markdown table, newest first."""
    # TensorBoard gives every column the width its text asks for: short columns would be broken letter by letter
    rows = ["| alert | message | advice |", "|---|---|---|"]
    for alert in reversed(alerts):
        state = "resolved" if alert.state == "resolved" else alert.severity
        place = f" at `{alert.where}`" if alert.where else ""
        cells = (f"step {alert.step}, {state}: **{alert.kind}**{place}", alert.message, alert.advice)
        rows.append("| " + " | ".join(_cell(str(cell)) for cell in cells) + " |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
