"""One metric over depth and steps, made to fit a screen. Axis letters: N records, R rows (points, blocks, sites)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowscope.backdrop import Behind
from flowscope.records import Array, row_names, strict_json

COLUMNS = 320
ROWS = 200
PROFILE_ROWS = 2048
MATRICES = 64
SIDE = 512
"""Rows and columns of a matrix that a page gets."""
DIGITS = 5
"""Significant ones of the numbers that the browser gets."""

strict = partial(strict_json, digits=DIGITS)
"""Anything (an alert, a configuration) as strict JSON can hold it; what it does not know becomes text."""


@dataclass(frozen=True)
class Series:
    """The records of one metric of one run that share the last record's shape.

    Attributes:
        key: as in `Record.metrics`.
        steps: [N], rising.
        values: [N, R] for a profile, [N, R, R] for a matrix, [N, R, S, S] for a stack; NaN is "not seen".
        labels: [R] module or parameter paths.
        dropped: records before a change of layout that do not fit the rows any more.
        log: whether it is drawn on a logarithmic scale.
        behind: what the run's reference has of it.
    """

    key: str
    steps: NDArray[np.int64]
    values: Array
    labels: tuple[str, ...]
    dropped: int = 0
    log: bool = False
    behind: Behind | None = None


def make_series(key: str, points: Iterable[tuple[int, Any]], labels: Sequence[str], *, log: bool = False) -> Series:
    """A series from (step, array) pairs: the last of each step, of the last shape; rows without a label are numbered.

    Raises:
        ValueError: there is no pair, or an array is not of numbers.
    """
    by_step = dict(points)
    if not by_step:
        raise ValueError("no record has it yet")
    arrays = {step: np.atleast_1d(np.asarray(by_step[step], dtype=np.float64)) for step in sorted(by_step)}
    last = arrays[max(arrays)].shape
    fits = {step: array for step, array in arrays.items() if array.shape == last}
    names = tuple(row_names(labels, last[0]))
    steps, values = np.asarray([*fits], dtype=np.int64), np.stack([*fits.values()])
    return Series(key, steps, values, names, len(arrays) - len(fits), log)


def thin_steps(steps: NDArray[np.int64], limit: int, keep: Sequence[int] = ()) -> NDArray[np.int64]:
    """Indices of at most `limit` records: the first and the last, those nearest to `keep`, the rest evenly spaced.

    Records are chosen and never averaged, so that every number on the screen was measured at the step beside it.
    """
    count = len(steps)
    if count <= limit:
        return np.arange(count)
    wanted = {0, count - 1, *(int(np.abs(steps - step).argmin()) for step in keep[: limit // 4])}
    even = np.linspace(0, count - 1, limit - len(wanted)).round().astype(np.int64)
    return np.asarray(sorted(wanted | set(even.tolist())), dtype=np.int64)


def group_rows(values: Array, limit: int, log: bool) -> tuple[Array, NDArray[np.int64]]:
    """At most `limit` rows: a group of neighbours is shown by its most extreme member, so that no fault is hidden.

    Args:
        values: [N, R].
        limit: how many rows may come out.
        log: distances are taken between logarithms.

    Returns:
        [N, min(R, limit)], each the value of the group that is furthest from the median over all rows of its record;
        and the groups' edges [min(R, limit) + 1].
    """
    rows = values.shape[1]
    edges = np.arange(min(rows, limit) + 1) * rows // min(rows, limit)
    if rows <= limit:
        return values, edges
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.log10(np.abs(values)) if log else values
        seen = np.where(np.isfinite(scaled), scaled, np.nan)
        middle = np.zeros((len(values), 1))
        some = np.isfinite(seen).any(axis=1)
        middle[some] = np.nanmedian(seen[some], axis=1, keepdims=True)
        distance = np.abs(np.subtract(scaled, middle, out=seen), out=seen)  # a record may have millions of rows
    distance[np.isnan(distance)] = np.inf
    distance[np.isnan(values)] = -1.0
    records = np.arange(len(values))
    columns = [
        values[records, start + distance[:, start:end].argmax(axis=1)] for start, end in pairwise(edges.tolist())
    ]
    return np.stack(columns, axis=1), edges


def heat_payload(
    series: Series, log: bool, keep: Sequence[int] = (), columns: int = COLUMNS, rows: int = ROWS
) -> dict[str, Any]:
    """The depth x step picture of a profile, as the browser gets it.

    Returns:
        `steps` [C], `values` rows of C numbers, `rows` one `[first label, last label, first index, count]` each, and
        `records`, `depth`: how many there are in all. Of the reference `behind`: `steps` [K], `values` [Q, K, R].

    Raises:
        ValueError: the metric is a matrix per record.
    """
    if series.values.ndim != 2:
        raise ValueError(f"it has {series.values.ndim - 1} axes a record: it is shown as a matrix, not over depth")
    chosen = thin_steps(series.steps, columns, keep)
    cells, edges = group_rows(series.values[chosen], rows, log)
    return {
        "key": series.key,
        "steps": series.steps[chosen].tolist(),
        "values": strict(cells.T.tolist()),
        "rows": _groups(series.labels, edges),
        "records": len(series.steps),
        "depth": len(series.labels),
        "dropped": series.dropped,
        "behind": series.behind and behind_payload(series.behind),
    }


def behind_payload(behind: Behind) -> dict[str, Any]:
    """One metric of the reference, as the browser gets it."""
    return {"steps": list(behind.steps), "values": strict(behind.values.tolist())}


def record_payload(series: Series, step: int, log: bool, side: int = SIDE) -> dict[str, Any]:
    """The record nearest to `step`: a profile with `rows` as in `heat_payload`, or `matrix`, or `stack` of matrices.

    Of a matrix with more than `side` rows or columns so many are chosen, evenly; `of` is how many there are.
    """
    at = _nearest([int(one) for one in series.steps], step)
    array = series.values[at]
    payload: dict[str, Any] = {"key": series.key, "step": int(series.steps[at])}
    if array.ndim == 1:
        cells, edges = group_rows(array[None], PROFILE_ROWS, log)
        return {**payload, "values": strict(cells[0].tolist()), "rows": _groups(series.labels, edges)}
    if array.ndim == 2:
        rows, columns = (_evenly(size, side) for size in array.shape)
        labels = [series.labels[row] for row in rows]
        return {**payload, "matrix": strict(array[np.ix_(rows, columns)].tolist()), "labels": labels, "of": len(array)}
    if array.ndim != 3:
        raise ValueError(f"it has {array.ndim} axes a record; expected 1, 2 or 3")
    chosen, rows, columns = (
        _evenly(size, most) for size, most in zip(array.shape, (MATRICES, side, side), strict=True)
    )
    return {
        **payload,
        "stack": strict(array[np.ix_(chosen, rows, columns)].tolist()),
        "labels": [series.labels[i] for i in chosen],
        "of": len(array),
    }


def _nearest(steps: list[int], step: int) -> int:
    """In Python's integers: differences of 64 bit steps may be longer."""
    return min(range(len(steps)), key=lambda at: abs(steps[at] - step))


def _evenly(size: int, most: int) -> NDArray[np.int64]:
    return thin_steps(np.arange(size), most)


def _groups(labels: Sequence[str], edges: NDArray[np.int64]) -> list[list[Any]]:
    return [[labels[start], labels[end - 1], start, end - start] for start, end in pairwise(edges.tolist())]


def to_json(payload: Any) -> str:
    """Compact strict JSON of what `strict` made."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False)
