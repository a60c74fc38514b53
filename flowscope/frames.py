"""A run's numbers as columns: what pandas, polars, arrow and CSV take alike. Imports neither torch nor pandas."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from flowscope.errors import FlowscopeError, nearest
from flowscope.records import Alert, Record, Run, row_names, split_key

Columns = dict[str, NDArray[Any]]
ALERTS = ("step", "kind", "severity", "state", "where", "flow", "since", "value", "limit", "message", "advice")
LONG = ("step", "metric", "flow", "row", "name", "value")
LOSS = "loss"


def columns_of(run: Run, what: str | None = None, flow: str | None = None) -> Columns:
    """Return a run as columns of one length.

    Args:
        run: as `flowscope.read_run` returns it.
        what: a metric (profiles have a line a step and row; matrices a further column `column`, stacks of them
            `matrix`), "loss", "alerts", or None: every profile and the loss.
        flow: of that metric; None is the first flow that has it.

    Returns:
        `step`, `metric`, `flow` ("" is the first), `row` (its number), `name` (its path), `value`; NaN is "not seen".
        For "alerts" the fields of `flowscope.Alert`.

    Raises:
        FlowscopeError: the run has no such metric.
    """
    if what == "alerts":
        return {name: np.array([_plain(alert, name) for alert in run.alerts], dtype=_kind(name)) for name in ALERTS}
    lines = _everything(run.records) if what is None else _of_one(run.records, what, flow)
    pieces: list[Mapping[str, Any]] = [*lines]
    if what is not None and not pieces:
        known = {LOSS, "alerts", *(split_key(key)[0] for record in run.records for key in record.metrics)}
        near = nearest(what, known) or f" It has: {', '.join(sorted(known))}."
        raise FlowscopeError(f"no record of this run has {what!r}{f' of flow {flow!r}' if flow else ''}.{near}")
    names = list(dict.fromkeys([*LONG, *(name for piece in pieces for name in piece)]))
    return {name: _joined(pieces, name) for name in names}


def wide_of(run: Run, metric: str, flow: str | None = None) -> tuple[NDArray[np.int64], list[str], NDArray[np.float64]]:
    """Return a profile as a table: steps [N], names of the rows [R], values [N, R], NaN where a step has no such row.

    Raises:
        FlowscopeError: the run has no such metric, or it is a matrix a record.
    """
    long = columns_of(run, metric, flow)
    if "column" in long:
        raise FlowscopeError(
            f"{metric} is a matrix a record, expected a profile; run.to_pandas(long=True) on it has a line a cell: "
            f"run.to_pandas({metric!r}, long=True)."
        )
    steps, at = np.unique(long["step"], return_inverse=True)
    names = list(dict.fromkeys(long["name"].tolist()))
    place = {name: number for number, name in enumerate(names)}
    values = np.full((len(steps), len(names)), np.nan)
    values[at, [place[name] for name in long["name"].tolist()]] = long["value"]
    return steps, names, values


def write_csv(columns: Mapping[str, NDArray[Any]], file: TextIO) -> None:
    """Write columns as CSV (RFC 4180), a head first; NaN and None are empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for line in zip(*(column.tolist() for column in columns.values()), strict=True):
        writer.writerow(["" if cell is None or cell != cell else cell for cell in line])


# -- pieces -----------------------------------------------------------------------------------------------------------


def _everything(records: Sequence[Record]) -> Iterator[Mapping[str, Any]]:
    for record in records:
        yield from _loss(record)
        for key, array in record.metrics.items():
            if array.ndim == 1:
                yield _piece(record, key, array)


def _of_one(records: Sequence[Record], what: str, flow: str | None) -> Iterator[Mapping[str, Any]]:
    for record in records:
        if what == LOSS:
            yield from _loss(record)
        elif (what if flow is None else (what, flow)) in record:
            # the key again: `labels` and `flow` hang on it
            array = record[what if flow is None else (what, flow)]
            key = next(key for key, held in record.metrics.items() if held is array)
            yield _piece(record, key, array)


def _loss(record: Record) -> Iterator[Mapping[str, Any]]:
    if record.loss is not None:
        yield _lines(record.step, LOSS, "", ("",), np.array([record.loss]))


def _piece(record: Record, key: str, array: NDArray[np.float64]) -> Mapping[str, Any]:
    metric, flow = split_key(key)
    names = row_names(record.metric_labels.get(key, ()), len(array))
    return _lines(record.step, metric, flow or "", names, array)


def _lines(step: int, metric: str, flow: str, names: Sequence[str], array: NDArray[np.float64]) -> Mapping[str, Any]:
    at = np.indices(array.shape).reshape(array.ndim, -1)
    inner = ("column",) if array.ndim == 2 else ("matrix_row", "column")
    return {
        "step": np.full(array.size, step),
        "metric": np.full(array.size, metric, dtype=object),
        "flow": np.full(array.size, flow, dtype=object),
        "row": at[0],
        "name": np.array(names, dtype=object)[at[0]],
        "value": array.reshape(-1),
        **dict(zip(inner, at[1:], strict=False)),
    }


def _joined(pieces: Sequence[Mapping[str, Any]], name: str) -> NDArray[Any]:
    if not pieces:
        return np.array([], dtype={"value": np.float64, "step": np.int64, "row": np.int64}.get(name, object))
    return np.concatenate([piece[name] for piece in pieces])


def _plain(alert: Alert, name: str) -> Any:
    value = getattr(alert, name)
    return value if name != "since" or value is not None else alert.step


def _kind(name: str) -> Any:
    return {"step": np.int64, "since": np.int64, "value": np.float64, "limit": np.float64}.get(name, object)
