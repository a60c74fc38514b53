"""A sink that waits for a server: no step waits for it, and what it cannot take in time is dropped and said."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
from watch_models import Stack, sgd, train, watched

from flowscope.records import Alert, Event, Record, RunHeader
from flowscope.sinks import BackgroundSink, MemorySink
from flowscope.sinks.background import KEPT

PATIENCE = 60.0


class Server(MemorySink):
    """Takes an event once the door is open."""

    waits_for_server = True
    takes_unsampled = True

    def __init__(self) -> None:
        super().__init__()
        self.door, self.came, self.closed = threading.Event(), threading.Event(), 0

    def write(self, event: Event) -> None:
        self.came.set()
        assert self.door.wait(PATIENCE)
        if isinstance(event, Record) and event.step < 0:
            raise OSError("the server is gone")
        super().write(event)

    def close(self) -> None:
        self.closed += 1


def alert(step: int) -> Alert:
    return Alert("kind", "warning", "", step, 0.0, 0.0, "message", "advice")


def record(step: int, bad: float = 0.0) -> Record:
    return Record(step, 1.0, {"canary": np.array([0.0, bad, 0.0, 0.0])})


def test_what_is_too_much_is_dropped_and_said_but_never_what_matters(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    sink = BackgroundSink(server, most=4)
    assert sink.takes_unsampled
    sink.write(RunHeader())
    assert server.came.wait(PATIENCE)  # the header is under way, the rest waits
    for step in range(KEPT + 5):
        sink.write(record(step))
    sink.write(alert(20))
    sink.write(record(21, bad=3.0))
    sink.write(Record(22, float("nan")))
    sink.write(RunHeader("later"))
    sink.write(record(23))
    assert sink.dropped == 6
    server.door.set()
    with caplog.at_level(logging.WARNING, "flowscope"):
        sink.close()
    assert [r.step for r in server.records] == [*range(KEPT), 21, 22]
    assert [r.notes for r in server.records if r.notes] == [("5 records before this one were dropped: Server is slow",)]
    assert server.records[KEPT].notes
    assert [a.step for a in server.alerts] == [20]
    assert server.header == RunHeader("later")
    assert "6 records did not reach it" in caplog.text
    sink.write(record(30))
    sink.close()
    assert server.closed == 2
    assert len(server.records) == KEPT + 2


def test_what_the_sink_raises_comes_with_the_next_event_and_at_the_end() -> None:
    server = Server()
    server.door.set()
    sink = BackgroundSink(server)
    sink.write(record(-1))
    with sink._changed:
        assert sink._changed.wait_for(lambda: sink._error is not None, PATIENCE)
    with pytest.raises(OSError, match="server is gone"):
        sink.write(record(1))
    sink.write(record(-2))
    with pytest.raises(OSError, match="server is gone"):
        sink.close()
    assert server.closed == 1


def test_training_goes_on_while_the_server_does_not_answer() -> None:
    model, server = Stack(1), Server()
    optimizer = sgd(model)
    scope = watched(model, optimizer, sinks=[server])
    train(scope, model, optimizer, 12)  # would else never end
    assert len(scope.records) == 12
    server.door.set()
    scope.close()
    assert [r.step for r in server.records] == [*range(12)]
    assert server.header is not None
    assert server.closed
