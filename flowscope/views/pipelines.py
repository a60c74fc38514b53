"""The tab's view of a pipeline: the runs of its stages are shown as one (`flowscope/sinks/stages.py` says how)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from flowscope.records import Alert, RunHeader
from flowscope.sinks.stages import Chain, in_order
from flowscope.views.overview import RunView
from flowscope.views.series import Series, make_series
from flowscope.views.tensors import TensorReader

PRODUCT = "gradient_product"
HERE = "."
"""What TensorBoard calls the run in the log folder itself."""


class PipelineReader:
    """Runs and series of a log folder, those of a pipeline's stages as one.

    Args:
        reader: of each on its own.
    """

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

    def runs(self, environ: dict[str, Any]) -> list[RunView]:
        """All runs that have data of this plugin, by name."""
        views = {view.name: view for view in self._reader.runs(environ)}
        for name in {folder_of(stage) for stage in views}:
            stages = [views[stage] for stage in stages_of(name, views)]
            headers = _headers(view.header for view in stages)
            if headers and name not in views:
                views = {other: view for other, view in views.items() if view not in stages}
                views[name] = _chained(name, stages, Chain(headers))
        return [views[name] for name in sorted(views)]

    def series(self, environ: dict[str, Any], run: str, key: str) -> tuple[Series, list[Alert]]:
        """The series of a key, with the run's alerts.

        Raises:
            UnreadableError: no such run or key, or its records are not numbers.
        """
        names = self._reader.names(environ)
        stages = stages_of(run, names) if run not in names else []
        headers = _headers(self._reader.header(environ, stage) for stage in stages)
        having = [at for at, header in enumerate(headers) if key in header.labels]
        if not having:
            return self._reader.series(environ, run, key)
        chain, found = Chain(headers), [(at, *self._reader.series(environ, stages[at], key)) for at in having]
        steps = reduce(np.intersect1d, [series.steps for _, series, _ in found])
        pieces = [(at, series.labels, series.values[np.searchsorted(series.steps, steps)]) for at, series, _ in found]
        labels, values = chain.rows(key, pieces)
        series = make_series(key, zip(steps.tolist(), values, strict=True), labels, log=found[0][1].log)
        alerts = [chain.alert(at, alert) for at, _, told in found for alert in told]
        dropped = max(one.dropped for _, one, _ in found)
        return replace(series, dropped=dropped), sorted(alerts, key=lambda alert: alert.step)


def folder_of(run: str) -> str:
    """The run that a stage would be one of: its folder's name."""
    return run.rpartition("/")[0] or HERE


def stages_of(run: str, names: Iterable[str]) -> list[str]:
    """The runs of a pipeline's stages, in order; empty where this run has none, or one is missing."""
    folder = "" if run == HERE else f"{run}/"
    return [folder + name for name in in_order(name.removeprefix(folder) for name in names if name.startswith(folder))]


def _headers(found: Iterable[RunHeader | None]) -> list[RunHeader]:
    """Those of all stages; empty where one has none yet, or no flow."""
    headers = [*found]
    known = [header for header in headers if header is not None and header.flows]
    return known if len(known) == len(headers) else []


def _chained(name: str, stages: Sequence[RunView], chain: Chain) -> RunView:
    """What is known of the run that these stages are."""
    alerts = [chain.alert(at, alert) for at, view in enumerate(stages) for alert in view.alerts]
    products = [
        (at, view.labels[PRODUCT], view.products[PRODUCT])
        for at, view in enumerate(stages)
        if len(view.products.get(PRODUCT, ())) == len(view.labels.get(PRODUCT, ())) > 0
    ]
    last = [view.last_step for view in stages if view.last_step is not None]
    tags = {key for view in stages for key in view.labels}
    return RunView(
        name,
        chain.header,
        {key: names for key, names in chain.header.labels.items() if key in tags},
        sorted(alerts, key=lambda alert: alert.step),
        {PRODUCT: chain.rows(PRODUCT, products)[1]} if len(products) == len(stages) else {},
        stages[-1].loss,
        min(last) if len(last) == len(stages) else None,
        [*dict.fromkeys(notice for view in stages for notice in view.notices)],
        " ".join(view.stamp for view in stages),
    )
