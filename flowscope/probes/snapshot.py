"""One sampled step's deposits on their way to the host, and the record made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.instruments import Taken
from flowscope.instruments.instrument import table_rows as added
from flowscope.probes import compiled, matrices, record_parts, summaries
from flowscope.probes.buffer import HostCopy
from flowscope.probes.deposit import FlowObserver, PointKey
from flowscope.probes.known_streams import KnownStreams
from flowscope.probes.payload import Part, Sharing
from flowscope.probes.record_builder import RecordBuilder
from flowscope.probes.recurrent import Replay
from flowscope.probes.sharing import PartMaker
from flowscope.probes.sites import SiteObserver, grad_norms
from flowscope.probes.statistics import BACKWARDS, ELEMENTS, GRAD_SQUARE
from flowscope.probes.through_time import TimeObserver
from flowscope.records import FlowLayout, Record

if TYPE_CHECKING:
    from flowscope.probes.observation import Observation

Array = NDArray[np.float64]
MATRIX_POINTS = 128


class Snapshot:
    """One sampled step's deposits on their way to the host; `record` turns them into numbers."""

    def __init__(
        self, observation: Observation, optimizers: Iterable[Any], replays: Sequence[tuple[TimeObserver, Replay]]
    ) -> None:
        self._observation = observation
        self.shared = False
        """Whether its numbers are those of all ranks together."""
        self._tensors: list[Tensor] = []
        self._rows = self._keep(observation.take_rows())
        seen = [(i.fuse, observation.faults.guard(i.fuse, i.take)) for i in observation.instruments]
        self._taken: list[tuple[str, Taken, slice]] = [(f, t, self._keep(t.tensors)) for f, t in seen if t is not None]
        self._replays = [(time, self._keep(record_parts.tensors_of(r)), r.note) for time, r in replays]
        taken = [(t, observation.faults.guard(t.part, t.take)) for t in observation.trajectories]
        self._trajectories = [(t, self._keep([table])) for t, table in taken if table is not None]
        self._stages = tuple(t.prefix for t in observation.trajectories if t.seen)
        self._sites = [(site, self._keep(site.buffer.take())) for site in observation.sites]
        self._gates = (observation.gates, self._keep(observation.gates.buffer.take())) if observation.gates else None
        self._alignments = [(a, a.take()) for a in observation.alignments]
        self._points = {id(flow): flow.points() for flow in observation.flows}
        self._calls: dict[int, tuple[dict[PointKey, float], dict[PointKey, float]]] = {
            id(f): ({**f.forward_calls}, {**f.tracked_calls}) for f in observation.flows
        }
        self._grams = {id(f): self._keep_all(f.grams) for f in observation.flows}
        self._slices = {id(f): self._keep_all(self._thinned(f.slices)) for f in observation.flows}
        self._forwards = observation.passes.of_step()
        observation.parameters.let_go()
        self._copy = HostCopy(self._tensors)
        self._replaced: dict[tuple[int, int], list[Array]] = {}

    def parts(self, sharing: Sharing, agreed: Mapping[str, int]) -> list[Part]:
        """What of this step adds up over ranks; the sums take the place of this rank's own numbers.

        Args:
            sharing: this rank's share.
            agreed: names and sizes of the parts that the ranks are known to have in common.
        """
        observation, make = self._observation, PartMaker(self._tensors, self._replaced, sharing)
        parts = make.rows(self._rows, observation.flows, self._calls, observation.fixed_rows)
        for site, where in self._sites:
            parts += make.table(f"site {site.flow}", where, site.buffer.columns)
        if self._gates is not None:
            gates, where = self._gates
            parts += make.table("gates", where, gates.buffer.columns)
        for _, taken, where in self._taken:
            parts += make.parts(taken, where, agreed)
        return parts

    def join(self, optimizer: Any) -> None:
        """An optimizer found only now is about to make the second half of this step's update."""
        for fuse, taken, _ in self._taken:
            self._observation.faults.guard(fuse, taken.joined, optimizer)

    def local_flows(self) -> set[str]:
        """The flows of which only one call of this rank was measured: through time, replayed."""
        through_time = {name for time, *_ in self._replays for name in time.row_names()}
        return through_time | {trajectory.path for trajectory, _ in self._trajectories}

    def replicas(self, device: torch.device) -> Tensor | None:
        """[N] what replicas of the model must have equal; `Observation.replicated` says which of it."""
        return next((taken.replicas(device) for _, taken, _ in self._taken if taken.replicas is not None), None)

    @staticmethod
    def _thinned(slices: dict[PointKey, Tensor]) -> dict[PointKey, Tensor]:
        keys = sorted(slices)
        return {key: slices[key] for key in keys[:: -(-len(keys) // MATRIX_POINTS)]} if keys else {}

    def _keep(self, tensors: list[Tensor]) -> slice:
        start = len(self._tensors)
        self._tensors += tensors
        return slice(start, len(self._tensors))

    def _keep_all(self, tensors: dict[PointKey, Tensor]) -> dict[PointKey, slice]:
        return {key: self._keep([tensor]) for key, tensor in tensors.items()}

    def ready(self) -> bool:
        """Whether `record` would not wait for a copy."""
        return self._copy.ready()

    def record(self, step: int) -> tuple[Record, list[FlowLayout]]:
        """Wait for the copy and compute the metrics; returns them with the layout of the flows."""
        host = self._copy.read()
        for (start, stop), arrays in self._replaced.items():
            host[start:stop] = arrays
        rows = added(host[self._rows], self._observation.buffer.columns)
        out = RecordBuilder(step)
        self._flows(out, rows, host)
        for site, where in self._sites:
            if site.flow not in {layout.name for layout in out.layouts}:  # its blocks are in no watched flow
                out.flow(FlowLayout(site.flow, "blocks", (), ()))
                self._observation.faults.guard(site.part, self._site, out, site, host[where])
        if self._gates is not None:
            gates, where = self._gates
            self._observation.faults.guard(gates.PART, record_parts.add_gates, out, gates, host[where])
        out.family()
        for fuse, taken, where in self._taken:
            self._observation.faults.guard(fuse, taken.read, out, host[where])
        self._observation.faults.guard("records", self._never_fired, out, rows)
        self._observation.faults.guard("sites", self._connection_gradients, out)
        return out.finish(), out.layouts

    def _flows(self, out: RecordBuilder, rows: Array, host: list[Array]) -> None:
        for flow in self._observation.flows:
            # evaluations inside a right-hand side are no chain
            if not all(path.startswith(self._stages) for path in flow.flow.outputs) or not self._stages:
                self._observation.faults.guard(flow.part, self._flow, out, flow, rows, host)
        for trajectory, where in self._trajectories:
            self._observation.faults.guard(
                trajectory.part, record_parts.add_trajectory, out, trajectory, host[where][0]
            )
        for time, where, note in self._replays:
            self._observation.faults.guard(time.part, record_parts.add_time_flow, out, time, host[where], note)

    def _flow(self, out: RecordBuilder, flow: FlowObserver, rows: Array, host: list[Array]) -> None:
        points = self._points[id(flow)]
        labels = flow.labels(points)
        picked, calls = self._picked(flow, points, rows)
        if compiled.was_traced(picked[:, ELEMENTS] > 0, calls.sum(0)):
            calls = np.full_like(calls, np.nan)
            labels = compiled.with_calls(labels, picked[:, BACKWARDS], self._forwards)
            out.note(compiled.NOT_MEASURED)
            if not compiled.HOOKED_INTERMEDIATES:
                out.note(compiled.FORWARD_ONLY)
                self._observation.warn_once(compiled.FORWARD_ONLY)
            hidden = ~(picked[:, BACKWARDS] > 0) | np.isnan(picked[:, GRAD_SQUARE])
            out.note(compiled.hidden_points(labels, hidden) if compiled.HOOKED_INTERMEDIATES else "")
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
        self._slow(out, flow, points, labels, host, picked)
        for site, where in self._sites:
            if site.flow == flow.flow.name:
                self._observation.faults.guard(site.part, self._site, out, site, host[where])
        for alignment, traces in self._alignments:
            if alignment.flow is flow.flow and traces is not None:
                out.add("branch_alignment", traces, alignment.labels)

    def _cell(self, flow: FlowObserver) -> str:
        outputs = flow.flow.outputs
        if flow.flow.kind != "time" or not outputs:
            return ""
        return type(self._observation.model.get_submodule(outputs[-1])).__name__

    def _picked(self, flow: FlowObserver, points: list[PointKey], rows: Array) -> tuple[Array, Array]:
        """The rows of the points, and their calls: [2, points] forwards and those that could give gradient."""
        picked = np.zeros((len(points), rows.shape[1]))
        calls = np.full((2, len(points)), np.nan)
        for at, key in enumerate(points):
            owner, own = flow.source(key)
            if (row := owner.rows.get(own)) is not None and row < len(rows):
                picked[at] = rows[row]
            for kind, counted in enumerate(self._calls[id(owner)]):
                calls[kind, at] = counted.get(own, 0)
        return picked, calls

    def _never_fired(self, out: RecordBuilder, rows: Array) -> None:
        """Say so where a flow trained without one of its hooks being called."""
        if "param_grad_norm" not in out:
            return
        for flow in self._observation.flows:
            picked, calls = self._picked(flow, self._points[id(flow)], rows)
            if picked[:, ELEMENTS].any() or calls.any():
                continue
            norms = out.values("param_grad_norm")
            names = self._observation.parameters.names[: len(norms)]
            if compiled.got_gradient(flow.paths, names, norms):
                sentence = compiled.NEVER_FIRED.format(flow=flow.flow.name)
                out.note(sentence)
                self._observation.warn_once(sentence)

    @staticmethod
    def _site(out: RecordBuilder, site: SiteObserver | KnownStreams, parts: list[Array]) -> None:
        for name, (values, labels) in site.metrics(added(parts, site.buffer.columns)).items():
            out.add(name, values, labels)

    def _slow(
        self,
        out: RecordBuilder,
        flow: FlowObserver,
        points: list[PointKey],
        labels: Sequence[str],
        host: list[Array],
        picked: Array,
    ) -> None:
        grams, slices = self._grams[id(flow)], self._slices[id(flow)]
        if grams:
            ranks = [
                matrices.effective_rank_of_gram(torch.from_numpy(host[grams[key]][0])) if key in grams else np.nan
                for key in points
            ]
            out.add("effective_rank", np.array(ranks), labels)
        shown = [(key, label) for key, label in zip(points, labels, strict=True) if key in slices]
        units = [host[slices[key]][0] for key, _ in shown]
        held = np.array([key in slices for key in points], dtype=bool)
        # states of another size (after a stride) have other positions: no cosine between them
        sizes = np.round(picked[held, ELEMENTS] / picked[held, BACKWARDS])
        if len(units) > 1 and len({u.shape for u in units}) == 1 and len(set(sizes.tolist())) == 1:
            matrix = matrices.cosine_matrix(torch.from_numpy(np.stack(units)))
            out.add("cosine_matrix", matrix, [label for _, label in shown])

    def _connection_gradients(self, out: RecordBuilder) -> None:
        if "param_grad_norm" not in out:
            return
        norms = dict(zip(self._observation.parameters.names, out.values("param_grad_norm"), strict=False))
        for site, _ in self._sites:
            out.within(site.flow)
            for name, (array, labels) in grad_norms(site.gradient_groups(), norms).items():
                out.add(name, array, labels)
        out.family()
