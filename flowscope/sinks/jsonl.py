"""One JSON object a line in `flowscope.jsonl`: plain text that any tool reads and that a kill cannot spoil."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from flowscope.errors import FlowscopeError
from flowscope.records import Alert, Event, Record, Run, RunHeader, strict_json
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
    with file.open("rb") as lines:
        return _joined(filter(bytes.strip, lines))


def _joined(lines: Iterable[bytes]) -> Run:
    """One run of the lines of one or more processes."""
    run = Run()
    by_step: dict[int, Record] = {}
    # how many alerts stood before the last header, while no record has followed it yet
    before: int | None = None
    for line in lines:
        try:
            event = decode_event(line, run.header)
        except UNREADABLE:
            run.skipped_lines += 1
            continue
        if isinstance(event, RunHeader):
            run.header, before = event, len(run.alerts)
        elif isinstance(event, Alert):
            run.alerts.append(event)
        else:
            taken_over = [step for step in by_step if step == event.step or (before is not None and step > event.step)]
            for step in taken_over:
                del by_step[step]
            run.superseded += len(taken_over)
            if before is not None:
                run.alerts[:before] = [alert for alert in run.alerts[:before] if alert.step < event.step]
            by_step[event.step], before = event, None
    for _, record in sorted(by_step.items()):
        (run.unsampled if "unsampled" in record.flags else run.records).append(record)
    return run


UNREADABLE = (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What `decode_event` raises for a line that is incomplete or not flowscope's."""


def decode_event(line: bytes, header: RunHeader | None) -> Event:
    """The inverse of `encode_event`; `header` brings a record its labels. Raises one of `UNREADABLE`."""
    data = json.loads(line)
    if data["type"] == "record":
        return Record.from_json(data, header)
    kinds: dict[str, type[Alert | RunHeader]] = {"alert": Alert, "run": RunHeader}
    return kinds[data["type"]].from_json(data)
