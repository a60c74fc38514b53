"""The flows through depth, and through time where each step is a call: what was deposited at their points.

Axis letters: P points of a flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
from torch import Tensor

from flowscope.config import WatchConfig
from flowscope.hooks import compiled
from flowscope.hooks.calls import PointKey
from flowscope.hooks.flow_observer import FlowObserver
from flowscope.hooks.hooks import Hooks
from flowscope.hooks.lineage import Lineage
from flowscope.hooks.points import FlowStep, PointMeasure, Stranger, placed
from flowscope.instruments.beside import METRICS as BESIDE
from flowscope.instruments.beside import Beside
from flowscope.instruments.cosines import METRICS as COSINES
from flowscope.instruments.cosines import Cosines
from flowscope.instruments.exact_points import METRICS as EXACT
from flowscope.instruments.exact_points import ExactPoints
from flowscope.instruments.gradient_flow import METRICS as GRADIENT_FLOW
from flowscope.instruments.gradient_flow import Norms
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.instruments.merge_sites import group_by_flow
from flowscope.instruments.point_rows import PointRows
from flowscope.instruments.rank import METRICS as RANK
from flowscope.instruments.rank import Rank
from flowscope.instruments.widths import METRICS as WIDTHS
from flowscope.instruments.widths import Widths
from flowscope.model.plan import Flow
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.records import BRANCHES, FlowLayout
from flowscope.sums import point_metrics
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.statistics import BACKWARDS, COLUMNS, ELEMENTS, GRAD_SQUARE, SQUARE, TO_INPUT

EXACT_AT = COLUMNS + Beside.columns
"""Where the columns of `ExactPoints` begin, if there are any."""
BETWEEN = ("gain", "gradient_product")
"""Norms of two points of one chain: branches have none."""


class PointFlows(Instrument):
    """The flows of a model whose points are hidden states that modules return."""

    name = "flows"
    families = ("flow", "depth")
    counts_canary = True
    metrics = (*GRADIENT_FLOW, *BESIDE, *COSINES, *RANK, *WIDTHS, *EXACT)
    buffer: DepositBuffer

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self.flows: list[FlowObserver] = []
        self._lineage = Lineage()
        self._forwards = 0
        self._aside: list[Tensor] = []
        """Rows of passes of the first step that left no gradient: inner ones of an attack or of a meta-learner, or
        parts of a step that never fills `.grad`."""

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One for all flows: one of them may borrow the points of others."""
        return [cls(config)] if any(not flow.fused for flow in view.flows) else []

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at the blocks of each flow."""
        self._exact = self._config.exact_steps > 0
        start = EXACT_AT + 2 * ExactPoints.columns if self._exact else EXACT_AT
        self._further, columns = placed(hooks.statistics, start)
        ends = [(first + statistic.columns, statistic.maxima) for statistic, first in self._further]
        self.buffer = DepositBuffer(columns, [column for end, maxima in ends for column in range(end - maxima, end)])
        self._view, self._hooks = view, hooks
        # streams have no one hidden state: their depth metrics are those of the sub-layer inputs (merging/observed.py)
        streams = {name for name, group in group_by_flow(view.connections, view.flows) if group[0][1].streams}
        owners: dict[str, FlowObserver] = {}
        built: dict[str, FlowObserver] = {}
        # the flow over all stages borrows the stages' points, so it is built after them and listed before them
        for flow in sorted((f for f in view.flows if not f.fused), key=lambda f: f.kind == "network"):
            borrowed = {p: owners[p] for p in flow.outputs if p in owners}
            if flow.entry is not None and flow.entry in owners and owners[flow.entry].flow.entry == flow.entry:
                borrowed[flow.entry] = owners[flow.entry]
            measures = self._measures(flow, hooks, streams=flow.name in streams)
            observer = FlowObserver(view.model, flow, measures, hooks, self.buffer, borrowed, self._lineage)
            built[flow.name] = observer
            if flow.kind != "network":
                owners.update(dict.fromkeys(flow.outputs, observer))
        self.flows = [built[flow.name] for flow in view.flows if flow.name in built]
        self._fixed = self.buffer.rows

    def _measures(self, flow: Flow, hooks: Hooks, *, streams: bool) -> list[PointMeasure]:
        """What is measured at the points of a flow, in the order of the record."""
        measures: list[PointMeasure] = [Norms(self.buffer, SQUARE), Beside(self.buffer, COLUMNS)]
        depth = "depth" in self._config.metrics and flow.kind in ("blocks", "stage", "chain", "concat") and not streams
        if depth:
            limit, first = self._config.positions, flow.entry is None
            measures.append(Cosines(self.buffer, TO_INPUT, limit, origin_first=first))
        if flow.kind == "concat":
            measures.append(Widths())
        if self._exact:
            measures.append(ExactPoints(self.buffer, EXACT_AT, hooks.switch))
        measures += [Stranger(statistic, self.buffer, at, hooks) for statistic, at in self._further]
        return [*measures, Rank(hooks.switch)] if depth else measures

    def layout(self) -> int:
        """How many points are known from the structure alone."""
        return self._fixed

    def runs(self) -> int:
        """How often blocks ran with gradient."""
        return sum(flow.calls.runs for flow in self.flows)

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forwards are counted from 0 again."""
        self._forwards = 0

    def start_forward(self) -> None:
        """Calls are counted from 0 again."""
        self._forwards += 1
        for flow in self.flows:
            flow.calls.begin_forward(training=True)

    def start_evaluation(self) -> None:
        """What runs now is not looked at."""
        for flow in self.flows:
            flow.calls.begin_forward(training=False)

    def set_aside(self) -> None:
        """Keep the rows apart."""
        self._aside += self.buffer.take()

    def recall(self, *, counts: bool) -> None:
        """Whether the rows that were set aside count after all."""
        self._aside = self._aside if counts else []

    def take(self) -> Taken:
        """The rows of all points, and what measures kept beside."""
        rows, self._aside = [*self.buffer.take(), *self._aside], []
        kept = [[measure.take() for measure in flow.seen.measures] for flow in self.flows]
        sums = PointRows(self.buffer, rows, self.flows, self._fixed)
        points = [flow.calls.points() for flow in self.flows]
        on = [flow.lineage.on_chain(of_flow) for flow, of_flow in zip(self.flows, points, strict=True)]
        step = StepOfFlows(sums, points, on, self._forwards, kept)
        tensors = [tensor for flow in kept for taken in flow for some in taken.values() for tensor in some]
        return Taken(self.name, [*rows, *tensors], partial(self._read, step), sums.parts)

    def discard(self) -> None:
        """Forget what backward deposited."""
        self._aside = []
        self.buffer.clear()
        for flow in self.flows:
            flow.seen.forget()

    def drop(self) -> None:
        """Forget also what forwards under way wait with."""
        self.discard()
        self._lineage.step_ended()
        for flow in self.flows:
            flow.forget()

    # -- the record ----------------------------------------------------------------------------------------------------

    def _read(self, step: StepOfFlows, out: RecordBuilder, parts: list[Array]) -> None:
        step.take_over(parts)
        stages = tuple(self._view.stages)
        # evaluations inside a right-hand side are no chain
        shown = [at for at, flow in enumerate(self.flows) if not (stages and _inside(flow, stages))]
        for part in (self._flow, self._branches):  # branches have no place among the flows: they come behind
            for at in shown:
                self._hooks.faults.guard(self.flows[at].fuse, part, out, self.flows[at], step, at)

    def _flow(self, out: RecordBuilder, flow: FlowObserver, step: StepOfFlows, at: int) -> None:
        points, (rows, calls) = step.points[at], step.rows.of(flow, step.points[at])
        on = step.on[at] = flow.lineage.confirmed(points, step.on[at], calls[1], rows[:, BACKWARDS])
        if sum(on) < 2 <= len(points):
            step.on[at] = [False] * len(points)
            return
        points, rows, calls = [*compress(points, on)], rows[on], calls[:, on]
        labels = flow.labels(points)
        if compiled.was_traced(rows[:, ELEMENTS] > 0, calls.sum(0)):
            calls = np.full_like(calls, np.nan)
            labels = compiled.with_calls(labels, rows[:, BACKWARDS], step.forwards)
            self._note_compiled(out, labels, rows)
        out.flow(FlowLayout(flow.flow.name, flow.flow.kind, labels, labels[1:], self._cell(flow)))
        for measure, kept in zip(flow.seen.measures, step.kept[at], strict=True):
            measure.read(out, FlowStep(points, labels, rows, calls, kept))

    def _branches(self, out: RecordBuilder, flow: FlowObserver, step: StepOfFlows, at: int) -> None:
        """What runs beside the chain, or instead of one: each place has its norms, and no neighbour."""
        points = [point for point, on in zip(step.points[at], step.on[at], strict=True) if not on]
        if not points:
            return
        labels, (rows, calls) = flow.labels(points), step.rows.of(flow, points)
        name = f"{flow.flow.name}.{BRANCHES}" if any(step.on[at]) else flow.flow.name
        out.flow(FlowLayout(name, BRANCHES, labels, ()))
        norms = {**point_metrics.flow_metrics(rows), "forward_calls": calls[0], "tracked_calls": calls[1]}
        for metric, values in norms.items():
            if metric not in BETWEEN:
                out.add(metric, values, labels)

    def _note_compiled(self, out: RecordBuilder, labels: Sequence[str], picked: Array) -> None:
        out.note(compiled.NOT_MEASURED)
        out.tell({"traced": True})
        if not compiled.HOOKED_INTERMEDIATES:
            out.note(compiled.FORWARD_ONLY)
            self._hooks.warn_once(compiled.FORWARD_ONLY)
        hidden = ~(picked[:, BACKWARDS] > 0) | np.isnan(picked[:, GRAD_SQUARE])
        out.note(compiled.hidden_points(labels, hidden) if compiled.HOOKED_INTERMEDIATES else "")

    def _cell(self, flow: FlowObserver) -> str:
        outputs = flow.flow.outputs
        if flow.flow.kind != "time" or not outputs:
            return ""
        return type(self._view.model.get_submodule(outputs[-1])).__name__


def _inside(flow: FlowObserver, stages: tuple[str, ...]) -> bool:
    return all(path.startswith(stages) for path in flow.flow.outputs)


@dataclass
class StepOfFlows:
    """What one step showed of the flows.

    Attributes:
        rows: the sums at the points.
        points: of each flow, in depth order.
        on: which of them are on its chain.
        forwards: how often the root ran with gradient (0: it runs inside compiled code).
        kept: of each flow and measure, what it took beside the rows; on the host once `take_over` was called.
    """

    rows: PointRows
    points: Sequence[list[PointKey]]
    on: list[list[bool]]
    forwards: int
    kept: list[list[dict[PointKey, list[Any]]]]

    def take_over(self, parts: Sequence[Array]) -> None:
        """Put the host's copies in their places: first the rows, then what was kept."""
        rest = iter(parts[self.rows.devices :])
        self.rows.read(parts[: self.rows.devices])
        self.kept = [
            [{key: [next(rest) for _ in some] for key, some in taken.items()} for taken in flow] for flow in self.kept
        ]
