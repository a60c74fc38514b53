"""What every sink keeps to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flowscope.sinks
from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import ConsoleSink, JsonlSink, MemorySink, Sink, TensorBoardSink

SINKS: dict[str, Callable[[Path], Sink]] = {
    "jsonl": JsonlSink,
    "console": lambda folder: ConsoleSink(),
    "memory": lambda folder: MemorySink(),
    "tensorboard": TensorBoardSink,
}

HEADER = RunHeader("0.1", (FlowLayout("layers", "blocks", ("a", "b", "c"), ("b", "c")),), {"gain": ("b", "c")})
ALERT = Alert("dead_units", "warning", "b", 1, 1.0, 0.9, "dead", "revive")


def record(step: int) -> Record:
    return Record(step, 1.0, {"gradient_product": np.array([0.5, 2.0, 1.0]), "gain": np.array([0.25, 2.0])})


@pytest.mark.parametrize("name", SINKS)
def test_contract(name: str, tmp_path: Path) -> None:
    sink = SINKS[name](tmp_path / "deep" / "er")
    assert isinstance(sink, Sink)
    for event in (HEADER, record(0), record(1), ALERT, HEADER, record(2)):
        sink.write(event)
    sink.close()
    sink.close()


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_leaves_the_events_alone(name: str, tmp_path: Path) -> None:
    event = record(0)
    before = event.to_json()
    sink = SINKS[name](tmp_path)
    sink.write(event)
    sink.close()
    assert event.to_json() == before


def test_memory_is_bounded_and_keeps_the_latest() -> None:
    sink = MemorySink(max_records=3, max_alerts=2)
    assert sink.header is None
    sink.write(HEADER)
    for step in range(5):
        sink.write(record(step))
        sink.write(Alert("dead_units", "warning", "b", step, 1.0, 0.9, "dead", "revive"))
    sink.close()
    assert sink.header is HEADER
    assert [r.step for r in sink.records] == [2, 3, 4]
    assert [a.step for a in sink.alerts] == [3, 4]


def test_every_exported_name_exists() -> None:
    assert all(hasattr(flowscope.sinks, name) for name in flowscope.sinks.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = flowscope.sinks.Nothing


LIGHT = """
import sys, flowscope.sinks
print([name for name in ("torch", "tensorboard", "PIL", "tensorflow") if name in sys.modules])
flowscope.sinks.TensorBoardSink
print([name for name in ("torch", "tensorflow") if name in sys.modules])
"""


def test_sinks_import_neither_torch_nor_early_tensorboard() -> None:
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.split("\n")[:2] == ["[]", "[]"]
