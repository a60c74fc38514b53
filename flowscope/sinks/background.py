"""A sink that waits for somebody (a server) is written to from a thread of its own: no step waits for it."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from flowscope.faults import LOGGER
from flowscope.records import Event, Record

MOST = 256
"""Events that wait at the most; beyond that records are dropped."""
KEPT = 10
"""So many first records are never dropped."""
LAST_WAIT = 10.0
"""Seconds that `close` waits for what is still to be written."""


class BackgroundSink:
    """Writes to another sink from a thread; where that one is slower than events come, it drops records.

    The header, alerts, the first ten records and those with values that are not finite are never dropped. How many were
    is said in the notes of the record after them, and in the log at the end.

    Args:
        sink: that waits; where it raises, so does the next `write` here.
        most: events that wait at the most.
    """

    def __init__(self, sink: Any, most: int = MOST) -> None:
        self.sink, self.dropped, self._most = sink, 0, most
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._records = self._untold = 0
        self._busy = self._closed = False
        self._thread: tuple[int, threading.Thread] | None = None

    def __getattr__(self, name: str) -> object:
        # what a sink says of itself: takes_unsampled, keeps_trying, every_rank
        if name == "sink":
            raise AttributeError(name)
        return getattr(self.sink, name)

    def write(self, event: Event) -> None:
        """Let the event be written soon; raises what an earlier one raised."""
        with self._changed:
            error, self._error = self._error, None
            if error is not None:
                raise error
            if self._closed:
                return
            if isinstance(event, Record):
                self._records += 1
                if len(self._waiting) >= self._most and self._records > KEPT and is_finite(event):
                    self.dropped, self._untold = self.dropped + 1, self._untold + 1
                    return
                if self._untold:
                    note = f"{self._untold} records before this one were dropped: {type(self.sink).__name__} is slow"
                    event, self._untold = replace(event, notes=(*event.notes, note)), 0
            self._waiting.append(event)
            self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        """A forked child has no thread, and its own begins with what it writes."""
        if self._thread is None or self._thread[0] != os.getpid():
            thread = threading.Thread(target=self._run, name="flowscope sink", daemon=True)
            self._thread = os.getpid(), thread
            thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                event, self._busy = self._waiting.popleft(), True
            try:
                self.sink.write(event)
            except Exception as error:
                with self._changed:
                    self._error = self._error or error
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def close(self) -> None:
        """Wait up to ten seconds for what is still to be written, and close the sink."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._thread is not None and self._thread[0] == os.getpid():
                self._changed.wait_for(lambda: not (self._waiting or self._busy), LAST_WAIT)
            left, error = len(self._waiting) + self.dropped, self._error
            self._waiting.clear()
            self._error, self.dropped = None, 0
        if left:
            LOGGER.warning("flowscope: %s was too slow: %d records did not reach it.", type(self.sink).__name__, left)
        self.sink.close()
        if error is not None:
            raise error


def is_finite(record: Record) -> bool:
    """Whether nothing in a record says that a value was not finite; NaN in a metric means "not seen"."""
    loss_fine = record.loss is None or bool(np.isfinite(record.loss))
    counts = [value for key, value in record.metrics.items() if key == "canary" or key.startswith("nonfinite")]
    return loss_fine and not any((np.nan_to_num(count) > 0).any() for count in counts)
