"""A run read back from `flowscope.jsonl`, whatever is in the file: by lines, each checked, none too long.

What leaves here has the types and the shapes that `flowscope.records` says: whoever draws or judges a run needs no
further look at what a file may hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Alerts, Event, Record, Run, RunHeader
from flowscope.sinks.jsonl import FILE_NAME
from flowscope.sinks.stages import chained, stages_in

LONGEST = 1 << 26
"""Bytes of a line. A matrix of 1,500 rows takes 20 MB; what is longer is passed over, so that memory stays bounded."""
_RECORD = b'{"type":"record"'
_PARTS = re.compile(r"(\d+)").split
UNREADABLE = (ArithmeticError, TypeError, ValueError)
"""What `decode_event` raises for a line that is incomplete or not flowscope's."""


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file of a run, from itself or the folder that holds it."""
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether it is a run's file, or a folder that holds one itself, or those of a pipeline's stages."""
    if Path(path).is_dir() and stages_in(Path(path)):
        return True
    return file_of(path).name == FILE_NAME and file_of(path).is_file()


def runs_below(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders of all runs in this one and below it, by name; numbers in names are in the order of numbers.

    The stages of a pipeline are one run, in the folder that holds theirs.
    """
    found = [file.parent for file in Path(folder).glob(f"**/{FILE_NAME}")]
    found = [*dict.fromkeys(run.parent if run in stages_in(run.parent) else run for run in found)]
    return sorted(found, key=lambda path: [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in _PARTS(str(path))])


def read_run(path: str | os.PathLike[str], *, metrics: bool = True) -> Run:
    """Read a run back, however it ended.

    A file may come from several processes, one after the other. A process that resumes from a checkpoint repeats steps
    that the one before had already done, and those belong to a path that was given up. So the first record after a
    header says where its process takes over: records and alerts of that step and later that were written before the
    header are dropped. Between headers nothing is dropped but a record that a later one of the same step replaces.

    Args:
        path: the file, or the folder that holds `flowscope.jsonl`, or those of a pipeline's stages, which are chained.
        metrics: False leaves out the arrays of the records, which is many times as fast.

    Returns:
        A `Run`; lines that cannot be understood are counted, never raised.

    Raises:
        FlowscopeError: there is no such file.
    """
    file = file_of(path)
    if not file.is_file() and (stages := stages_in(Path(path))):
        return chained([read_run(stage, metrics=metrics) for stage in stages])
    if not file.is_file():
        raise FlowscopeError(
            f"read_run({os.fspath(path)!r}): there is no file {os.fspath(file)!r}; expected {FILE_NAME} or the folder "
            "that holds it: the log_dir given to flowscope.watch(model, log_dir=...)."
        )
    lines, processes = Lines(), _Processes()
    with file.open("rb") as opened:
        for line in lines.fresh(opened, ended=True):
            processes.read(line if metrics else _without_metrics(line))
    run = processes.joined()
    run.skipped_lines += lines.too_long
    return run


def _without_metrics(line: bytes) -> bytes:
    """A record's line without its arrays; they come last, and inside of a text the quotes would be escaped."""
    head, found, _ = line.partition(b',"metrics":') if line.startswith(_RECORD) else (line, b"", b"")
    return head + b"}" if found else line


class Lines:
    """The lines of a file that may still be written to.

    Attributes:
        position: behind the last complete line that was given out.
        too_long: how many lines were passed over because they are longer than `LONGEST`.
    """

    def __init__(self) -> None:
        self.position = 0
        self.too_long = 0
        self._inside = False
        """Whether `position` is inside of such a line."""

    def fresh(self, file: BinaryIO, *, ended: bool = False) -> Iterator[bytes]:
        """The complete lines since the last call, without empty ones.

        Args:
            file: the file.
            ended: a last line without a newline is one, too; else it is still being written.
        """
        file.seek(self.position)
        while piece := file.readline(LONGEST):
            whole = piece.endswith(b"\n")
            cut = not whole and len(piece) < LONGEST
            if cut and not (ended or self._inside):
                return
            self.position += len(piece)
            if self._inside or not (whole or cut):
                self.too_long += not self._inside
                self._inside = not whole
            elif not piece.isspace():
                yield piece


class _Processes:
    """Joins the events of processes that wrote into one file, one after the other.

    Each event is looked at a bounded number of times, however often the processes changed.
    """

    def __init__(self) -> None:
        self._run = Run()
        self._records: dict[int, Record] = {}
        self._steps: list[int] = []
        """Those of the records, as a heap with the last step first."""
        self._alerts: list[Alert | None] = []
        self._older: list[tuple[int, int]] = []
        """Step and number of the alerts before the last header, as a heap with the last step first."""
        self._taken_up = 0
        """So many alerts are in that heap."""
        self._begins = False
        """Whether no record has followed the last header yet."""

    def read(self, line: bytes) -> None:
        """Take the next line."""
        try:
            event = decode_event(line, self._run.header)
        except UNREADABLE:
            self._run.skipped_lines += 1
            return
        if isinstance(event, RunHeader):
            self._header(event)
        elif isinstance(event, Alert):
            self._alerts.append(event)
        else:
            self._record(event)

    def _header(self, header: RunHeader) -> None:
        self._run.header, self._begins = header, True
        for number in range(self._taken_up, len(self._alerts)):
            alert = self._alerts[number]
            if alert is not None:
                heappush(self._older, (-alert.step, number))
        self._taken_up = len(self._alerts)

    def _record(self, record: Record) -> None:
        if self._begins:
            self._take_over(record.step)
        if record.step in self._records:
            self._run.superseded += 1
        else:
            heappush(self._steps, -record.step)
        self._records[record.step], self._begins = record, False

    def _take_over(self, step: int) -> None:
        """Drop what was written before the header of this step and of later ones; a record of this step is replaced."""
        while self._steps and -self._steps[0] > step:
            del self._records[-heappop(self._steps)]
            self._run.superseded += 1
        while self._older and -self._older[0][0] >= step:
            self._alerts[heappop(self._older)[1]] = None

    def joined(self) -> Run:
        """One run of all."""
        run = self._run
        run.alerts = Alerts(alert for alert in self._alerts if alert is not None)
        for _, record in sorted(self._records.items()):
            (run.unsampled if "unsampled" in record.flags else run.records).append(record)
        return run


def decode_event(line: bytes, header: RunHeader | None) -> Event:
    """The inverse of `encode_event`; `header` brings a record its labels. Raises one of `UNREADABLE`."""
    data = from_json(line.removeprefix(b"\xef\xbb\xbf"))
    kind = data.get("type") if isinstance(data, dict) else None
    if kind == "record":
        return Record.from_json(data, header)
    if kind == "alert":
        return Alert.from_json(data)
    if kind == "run":
        return RunHeader.from_json(data)
    raise ValueError(f"a line of type {kind!r}")
