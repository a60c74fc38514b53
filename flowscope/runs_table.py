"""A folder of runs as one table: a line a run says how it went, without its arrays being read. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flowscope.diagnosis import RANK, events, paired
from flowscope.errors import FlowscopeError
from flowscope.records import Run
from flowscope.sinks.jsonl import FILE_NAME
from flowscope.sinks.reading import read_run, runs_below
from flowscope.terminal import duration, shown

VERDICTS = (*RANK, "ok", "none")
"""The worst first: the severity of what stands, "ok" where nothing does, "none" without a record."""


@dataclass(frozen=True)
class RunRow:
    """One run.

    Attributes:
        run: its folder, below the one that was asked for.
        verdict: the most serious severity that stands; "ok" where none does, "none" where there is no record.
        first: kind of the alert that came first, of those that stand if any do; None without an alert.
        where: its place.
        since: the step at which it began.
        standing: how many alerts stand.
        loss: of the last record that has one.
        step: of the last record.
        records: how many there are.
        seconds: from the beginning of the run to what was last written.
        own: the time of flowscope itself, as a share of a step without it; None where it was not measured.
        bytes: what its files take on the disk.
    """

    run: str
    verdict: str
    first: str | None
    where: str | None
    since: int | None
    standing: int
    loss: float | None
    step: int | None
    records: int
    seconds: float | None
    own: float | None
    bytes: int


def rows_of(folder: str | os.PathLike[str], sort: str = "run") -> list[RunRow]:
    """A row for each run in a folder and below it.

    Args:
        folder: where to look.
        sort: the name of a column; rows without a value come last.

    Raises:
        FlowscopeError: there is no run, or no such column.
    """
    names = [field.name for field in fields(RunRow)]
    if sort not in names:
        raise FlowscopeError(f"runs --sort: got {sort!r}, expected one of {', '.join(names)}.")
    found = runs_below(folder)
    if not found:
        raise FlowscopeError(
            f"runs: there is no run in {os.fspath(folder)!r} or below it; expected folders with a {FILE_NAME}, which "
            "flowscope.watch(model, log_dir=...) and flowscope run write."
        )
    rows = [_row(path, Path(folder)) for path in found]
    if sort == "run":
        return rows

    def place(row: RunRow) -> tuple[bool, Any]:
        value = getattr(row, sort)
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return missing, 0 if missing else VERDICTS.index(value) if sort == "verdict" else value

    return sorted(rows, key=place)


def _row(path: Path, below: Path) -> RunRow:
    run = read_run(path, metrics=False)
    losses = [record.loss for record in run.records if record.loss is not None]
    files = [file for file in path.iterdir() if file.is_file()]
    told = verdict_of(run)
    return RunRow(
        run=path.name if path == below else path.relative_to(below).as_posix(),
        **told,
        loss=losses[-1] if losses else None,
        step=run.records[-1].step if run.records else None,
        records=len(run.records),
        seconds=_seconds(path, files),
        own=run.header.cost.get("share") if run.header else None,
        bytes=sum(file.stat().st_size for file in files),
    )


def verdict_of(run: Run) -> dict[str, Any]:
    """`verdict`, `first`, `where`, `since` and `standing`, as in `RunRow`."""
    incidents = paired(run.alerts)
    standing = [incident for incident in incidents if incident.resolved is None]
    told = events(incident.alert for incident in standing) or standing or events(run.alerts) or incidents
    first = told[0] if told else None
    verdict = min((incident.alert.severity for incident in standing), key=lambda severity: RANK[severity], default=None)
    return {
        "verdict": verdict or ("ok" if run.records else "none"),
        "first": first.alert.kind if first else None,
        "where": (first.alert.where or None) if first else None,
        "since": first.since if first else None,
        "standing": len(standing),
    }


def _seconds(path: Path, files: Sequence[Path]) -> float | None:
    """Event files bear the second at which they were begun."""
    begun = [file.name.split(".")[3] for file in files if file.name.startswith("events.out.tfevents.")]
    starts = [int(second) for second in begun if second.isdigit()]
    return max(0.0, (path / FILE_NAME).stat().st_mtime - min(starts)) if starts else None


# -- text -------------------------------------------------------------------------------------------------------------

HEADS = ("run", "verdict", "first alert", "where", "since", "loss", "steps", "time", "own time", "disk")


def table(rows: Sequence[RunRow]) -> list[str]:
    """The rows as lines for a terminal, with a head."""
    cells = [HEADS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    right = {HEADS.index(name) for name in ("since", "loss", "steps", "time", "own time", "disk")}
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cells(row: RunRow) -> tuple[str, ...]:
    more = f" (+{row.standing - 1})" if row.standing > 1 else "" if row.standing or row.first is None else " (over)"
    return (
        shown(row.run),
        row.verdict,
        f"{row.first}{more}" if row.first else "-",
        shown(row.where or "-"),
        "-" if row.since is None else str(row.since),
        "-" if row.loss is None else f"{row.loss:.4g}",
        "-" if row.step is None else str(row.step + 1),
        "-" if row.seconds is None else duration(row.seconds),
        "-" if row.own is None else f"{row.own:.1%}",
        f"{row.bytes / 1e6:.1f} MB",
    )
