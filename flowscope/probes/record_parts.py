"""What is added to a record beside the flows through depth: flows through time, gates, routers, solvers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flowscope.instruments.instrument import table_rows as added
from flowscope.probes import site_summaries, summaries
from flowscope.probes.gates import GateObserver
from flowscope.probes.record_builder import RecordBuilder
from flowscope.probes.recurrent import Replay
from flowscope.probes.statistics import BACKWARDS, COLUMNS, ELEMENTS, GRAD_SQUARE, SQUARE
from flowscope.probes.through_time import TimeObserver
from flowscope.probes.trajectories import TrajectoryObserver
from flowscope.records import FlowLayout

Array = NDArray[np.float64]
SOLVED = "ODE"
"""The cell of a flow through a differential equation."""
FOUND = "found"
"""The cell of a flow of gates of which the user named none."""
KEEPING = {"LSTM": "forget", "GRU": "update"}
"""The gate of a recurrent layer that keeps its state."""


def tensors_of(replay: Replay) -> list[Tensor]:
    """What of a replay goes to the host, in the order `add_time_flow` reads it."""
    counts = replay.counts.to(replay.grad_square.dtype)
    gates = [] if replay.gates is None else [replay.gates]
    return [replay.grad_square, replay.act_square, counts, *gates]


def add_time_flow(out: RecordBuilder, time: TimeObserver, parts: list[Array], note: str) -> None:
    """The flows through time of a fused recurrent layer: one per layer and direction, points in processing order."""
    gradients, activations, counts, *gates = parts
    hidden = time._rnn.proj_size or time._rnn.hidden_size
    for row, name in enumerate(time.row_names()):
        order = slice(None, None, -1) if name.endswith("_reverse") else slice(None)
        labels = [f"{time.path}#{t}" for t in range(gradients.shape[1])][order]
        out.flow(FlowLayout(name, "time", tuple(labels), tuple(labels[1:]), type(time._rnn).__name__))
        rows = np.zeros((gradients.shape[1], COLUMNS))
        rows[:, GRAD_SQUARE], rows[:, SQUARE] = gradients[row][order], activations[row][order]
        rows[:, ELEMENTS] = counts[order] * hidden
        rows[:, BACKWARDS] = ~np.isnan(gradients[row][order])
        out.along(summaries.flow_metrics(rows), labels)
        for metric, values in site_summaries.gate_metrics([table[row] for table in gates]).items():
            if gates:
                out.add(metric, values, [f"{name}#{KEEPING[time._rnn.mode]}"])
    out.note(note)


def add_trajectory(out: RecordBuilder, trajectory: TrajectoryObserver, rows: Array) -> None:
    """The states of a differential equation's solver."""
    labels = trajectory.labels(len(rows))
    out.flow(FlowLayout(trajectory.path, "time", tuple(labels), tuple(labels[1:]), SOLVED))
    out.along(summaries.flow_metrics(rows), labels)


def add_gates(out: RecordBuilder, gates: GateObserver, parts: list[Array]) -> None:
    """The gates of the user's own model, as a flow of that name without points."""
    rows = gates.shown()
    if not rows:
        return
    out.flow(FlowLayout(gates.NAME, "gates", (), (), "" if gates.named else FOUND))
    for name, values in gates.metrics(added(parts, gates.buffer.columns), rows).items():
        out.add(name, values, [gates.labels[row] for row in rows])
