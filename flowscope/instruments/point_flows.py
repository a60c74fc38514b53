"""The flows through depth, and through time where each step is a call: what was deposited at their points.

Axis letters: P points of a flow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flowscope.config import WatchConfig
from flowscope.discovery.view import ModelView
from flowscope.hooks.points import placed
from flowscope.instruments import cosines, gradient_flow, rank, widths
from flowscope.instruments.flow_observer import FlowObserver, PointKey
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.instruments.merge_sites import group_by_flow
from flowscope.instruments.point_rows import PointRows
from flowscope.probes import compiled, matrices, summaries
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.hooks import Hooks
from flowscope.probes.record_builder import RecordBuilder
from flowscope.probes.statistics import BACKWARDS, COLUMNS, ELEMENTS, GRAD_SQUARE
from flowscope.records import FlowLayout

MATRIX_POINTS = 128
"""The cosine matrix has at most so many evenly spaced points."""


class PointFlows(Instrument):
    """The flows of a model whose points are hidden states that modules return."""

    name = "flows"
    families = ("flow", "depth")
    counts_canary = True
    metrics = (*gradient_flow.METRICS, *cosines.METRICS, *rank.METRICS, *widths.METRICS)
    buffer: DepositBuffer

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self.flows: list[FlowObserver] = []
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
        self.buffer = DepositBuffer(placed(hooks.statistics, COLUMNS)[1])
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
            observer = FlowObserver(
                view.model,
                flow,
                self._config,
                hooks.switch,
                hooks.canary,
                hooks,
                self.buffer,
                borrowed,
                streams=flow.name in streams,
            )
            observer.on_drop = hooks.on_stale_run
            built[flow.name] = observer
            if flow.kind != "network":
                owners.update(dict.fromkeys(flow.outputs, observer))
        self.flows = [built[flow.name] for flow in view.flows if flow.name in built]
        self._fixed = self.buffer.rows

    def layout(self) -> int:
        """How many points are known from the structure alone."""
        return self._fixed

    def runs(self) -> int:
        """How often blocks ran with gradient."""
        return sum(flow.runs for flow in self.flows)

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forwards are counted from 0 again."""
        self._forwards = 0

    def start_forward(self) -> None:
        """Calls are counted from 0 again."""
        self._forwards += 1
        for flow in self.flows:
            flow.start_forward(training=True)

    def start_evaluation(self) -> None:
        """What runs now is not looked at."""
        for flow in self.flows:
            flow.start_forward(training=False)

    def set_aside(self) -> None:
        """Keep the rows apart."""
        self._aside += self.buffer.take()

    def recall(self, *, counts: bool) -> None:
        """Whether the rows that were set aside count after all."""
        self._aside = self._aside if counts else []

    def take(self) -> Taken:
        """The rows of all points; on the slow schedule Gram matrices and slices of hidden states."""
        rows, self._aside = [*self.buffer.take(), *self._aside], []
        slow = {("gram", flow.flow.name, key): gram for flow in self.flows for key, gram in flow.grams.items()}
        slow.update(
            {("slice", flow.flow.name, key): flow.slices[key] for flow in self.flows for key in _thinned(flow.slices)}
        )
        points = {flow.flow.name: flow.points() for flow in self.flows}
        sums = PointRows(self.buffer.columns, rows, self.flows, self._fixed)
        step = StepOfFlows(sums, points, self._forwards, dict.fromkeys(slow))
        return Taken(self.name, [*rows, *slow.values()], partial(self._read, step), sums.parts)

    def discard(self) -> None:
        """Forget what backward deposited."""
        self._aside = []
        self.buffer.clear()
        for flow in self.flows:
            flow.grams.clear()
            flow.slices.clear()

    def drop(self) -> None:
        """Forget also what forwards under way wait with."""
        self.discard()
        for flow in self.flows:
            flow.forget()

    # -- the record ----------------------------------------------------------------------------------------------------

    def _read(self, step: StepOfFlows, out: RecordBuilder, parts: list[Array]) -> None:
        step.take_over(parts)
        stages = tuple(self._view.stages)
        for flow in self.flows:
            # evaluations inside a right-hand side are no chain
            if not stages or not all(path.startswith(stages) for path in flow.flow.outputs):
                self._hooks.faults.guard(flow.part, self._flow, out, flow, step)

    def _flow(self, out: RecordBuilder, flow: FlowObserver, step: StepOfFlows) -> None:
        points = step.points[flow.flow.name]
        labels = flow.labels(points)
        picked, calls = step.rows.of(flow, points)
        if compiled.was_traced(picked[:, ELEMENTS] > 0, calls.sum(0)):
            calls = np.full_like(calls, np.nan)
            labels = compiled.with_calls(labels, picked[:, BACKWARDS], step.forwards)
            self._note_compiled(out, labels, picked)
        out.flow(FlowLayout(flow.flow.name, flow.flow.kind, labels, labels[1:], self._cell(flow)))
        metrics = summaries.flow_metrics(picked)
        metrics["forward_calls"], metrics["tracked_calls"] = calls
        if flow.depth:
            metrics.update(summaries.depth_metrics(picked))
        if flow.flow.kind == "concat":
            metrics["group_grad_norm"] = metrics["grad_norm"]
            metrics["width"] = np.array([flow.widths.get(key, np.nan) for key in points])
        metrics.update(flow.seen.metrics(picked))
        out.along(metrics, labels)
        self._slow(out, flow, step, labels, picked)

    def _note_compiled(self, out: RecordBuilder, labels: Sequence[str], picked: Array) -> None:
        out.note(compiled.NOT_MEASURED)
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

    @staticmethod
    def _slow(out: RecordBuilder, flow: FlowObserver, step: StepOfFlows, labels: Sequence[str], picked: Array) -> None:
        points, name = step.points[flow.flow.name], flow.flow.name
        grams = [step.slow.get(("gram", name, key)) for key in points]
        if any(gram is not None for gram in grams):
            found = [np.nan if g is None else matrices.effective_rank_of_gram(torch.from_numpy(g)) for g in grams]
            out.add("effective_rank", np.array(found), labels)
        slices = [step.slow.get(("slice", name, key)) for key in points]
        units = [unit for unit in slices if unit is not None]
        held = np.array([unit is not None for unit in slices], dtype=bool)
        # states of another size (after a stride) have other positions: no cosine between them
        sizes = np.round(picked[held, ELEMENTS] / picked[held, BACKWARDS])
        if len(units) > 1 and len({u.shape for u in units}) == 1 and len(set(sizes.tolist())) == 1:
            matrix = matrices.cosine_matrix(torch.from_numpy(np.stack(units)))
            out.add("cosine_matrix", matrix, [label for label, shown in zip(labels, held, strict=True) if shown])


@dataclass
class StepOfFlows:
    """What one step showed of the flows.

    Attributes:
        rows: the sums at the points.
        points: of each flow, in depth order.
        forwards: how often the root ran with gradient (0: it runs inside compiled code).
        slow: ("gram" or "slice", flow, point) -> the host's copy.
    """

    rows: PointRows
    points: Mapping[str, list[PointKey]]
    forwards: int
    slow: dict[tuple[str, str, PointKey], Array | None]

    def take_over(self, parts: Sequence[Array]) -> None:
        """Put the host's copies in their places: first the rows, then the slow ones."""
        first = len(parts) - len(self.slow)
        self.rows.read(parts[:first])
        self.slow.update(zip(self.slow, parts[first:], strict=True))


def _thinned(slices: Iterable[PointKey]) -> list[PointKey]:
    keys = sorted(slices)
    return keys[:: -(-len(keys) // MATRIX_POINTS)] if keys else []
