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
from flowscope.probes.parameters import ParameterObserver, held_by
from flowscope.probes.payload import Part, Sharing, from_host
from flowscope.probes.record_builder import RecordBuilder
from flowscope.probes.recurrent import Replay
from flowscope.probes.sharing import PartMaker
from flowscope.probes.sites import SiteObserver, grad_norms
from flowscope.probes.statistics import BACKWARDS, COLUMNS, ELEMENTS, GRAD_SQUARE, wide
from flowscope.probes.through_time import TimeObserver
from flowscope.probes.units import UnitProbe
from flowscope.records import FlowLayout, Record, few

if TYPE_CHECKING:
    from flowscope.probes.observation import Observation

Array = NDArray[np.float64]
MATRIX_POINTS = 128
WIRING = ("param_trainable", "param_optimized", "param_lr")


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
        self._scale = self._take_scale()
        spreads = observation.parameters.spreads if observation.parameters else []
        self._spreads = [(self._keep([vector]), numbers) for numbers, vector in spreads]
        self._parameters = self._take_parameters()
        units = observation.faults.guard("units", observation.units.take) if observation.units else None
        self._units = [(self._keep([t]), p) for t, p in units or ()]
        self._unit_positions = {p: p.taken_positions for _, p in units or ()}
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
        self._not_measured: list[int] = []
        self._wiring: tuple[Array, Array, Array] | None = None
        if observation.parameters is not None:
            self._wiring = observation.faults.guard("parameters", self._take_wiring, optimizers)
            observation.parameters.let_go()
        self._copy = HostCopy(self._tensors)
        self._replaced: dict[tuple[int, int], list[Array]] = {}
        self._unseen_units: dict[UnitProbe, Array] = {}

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
        if self._parameters is not None and observation.parameters is not None:
            parts += make.parameters(*self._parameters, observation.parameters.entries())
        probes = observation.units.probes if observation.units is not None else []
        return parts + make.units(self._units, probes, agreed, self._unseen_units, self._unit_positions)

    def _take_wiring(self, optimizers: Iterable[Any]) -> tuple[Array, Array, Array]:
        parameters = self._observation.parameters
        assert parameters is not None
        return parameters.trainable(), parameters.optimized(optimizers), parameters.learning_rates(optimizers)

    def join(self, optimizer: Any, optimizers: Iterable[Any]) -> None:
        """An optimizer found only now is about to make the second half of this step's update."""
        parameters = self._observation.parameters
        if parameters is None or self._wiring is None:
            return
        self._wiring = (self._wiring[0], parameters.optimized(optimizers), parameters.learning_rates(optimizers))
        held = held_by(optimizer)
        self._not_measured += [i for i, p in enumerate(parameters.current()) if id(p) in held]

    def local_flows(self) -> set[str]:
        """The flows of which only one call of this rank was measured: through time, replayed."""
        through_time = {name for time, *_ in self._replays for name in time.row_names()}
        return through_time | {trajectory.path for trajectory, _ in self._trajectories}

    def weight_norms(self, device: torch.device) -> Tensor:
        """[P] the norms of this rank's parameters before the step, 0 where not read."""
        count = len(self._observation.parameters.names) if self._observation.parameters is not None else 0
        norms = torch.zeros(count, dtype=wide(device), device=device)
        if self._parameters is not None:
            values, _, vectors = self._parameters
            norms = norms + from_host(np.nan_to_num(values[0], posinf=np.inf), device)
            for where, index in vectors:
                rows = [at for at, (row, _) in enumerate(index) if row == 0]
                places = torch.tensor([index[at][1] for at in rows], dtype=torch.long)
                if rows:
                    read = self._tensors[where.start].to(device, norms.dtype)
                    norms.index_copy_(0, places.to(device), read[rows[0] : rows[-1] + 1])
        return norms

    def _take_scale(self) -> slice | float:
        parameters = self._observation.parameters
        scale = None if parameters is None else parameters.raw.scale
        return self._keep([scale.reshape(1)]) if isinstance(scale, Tensor) else 1.0 if scale is None else scale

    def _take_parameters(self) -> tuple[Array, NDArray[np.bool_], list[tuple[slice, list[tuple[int, int]]]]] | None:
        observation = self._observation
        if observation.parameters is None:
            return None
        taken = observation.faults.guard("parameters", observation.parameters.take)
        if taken is None:
            return None
        values, read, vectors = taken
        return values, read, [(self._keep([vector]), index) for vector, index in vectors]

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
        rows = added(host[self._rows], COLUMNS)
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
        self._observation.faults.guard("parameters", self._parameter_family, out, host)
        self._observation.faults.guard("records", self._never_fired, out, rows)
        self._observation.faults.guard("units", self._unit_family, out, host)
        for fuse, taken, where in self._taken:
            self._observation.faults.guard(fuse, taken.read, out, host[where])
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
        picked = np.zeros((len(points), COLUMNS))
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
        if self._observation.parameters is None or self._parameters is None:
            return
        for flow in self._observation.flows:
            picked, calls = self._picked(flow, self._points[id(flow)], rows)
            if picked[:, ELEMENTS].any() or calls.any():
                continue
            names, norms = self._observation.parameters.names, out.values("param_grad_norm")
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

    def _parameter_family(self, out: RecordBuilder, host: list[Array]) -> None:
        observation = self._observation
        if observation.parameters is not None and self._wiring is not None and self._parameters is not None:
            values, sampled, vectors = self._parameters
            # parameters found since this step stand behind its own
            count = values.shape[1]
            names = observation.parameters.names[:count]
            if late := observation.parameters.added:
                out.note(f"came after watch, so their activations are not watched: {few(late)}")
            for where, index in vectors if not self.shared else ():
                values[tuple(np.array(index).T)] = host[where][0]
            for row in (2, 4):
                values[row, self._not_measured] = np.nan
                sampled[row, self._not_measured] = False
            scale = host[self._scale][0][0] if isinstance(self._scale, slice) else self._scale
            values[5] /= scale
            metrics = summaries.parameter_metrics(values, sampled)
            observation.parameters.raw.judge(metrics["param_grad_norm_raw"], metrics["param_grad_norm"])
            for name, array in metrics.items():
                out.add(name, array, names if len(array) == len(names) else ("",))
            for name, array in zip(WIRING, self._wiring, strict=True):
                out.add(name, array, names)
            out.add("param_is_norm", observation.parameters.is_norm[:count], names)
            out.add("param_epsilon", observation.parameters.epsilons()[:count], names)
            if self._spreads:
                _weight_spread(out, observation.parameters, [(i, host[where][0]) for where, i in self._spreads])
            norms = dict(zip(names, out.values("param_grad_norm"), strict=True)) if self._sites else {}
            for site, _ in self._sites:
                out.within(site.flow)
                for name, (array, labels) in grad_norms(site.gradient_groups(), norms).items():
                    out.add(name, array, labels)
            out.family()

    def _unit_family(self, out: RecordBuilder, host: list[Array]) -> None:
        observation = self._observation
        taken = {**{probe: host[where][0] for where, probe in self._units}, **self._unseen_units}
        vectors = {probe: probe.vector(counted) for probe, counted in taken.items()}
        observation.first_record(vectors)
        watched = observation.units.probes if observation.units is not None else []
        vectors = {p: v for p, v in vectors.items() if p in watched}
        metrics, labels = summaries.unit_metrics(
            {p.label: v for p, v in vectors.items()}, {p.label: p.kind for p in vectors}
        )
        for name, array in metrics.items():
            out.add(name, array, labels[name])
        if "dead_fraction" in metrics:
            by_label = {p.label: p for p in vectors}
            for probe, positions in self._unit_positions.items():
                probe.taken_positions = positions  # the next step's may have been taken since
            dead = [by_label[label] for label in labels["dead_fraction"]]
            lasting = np.array([p.lasting(vectors[p][2:]) for p in dead])
            out.add("dead_lasting", lasting, labels["dead_fraction"])


def _weight_spread(out: RecordBuilder, parameters: ParameterObserver, vectors: list[tuple[list[int], Array]]) -> None:
    spread = np.full(len(parameters.names), np.nan)
    for numbers, vector in vectors:
        spread[numbers] = vector
    out.add("weight_spread", spread[parameters.matrices], [parameters.names[i] for i in parameters.matrices])
