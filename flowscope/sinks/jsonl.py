"""One JSON object a line in `flowscope.jsonl`: plain text that any tool reads and that a kill cannot spoil."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from flowscope.records import ALL_DIGITS, Event, Record, RunHeader, strict_json
from flowscope.sinks.append_file import AppendFile

FILE_NAME = "flowscope.jsonl"


class JsonlSink:
    """Appends each event as one line of JSON to `log_dir/flowscope.jsonl`.

    A kill at any moment loses at most the line being written; a full disk makes `write` raise and leaves the earlier
    lines alone. What did not fit is written with a later event, and where too much waited the next record says how many
    lines are missing. A file of an earlier process is continued (`flowscope.sinks.read_run` says how the two are
    joined).

    Args:
        log_dir: the folder, created where it is missing.

    Raises:
        FlowscopeError: the folder cannot be written.
    """

    takes_unsampled = True
    """Also what the canary alone saw at a step that was not sampled: `flowscope diagnose` judges by it."""

    keeps_trying = True

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._file = AppendFile(log_dir, FILE_NAME, line_based=True)
        self.path = self._file.path
        self._header: RunHeader | None = None

    def write(self, event: Event) -> None:
        """Append the event.

        Raises:
            OSError: the line did not fit or the sink is closed; the file ends with the last complete line.
        """
        lost = self._file.lost
        if self._header is not None and (self._file.renew() or lost):
            self._file.write(encode_event(self._header))
        if lost and isinstance(event, Record):
            self._file.lost = 0
            event = replace(event, notes=(*event.notes, f"{lost} lines before this one could not be written"))
        if isinstance(event, RunHeader):
            self._header = event
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
