"""One HTML file that shows one run or several: it opens from disk, needs no server and asks the network for nothing."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flowscope.backdrop import read
from flowscope.diagnosis import paired
from flowscope.errors import FlowscopeError
from flowscope.metrics import spec_of
from flowscope.parting.differences import differences
from flowscope.records import Run, RunHeader, split_key
from flowscope.views import assets
from flowscope.views.overview import RunView, overview_payload
from flowscope.views.room import Room
from flowscope.views.series import (
    COLUMNS,
    ROWS,
    Series,
    heat_payload,
    make_series,
    record_payload,
    thin_steps,
    to_json,
)

MOST_BYTES = 5_000_000
NAMED = 3
"""So many runs are named in the title."""
MATRIX_RECORDS = 12
LEAST_CELLS = 90_000
"""A page with less room leaves out what is drawn behind the runs."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The page may run what stands in it and load nothing, not even by mistake."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<noscript>This report draws its pictures with JavaScript, which is switched off here.</noscript>
<script type="application/json" id="flowscope-data">{data}</script>
<script type="module">
{script}</script>
</body>
</html>
"""


def write_report(
    runs: Run | Mapping[str, Run] | Sequence[Run], path: str | os.PathLike[str], title: str | None = None
) -> Path:
    """Write the report.

    Args:
        runs: a run, several by name, or several in a list (named by their place in it); several are drawn on top of
            each other on one scale.
        path: of the file; its folder is created.
        title: of the page; by default the names of the runs, or how many there are.

    Returns:
        The path. Under 5 MB whatever the run's length: long and deep runs are thinned out (and say so).

    Raises:
        FlowscopeError: there is nothing to report, or the file cannot be written.
    """
    if isinstance(runs, Mapping):
        named = dict(runs)
    else:
        named = {f"run {i + 1}": run for i, run in enumerate(runs)} if isinstance(runs, Sequence) else {"run": runs}
    if not named:
        raise FlowscopeError("write_report(runs, ...): got no run; expected one, or a dict name -> run.")
    names = ", ".join(named) if len(named) <= NAMED else f"{len(named)} runs"
    heading, room = title or f"flowscope: {names}", Room()
    while len(page := _page(named, heading, room)) > MOST_BYTES and room != room.smaller():
        room = room.smaller()
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise FlowscopeError(
            f"write_report(..., {os.fspath(path)!r}): {error.strerror}; expected a file that can be written."
        ) from error
    return file


def _page(runs: Mapping[str, Run], title: str, room: Room) -> str:
    return _PAGE.format(
        title=html.escape(title),
        policy=_POLICY,
        style=assets.read("style.css"),
        # `<` cannot stand in JSON outside strings, and inside them \\u003c is the same character
        data=to_json(room.cut(report_payload(runs, title, room))).replace("<", "\\u003c"),
        script=assets.joined("report.js"),
    )


def report_payload(runs: Mapping[str, Run], title: str, room: Room | None = None) -> dict[str, Any]:
    """Everything the report's script reads: the tab's overview, and for each run and key what the tab would ask for."""
    room = room or Room()
    series = {name: _all_series(run) for name, run in runs.items()}
    first = next(iter(runs.values())).header or RunHeader()
    views = [
        replace(_view(name, run, series[name]), differs=differences(first, run.header or RunHeader()))
        for name, run in runs.items()
    ]
    series = {name: dict(islice(found.items(), room.keys)) for name, found in series.items()}
    if room.cells < LEAST_CELLS:
        series = {
            name: {key: replace(one, behind=None) for key, one in found.items()} for name, found in series.items()
        }
    profiles = [s for found in series.values() for s in found.values() if s.values.ndim == 2]
    columns, rows = _fit(profiles, room)
    keep = {name: [one.since for one in paired(run.alerts)[: room.alerts]] for name, run in runs.items()}

    def embed(name: str, one: Series) -> dict[str, Any]:
        if one.values.ndim == 2:
            return heat_payload(one, one.log, keep[name], columns, rows)
        return _matrices(one, room)

    data = {name: {key: embed(name, one) for key, one in found.items()} for name, found in series.items()}
    return {"title": title, **overview_payload(views, room), "series": data}


def _all_series(run: Run) -> dict[str, Series]:
    header = run.header or RunHeader()
    labels, specs = header.labels, header.metrics
    points: dict[str, list[tuple[int, Any]]] = {}
    rows: dict[str, Sequence[str]] = {}
    older: Counter[str] = Counter()
    for record in reversed(run.records):
        for key, array in record.metrics.items():
            if not array.size or not spec_of(key, specs).drawn:
                continue
            names = tuple(record.metric_labels.get(key, labels.get(key, ())))
            if names == rows.setdefault(key, names):
                points.setdefault(key, []).append((record.step, array))
            else:
                older[key] += 1  # as many rows or not: they were other modules then
    order = {key: i for i, key in enumerate(labels)}
    keys = sorted(points, key=lambda key: order.get(key, len(order)))
    found = {key: make_series(key, points[key][::-1], rows[key], log=spec_of(key, specs).is_log) for key in keys}
    backdrop = read(header.behind)
    curves = backdrop.curves if backdrop is not None else {}
    return {key: replace(s, dropped=s.dropped + older[key], behind=curves.get(key)) for key, s in found.items()}


def _view(name: str, run: Run, series: Mapping[str, Series]) -> RunView:
    notices = [] if run.header else ["The file has no header: rows are numbered. Was its beginning cut off?"]
    losses = [(record.step, record.loss) for record in run.records if record.loss is not None]
    notices += dict.fromkeys(note for record in run.records for note in record.notes)
    return RunView(
        name,
        run.header,
        {key: s.labels for key, s in series.items()},
        run.alerts,
        {key: s.values[-1] for key, s in series.items() if split_key(key)[0] == "gradient_product"},
        [losses[i] for i in thin_steps(np.asarray([step for step, _ in losses]), COLUMNS)],
        run.records[-1].step if run.records else None,
        notices[:20],
    )


def _fit(profiles: Iterable[Series], room: Room) -> tuple[int, int]:
    """Columns and rows that keep all profiles within the cells there is room for."""
    shapes = [s.values.shape for s in profiles]
    columns, rows = COLUMNS, ROWS * 2
    while sum(min(n, columns) * min(r, rows) for n, r in shapes) > room.cells and columns * rows > 64:
        columns, rows = (columns * 3 // 4, rows) if columns > rows else (columns, rows * 3 // 4)
    return columns, rows


def _matrices(series: Series, room: Room) -> dict[str, Any]:
    """As many records as there is room for, of one matrix at least: there with fewer rows."""
    most = room.cells // 8
    side = min(room.side, max(2, int(most**0.5)))
    cells = max(1, int(np.prod([min(size, side) for size in series.values.shape[1:]])))
    limit = max(1, min(MATRIX_RECORDS, most // cells))
    chosen = thin_steps(series.steps, limit) if limit > 1 else np.asarray([len(series.steps) - 1])
    return {"records": [record_payload(series, int(step), series.log, side) for step in series.steps[chosen]]}
