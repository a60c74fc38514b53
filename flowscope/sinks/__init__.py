"""Where records and alerts go. A sink is any object with `write(event)` and `close()`; nothing here imports torch.

    JsonlSink(log_dir)         flowscope.jsonl, one event a line; read_run(path) reads it back
    ConsoleSink()              one line a record, alerts in full
    MemorySink()               the last records and alerts
    TensorBoardSink(log_dir)   depth profiles as tensors, a few scalars with their layout, images, alerts as text
    BackgroundSink(sink)       another sink, written to from a thread: for what waits for a server

A sink with the attribute `waits_for_server = True` is put into a `BackgroundSink` by `watch`.

Sinks raise on faults and stay closable afterwards; who writes to them catches, reports once and stops using them, but
those that `keeps_trying` says so of: the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flowscope.records import Event, Run
from flowscope.sinks.background import BackgroundSink
from flowscope.sinks.console import ConsoleSink, depth_profile_text, sparkline
from flowscope.sinks.jsonl import JsonlSink
from flowscope.sinks.memory import MemorySink
from flowscope.sinks.reading import read_run

if TYPE_CHECKING:
    from flowscope.sinks.tensorboard import TensorBoardSink

__all__ = [
    "BackgroundSink",
    "ConsoleSink",
    "JsonlSink",
    "MemorySink",
    "Run",
    "Sink",
    "TensorBoardSink",
    "depth_profile_text",
    "read_run",
    "sparkline",
]


@runtime_checkable
class Sink(Protocol):
    """What receives events: a `RunHeader` first (and again when the layout changes), then records and alerts."""

    def write(self, event: Event) -> None:
        """Take one event; raises where it cannot (the earlier events stay readable)."""

    def close(self) -> None:
        """Release what is held; may be called twice and after a failed `write`."""


def __getattr__(name: str) -> object:
    # tensorboard takes a moment to import, and most sinks do without it
    if name == "TensorBoardSink":
        from flowscope.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
