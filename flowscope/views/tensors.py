"""Reads flowscope's tensors through TensorBoard's data provider (`flowscope/sinks/tensorboard.py` writes them)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json
from tensorboard import errors, plugin_util
from tensorboard.data.provider import RunTagFilter

from flowscope.backdrop import read
from flowscope.metrics import spec_of
from flowscope.records import Alert, RunHeader, split_key
from flowscope.validation import as_far_as_it_fits
from flowscope.views.overview import RunView
from flowscope.views.series import COLUMNS, Series, make_series

PLUGIN_NAME = "flowscope"
PREFIX = "flowscope/"
BEGINNING = "flowscope_beginning/"
"""Before the keys of a run's first records, which TensorBoard's sample of a long run need not hold."""
HEADER, ALERTS = "flowscope/header", "flowscope/alerts"
LOSS = "flow/loss"
READS_VERSION = 1
RECORDS = 2000
READ_BYTES = 64 * 2**20
CACHE_BYTES = 256 * 2**20
MANY = 10**6
DAMAGED = "Its files are damaged: what cannot be read is left out."

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
        """All runs that have data of this plugin, by name; of a damaged one what can be read."""
        damaged: set[str] = set()
        tags = self._each("list_tensors", environ, None, None, damaged)
        known = {tag for of_run in tags.values() for tag in of_run}
        products = sorted(tag for tag in known if split_key(tag.removeprefix(PREFIX))[0] == "gradient_product")
        points: dict[str, dict[str, Any]] = {name: {} for name in tags}
        for wanted, count in (([HEADER], 100), ([ALERTS], RECORDS), (products, 1)):
            for name, of_run in self._read(environ, list(tags), wanted, count, damaged).items() if wanted else ():
                points[name] |= of_run
        losses = self._losses(environ, list(tags), damaged)
        views = [_run_view(name, tags[name], points[name], losses.get(name, [])) for name in sorted(tags)]
        for view in views:
            view.notices += [DAMAGED] * (view.name in damaged)
        return [*views, *(RunView(name, notices=[DAMAGED]) for name in sorted(damaged - tags.keys()))]

    def names(self, environ: Environ) -> list[str]:
        """All runs, with or without data of this plugin."""
        context, experiment = plugin_util.context(environ), plugin_util.experiment_id(environ)
        return [run.run_name for run in self._provider.list_runs(context, experiment_id=experiment)]

    def series(self, environ: Environ, run: str, key: str) -> tuple[Series, list[Alert]]:
        """The series of a key, with the run's alerts.

        Raises:
            UnreadableError: no such run or key, or its records are not numbers.
        """
        tag = PREFIX + key
        damaged: set[str] = set()
        known = self._each("list_tensors", environ, [run], [tag, HEADER, ALERTS], damaged).get(run)
        if known is None:
            raise UnreadableError(f"there is no run {run[:200]!r} in this log folder any more: reload the page")
        if tag not in known or tag in {HEADER, ALERTS}:
            raise UnreadableError(f"run {run[:200]!r} has no metric {key[:200]!r}")
        content = _content(known[tag])
        notices: list[str] = []
        alerts = _alerts(self._read(environ, [run], [ALERTS], RECORDS, set()).get(run, {}), notices)
        header = _header(self._read(environ, [run], [HEADER], 100, set()).get(run, {}), notices)
        labels = _labels(key, header, content)
        log = spec_of(key, header.metrics if header else {}).is_log
        name = (plugin_util.experiment_id(environ), run, tag, _stamp({tag: known[tag]}), labels)
        with self._lock:
            if name in self._cache:
                self._cache.move_to_end(name)
                return self._cache[name], alerts
        # metrics differ in rows by orders of magnitude: what is read at once stays bounded
        count = max(20, min(RECORDS, READ_BYTES // (8 * max(1, len(labels)))))
        tags = [BEGINNING + key, tag]
        of_run = self._read(environ, [run], tags, count, damaged).get(run, {})
        points = [point for one in tags for point in of_run.get(one, [])]
        try:
            series = make_series(key, [(point.step, point.numpy) for point in points], labels, log=log)
        except (TypeError, ValueError) as error:
            reason = DAMAGED if damaged else error
            raise UnreadableError(f"{key[:200]!r} of run {run[:200]!r} cannot be drawn: {reason}") from error
        if header is not None and (backdrop := read(header.behind)) is not None:
            series = replace(series, behind=backdrop.curves.get(key))
        self._remember(name, series)
        return series, alerts

    def header(self, environ: Environ, run: str) -> RunHeader | None:
        """A run's header, None where it has none."""
        return _header(self._read(environ, [run], [HEADER], 100, set()).get(run, {}), [])

    def _remember(self, name: tuple[Any, ...], series: Series) -> None:
        with self._lock:
            for old in [n for n in self._cache if n[:3] == name[:3]]:
                del self._cache[old]
            self._cache[name] = series
            while len(self._cache) > 1 and sum(s.values.nbytes for s in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)

    def _losses(self, environ: Environ, runs: list[str], damaged: set[str]) -> dict[str, list[tuple[int, float]]]:
        found = self._each("read_scalars", environ, runs, [LOSS], damaged, plugin="scalars", downsample=COLUMNS)
        return {run: [(point.step, point.value) for point in of_run.get(LOSS, ())] for run, of_run in found.items()}

    def _read(
        self, environ: Environ, runs: list[str], tags: list[str], count: int, damaged: set[str]
    ) -> dict[str, Any]:
        """The last `count` points of each tag, by run and tag."""
        return self._each("read_tensors", environ, runs, tags, damaged, downsample=count)

    def _each(
        self, what: str, environ: Environ, runs: Names, tags: Names, damaged: set[str], **how: Any
    ) -> dict[str, Any]:
        """What the data provider answers, by run and tag; one run at a time where it cannot answer for all.

        A tensor whose shape and bytes disagree, or of no known type, makes it fail for all runs that were asked for.
        Runs that cannot be read are left out and named in `damaged`.
        """
        try:
            return self._asked(what, environ, runs, tags, **how)
        except errors.NotFoundError:
            return {}
        except Exception:
            if runs is not None and len(runs) == 1:
                damaged.update(runs)
                return {}
        each = self.names(environ) if runs is None else runs
        found = (self._each(what, environ, [run], tags, damaged, **how) for run in each)
        return {run: of_run for answer in found for run, of_run in answer.items()}

    def _asked(
        self, what: str, environ: Environ, runs: Names, tags: Names, *, plugin: str = PLUGIN_NAME, **how: int
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
    versions = {content.version for content in contents.values()} - {READS_VERSION}
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
        max((tags[PREFIX + key].max_step for key in keys if tags[PREFIX + key].max_step is not None), default=None),
        notices,
        _stamp(tags),
    )


def _labels(key: str, header: RunHeader | None, content: _Content) -> tuple[str, ...]:
    return (header.labels.get(key) if header else None) or content.labels


def _numbers(points: Any) -> NDArray[np.float64]:
    try:
        numbers = np.atleast_1d(np.asarray(points[-1].numpy, dtype=np.float64))
    except (TypeError, ValueError):
        return np.zeros(0)
    return numbers if numbers.ndim == 1 else np.zeros(0)


def _stamp(tags: Mapping[str, Any]) -> str:
    return f"{_latest(s.max_step for s in tags.values())}/{_latest(s.max_wall_time for s in tags.values())}/{len(tags)}"


def _latest(values: Iterable[float | None]) -> float | None:
    """The largest; a series without a point has none."""
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class _Content:
    """What the sink writes beside a tensor."""

    labels: tuple[str, ...] = ()
    version: int | str | None = None


def _content(series: Any) -> _Content:
    try:
        return as_far_as_it_fits(_Content, from_json(series.plugin_content))
    except ValueError:
        return _Content()


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
        return RunHeader.from_json(from_json(texts[0]))
    except ValueError:
        notices.append("The header cannot be read: was it written by another version?")
        return None


def _alerts(found: Mapping[str, Any], notices: list[str]) -> list[Alert]:
    of_step = {point.step: [point] for point in found.get(ALERTS, [])}
    alerts: list[Alert] = []
    unread = 0
    for text in chain.from_iterable(_texts(of_step[step]) for step in sorted(of_step)):
        try:
            alerts.append(Alert.from_json(from_json(text)))
        except (TypeError, ValueError):
            unread += 1
    if unread:
        notices.append(f"{unread} alert{'s' if unread > 1 else ''} cannot be read: written by another version?")
    return alerts
