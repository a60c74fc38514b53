"""One JSON object a line in `flowscope.jsonl`: plain text that any tool reads and that a kill cannot spoil."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Event, Record, RunHeader, strict_json
from flowscope.sinks.append_file import AppendFile

FILE_NAME = "flowscope.jsonl"
ALL_DIGITS = 17
"""Of a float64."""


class JsonlSink:
    """Appends each event as one line of JSON to `log_dir/flowscope.jsonl`.

    A kill at any moment loses at most the line being written; a full disk makes `write` raise and leaves the earlier
    lines alone. A file of an earlier process is continued (`read_run` says how the two are joined).

    Args:
        log_dir: the folder, created where it is missing.

    Raises:
        FlowscopeError: the folder cannot be written.
    """

    takes_unsampled = True
    """Also what the canary alone saw at a step that was not sampled: `flowscope diagnose` judges by it."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._file = AppendFile(log_dir, FILE_NAME, line_based=True)
        self.path = self._file.path

    def write(self, event: Event) -> None:
        """Append the event.

        Raises:
            OSError: the line did not fit or the sink is closed; the file ends with the last complete line.
        """
        self._file.write(encode_event(event))

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        self._file.close()


def encode_event(event: Event) -> bytes:
    """The event as one line of strict JSON (RFC 8259: no NaN or Infinity tokens), ended by a newline."""
    data = event.to_json()
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):  # a limit set to inf, a numpy scalar, a path in the configuration
        text = json.dumps(strict_json(data, ALL_DIGITS), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


@dataclass
class Run:
    """What `read_run` found.

    Attributes:
        header: the last header, None where the file has none.
        records: by step, one a step; each carries the labels of the header before it.
        alerts: in the order they were written.
        skipped_lines: lines that are incomplete (a kill, or a writer at work) or not flowscope's.
        superseded: records that a later record of the same step, or a resumed process, replaced.
        unsampled: what the finiteness canary alone saw, at steps that were not sampled.
    """

    header: RunHeader | None = None
    records: list[Record] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    skipped_lines: int = 0
    superseded: int = 0
    unsampled: list[Record] = field(default_factory=list)


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file of a run, from itself or the folder that holds it."""
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run back, however it ended.

    A file may come from several processes, one after the other. A process that resumes from a checkpoint repeats steps
    that the one before had already done, and those belong to a path that was given up. So the first record after a
    header says where its process takes over: records and alerts of that step and later that were written before the
    header are dropped. Between headers nothing is dropped but a record that a later one of the same step replaces.

    Args:
        path: the file, or the folder that holds `flowscope.jsonl`.

    Returns:
        A `Run`; lines that cannot be understood are counted, never raised.

    Raises:
        FlowscopeError: there is no such file.
    """
    file = file_of(path)
    if not file.is_file():
        raise FlowscopeError(
            f"read_run({os.fspath(path)!r}): there is no file {os.fspath(file)!r}; expected {FILE_NAME} or the folder "
            "that holds it: the log_dir given to flowscope.watch(model, log_dir=...)."
        )
    joiner = _Joiner()
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                joiner.add(line)
    return joiner.run()


class _Joiner:
    """Joins the lines of one or more processes into one run."""

    def __init__(self) -> None:
        self.joined = Run()
        self.records: dict[int, Record] = {}
        # what was written before the last header, while no record has followed it yet
        self.before: tuple[set[int], int] | None = None

    def add(self, line: bytes) -> None:
        """Take one line, or count it as skipped."""
        try:
            event = decode_event(line, self.joined.header)
        except UNREADABLE:
            self.joined.skipped_lines += 1
            return
        if isinstance(event, RunHeader):
            self.joined.header = event
            self.before = (set(self.records), len(self.joined.alerts))
        elif isinstance(event, Alert):
            self.joined.alerts.append(event)
        else:
            self._take_over(event.step)
            self.joined.superseded += event.step in self.records
            self.records[event.step] = event

    def _take_over(self, step: int) -> None:
        if self.before is None:
            return
        steps, count = self.before
        self.before = None
        for old in [s for s in steps if s >= step]:
            del self.records[old]
            self.joined.superseded += 1
        self.joined.alerts = [a for i, a in enumerate(self.joined.alerts) if i >= count or a.step < step]

    def run(self) -> Run:
        """The joined run."""
        for _, record in sorted(self.records.items()):
            (self.joined.unsampled if "unsampled" in record.flags else self.joined.records).append(record)
        return self.joined


UNREADABLE = (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What `decode_event` raises for a line that is incomplete or not flowscope's."""


def decode_event(line: bytes, header: RunHeader | None) -> Event:
    """The inverse of `encode_event`; `header` brings a record its labels. Raises one of `UNREADABLE`."""
    data = json.loads(line)
    kind = data["type"]
    if kind == "record":
        return Record.from_json(data, header)
    if kind == "alert":
        return Alert.from_json(data)
    if kind == "run":
        return RunHeader.from_json(data)
    raise ValueError(f"unknown type of event: {kind!r}")
