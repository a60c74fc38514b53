"""Reads flowscope's tensors through TensorBoard's data provider (`flowscope/sinks/tensorboard.py` writes them)."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard import errors, plugin_util
from tensorboard.data.provider import RunTagFilter

from flowscope.metrics import spec_of
from flowscope.records import Alert, RunHeader, split_key
from flowscope.views.overview import RunView
from flowscope.views.series import COLUMNS, Series, make_series

PLUGIN_NAME = "flowscope"
PREFIX = "flowscope/"
HEADER, ALERTS = "flowscope/header", "flowscope/alerts"
LOSS = "flow/loss"
READS_VERSION = 1
RECORDS = 2000
READ_BYTES = 64 * 2**20
CACHE_BYTES = 256 * 2**20
MANY = 10**6

Environ = dict[str, Any]
Names = list[str] | None


class UnreadableError(Exception):
    """What was asked for is not there or cannot be read; the text says what to do."""


class TensorReader:
    """Runs and series of a log folder.

    Args:
        provider: TensorBoard's data provider.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._cache: OrderedDict[tuple[Any, ...], Series] = OrderedDict()
        self._lock = threading.Lock()

    def runs(self, environ: Environ) -> list[RunView]:
        """All runs that have data of this plugin, by name."""
        tags = self._tags(environ)
        known = {tag for of_run in tags.values() for tag in of_run}
        products = sorted(tag for tag in known if split_key(tag.removeprefix(PREFIX))[0] == "gradient_product")
        points: dict[str, dict[str, Any]] = {name: {} for name in tags}
        for wanted, count in (([HEADER], 100), ([ALERTS], RECORDS), (products, 1)):
            found = self._read(environ, list(tags), wanted, count) if wanted else {}
            for name, of_run in found.items():
                points[name] |= of_run
        losses = self._losses(environ, list(tags))
        return [_run_view(name, tags[name], points[name], losses.get(name, [])) for name in sorted(tags)]

    def series(self, environ: Environ, run: str, key: str) -> tuple[Series, list[Alert]]:
        """The series of a key, with the run's alerts.

        Raises:
            UnreadableError: no such run or key, or its records are not numbers.
        """
        tag = PREFIX + key
        known = self._tags(environ, [run], [tag, HEADER, ALERTS]).get(run)
        if known is None:
            raise UnreadableError(f"there is no run {run[:200]!r} in this log folder any more: reload the page")
        if tag not in known or tag in {HEADER, ALERTS}:
            raise UnreadableError(f"run {run[:200]!r} has no metric {key[:200]!r}")
        content = _content(known[tag])
        notices: list[str] = []
        alerts = _alerts(self._read(environ, [run], [ALERTS], RECORDS).get(run, {}), notices)
        header = _header(self._read(environ, [run], [HEADER], 100).get(run, {}), notices)
        labels = _labels(key, header, content)
        log = spec_of(key, header.metrics if header else {}).is_log
        name = (plugin_util.experiment_id(environ), run, tag, _stamp({tag: known[tag]}), labels)
        with self._lock:
            if name in self._cache:
                self._cache.move_to_end(name)
                return self._cache[name], alerts
        # metrics differ in rows by orders of magnitude: what is read at once stays bounded
        count = max(20, min(RECORDS, READ_BYTES // (8 * max(1, len(labels)))))
        points = self._read(environ, [run], [tag], count).get(run, {}).get(tag, [])
        try:
            series = make_series(key, [(point.step, point.numpy) for point in points], labels, log=log)
        except (TypeError, ValueError) as error:
            raise UnreadableError(f"{key[:200]!r} of run {run[:200]!r} cannot be drawn: {error}") from error
        self._remember(name, series)
        return series, alerts

    def _remember(self, name: tuple[Any, ...], series: Series) -> None:
        with self._lock:
            for old in [n for n in self._cache if n[:3] == name[:3]]:
                del self._cache[old]
            self._cache[name] = series
            while len(self._cache) > 1 and sum(s.values.nbytes for s in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)

    def _tags(self, environ: Environ, runs: Names = None, tags: Names = None) -> dict[str, Any]:
        return self._asked("list_tensors", environ, runs, tags)

    def _losses(self, environ: Environ, runs: list[str]) -> dict[str, list[tuple[int, float]]]:
        found = self._asked("read_scalars", environ, runs, [LOSS], "scalars", downsample=COLUMNS)
        return {run: [(point.step, point.value) for point in of_run.get(LOSS, ())] for run, of_run in found.items()}

    def _read(self, environ: Environ, runs: list[str], tags: list[str], count: int) -> dict[str, Any]:
        """The last `count` points of each tag, by run and tag."""
        try:
            return self._asked("read_tensors", environ, runs, tags, downsample=count)
        except errors.NotFoundError:
            return {}

    def _asked(
        self, what: str, environ: Environ, runs: Names, tags: Names, plugin: str = PLUGIN_NAME, **how: int
    ) -> dict[str, Any]:
        """What the data provider answers, by run and tag."""
        found = getattr(self._provider, what)(
            plugin_util.context(environ),
            experiment_id=plugin_util.experiment_id(environ),
            plugin_name=plugin,
            run_tag_filter=RunTagFilter(runs=runs, tags=tags),
            **how,
        )
        return {run: dict(of_run) for run, of_run in found.items()}


def _run_view(
    name: str, tags: Mapping[str, Any], points: Mapping[str, Any], loss: Sequence[tuple[int, float]]
) -> RunView:
    """What is known of a run from its tags and from the points of its header, alerts and gradient products."""
    notices: list[str] = []
    header = _header(points, notices)
    contents = {tag: _content(series) for tag, series in tags.items()}
    versions = {c.get("version") for c in contents.values()} - {READS_VERSION}
    if versions:
        notices.append(
            f"Written in format {', '.join(sorted(map(str, versions)))}; this tab reads {READS_VERSION}. Install the "
            "flowscope that wrote the run beside TensorBoard; what can be understood is shown."
        )
    order = {PREFIX + key: i for i, key in enumerate(header.labels)} if header else {}
    ordered = sorted(tags.keys() - {HEADER, ALERTS}, key=lambda tag: (order.get(tag, MANY), tag))
    keys = [tag.removeprefix(PREFIX) for tag in ordered if tag.startswith(PREFIX)]
    if not keys:
        notices.append("No record has been written yet: the first comes with the first optimizer step.")
    return RunView(
        name,
        header,
        {key: _labels(key, header, contents[PREFIX + key]) for key in keys},
        _alerts(points, notices),
        {key: _numbers(points[PREFIX + key]) for key in keys if points.get(PREFIX + key)},
        loss,
        max((int(tags[PREFIX + key].max_step) for key in keys), default=None),
        notices,
        _stamp(tags),
    )


def _labels(key: str, header: RunHeader | None, content: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(map(str, (header.labels.get(key) if header else None) or content.get("labels", ())))


def _numbers(points: Any) -> NDArray[np.float64]:
    try:
        return np.atleast_1d(np.asarray(points[-1].numpy, dtype=np.float64))
    except (TypeError, ValueError):
        return np.zeros(0)


def _stamp(tags: Mapping[str, Any]) -> str:
    return f"{max(s.max_step for s in tags.values())}/{max(s.max_wall_time for s in tags.values())}/{len(tags)}"


def _content(series: Any) -> dict[str, Any]:
    try:
        content = json.loads(series.plugin_content)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _texts(points: Any) -> list[str]:
    array = np.atleast_1d(points[-1].numpy) if points else np.asarray([], dtype=object)
    return [text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text) for text in array.ravel()]


def _header(found: Mapping[str, Any], notices: list[str]) -> RunHeader | None:
    texts = _texts(found.get(HEADER, []))
    if not texts:
        notices.append(
            "The run has no header: its configuration is unknown, and rows are named as in its first record."
        )
        return None
    try:
        return RunHeader.from_json(json.loads(texts[0]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        notices.append(f"The header cannot be read ({type(error).__name__}): was it written by another version?")
        return None


def _alerts(found: Mapping[str, Any], notices: list[str]) -> list[Alert]:
    of_step = {point.step: [point] for point in found.get(ALERTS, [])}
    alerts: list[Alert] = []
    unread = 0
    for text in chain.from_iterable(_texts(of_step[step]) for step in sorted(of_step)):
        try:
            alerts.append(Alert.from_json(json.loads(text)))
        except (AttributeError, TypeError, ValueError):
            unread += 1
    if unread:
        notices.append(f"{unread} alert{'s' if unread > 1 else ''} cannot be read: written by another version?")
    return alerts
