"""All probes of one model together: what a sampled step deposits, the snapshot taken at its end, the record made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.plan import FlowPlan
from flowscope.probes import matrices, summaries
from flowscope.probes.alignment import AlignmentObserver
from flowscope.probes.buffer import DepositBuffer, HostCopy
from flowscope.probes.deposit import Canary, FlowObserver, PointKey, Switch
from flowscope.probes.hooks import Hooks
from flowscope.probes.layout import floating_tensors, is_compiling
from flowscope.probes.parameters import ParameterObserver
from flowscope.probes.recurrent import Replay
from flowscope.probes.sites import SiteObserver, grad_norms, group_by_flow
from flowscope.probes.statistics import BACKWARDS, COLUMNS, ELEMENTS, GRAD_SQUARE, SQUARE
from flowscope.probes.through_time import TimeObserver
from flowscope.probes.units import RECTIFIED_SHARE, UnitObserver, UnitProbe
from flowscope.records import FlowLayout, Record, metric_key

Array = NDArray[np.float64]
MATRIX_POINTS = 128


class Observation:
    """The probes of one model, and the switch that turns them on for a step."""

    def __init__(
        self,
        model: nn.Module,
        plan: FlowPlan,
        config: WatchConfig,
        hooks: Hooks,
        connections: Sequence[tuple[str, nn.Module]] = (),
    ) -> None:
        self.model, self.plan, self.config, self.hooks = model, plan, config, hooks
        self.faults = hooks.faults
        self.switch = Switch()
        self.canary = Canary()
        self.buffer = DepositBuffer(COLUMNS)
        self.forwards = 0
        self.flows: list[FlowObserver] = []
        self.times: list[TimeObserver] = []
        self.parameters = ParameterObserver(model, config) if "parameters" in config.metrics else None
        self.units = UnitObserver(model, config, self.switch, hooks) if "parameters" in config.metrics else None
        self._first = True
        self.owner: Any = None
        """Who must live as long as the hooks of the model do (the scope, even if the user does not keep it)."""
        self._forwards_at_begin = 0
        self._missed = self._resuming = False
        self._fills_grad = False
        """Whether this loop leaves gradients in `.grad` at all (`torch.autograd.grad` does not)."""
        self.sites = [
            SiteObserver(group, name, config, self.switch, hooks) for name, group in group_by_flow(connections, plan)
        ]
        self.alignments = [
            AlignmentObserver(model, flow, self.switch, hooks)
            for flow in plan
            if config.branch_alignment and flow.kind in ("blocks", "stage")
        ]
        hooks.before(model, "root hook", self._root, first=True)
        if any(kind in config.metrics for kind in ("flow", "depth")):
            self._observe_flows()
        if not self.flows and not self.times:
            hooks.after(model, "root hook", self._root_output)
        devices = {parameter.device for parameter in model.parameters()}
        for buffer in (self.buffer, self.canary.buffer, *(site.buffer for site in self.sites)):
            buffer.prepare(devices)

    def _observe_flows(self) -> None:
        owners: dict[str, FlowObserver] = {}
        built: dict[str, FlowObserver] = {}
        make = partial(FlowObserver, self.model, config=self.config, switch=self.switch, canary=self.canary)
        # the flow over all stages borrows the stages' points, so it is built after them and listed before them
        for flow in sorted(self.plan, key=lambda f: f.kind == "network"):
            if flow.fused:
                self.times.append(TimeObserver(self.model, flow, self.switch, self.canary, self.hooks))
                continue
            borrowed = {p: owners[p] for p in flow.outputs if p in owners}
            if flow.entry is not None and flow.entry in owners and owners[flow.entry].flow.entry == flow.entry:
                borrowed[flow.entry] = owners[flow.entry]
            observer = make(flow, hooks=self.hooks, buffer=self.buffer, borrowed=borrowed)
            observer.on_drop = self.drop
            # streams have no one hidden state: their depth metrics are those of the sub-layer inputs (probes/sites.py)
            observer.depth = observer.depth and all(not s.streams for s in self.sites if s.flow == flow.name)
            built[flow.name] = observer
            if flow.kind != "network":
                owners.update(dict.fromkeys(flow.outputs, observer))
        self.flows = [built[flow.name] for flow in self.plan if flow.name in built]

    # -- hooks of the root ------------------------------------------------------------------------------------------

    def _root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            if not is_compiling():
                for site in self.sites:
                    site.in_training = False
            return
        if self.switch.paused:
            self._missed = True
            return
        if not is_compiling():
            if self.switch.stale:
                self.drop()
            elif self.forwards > self._forwards_at_begin and self._gradients_were_dropped():
                self._discard_deposits()
            self.forwards += 1
            for flow in self.flows:
                flow.start_forward()
            for site in self.sites:
                site.start_forward()
        for tensor in floating_tensors((args, kwargs)):
            self.canary.count("input", tensor)

    def _gradients_were_dropped(self) -> bool:
        """Whether no parameter holds a gradient: what backward left since the step began was thrown away.

        So it is where an exception ended a step halfway and the loop went on with the next batch.
        """
        if not self.switch.sampling or self.switch.in_closure or not self._fills_grad:
            return False
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if not trainable or hasattr(trainable[0], "to_local"):  # FSDP keeps unreduced gradients elsewhere
            return False
        return all(p.grad is None for p in trainable)

    def _discard_deposits(self) -> None:
        """Forget what backward deposited, not what forwards in flight wait with."""
        self.buffer.clear()
        for site in self.sites:
            site.buffer.clear()
        for flow in self.flows:
            flow.grams.clear()
            flow.slices.clear()
        if self.units is not None:
            self.faults.guard("units", self.units.take)

    def pause(self) -> None:
        """Observe nothing until `resume`."""
        self._missed = self._missed or self.forwards > self._forwards_at_begin
        self._resuming = False
        self.switch.paused = True
        self.drop()

    def resume(self) -> None:
        """Observe again: at once where nothing of the step under way was missed, else from the next on."""
        self._resuming = self._missed
        self.switch.paused = self.switch.paused and self._missed
        self.drop()

    def _root_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.switch.paused and torch.is_grad_enabled():
            for tensor in floating_tensors(output):
                self.canary.count("forward", tensor)

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self, *, sampling: bool, slow: bool) -> None:
        """Turn the probes on or off for the step that begins; what is pending is dropped."""
        if self.switch.sampling or sampling:
            self.drop()
        if self._resuming:
            self.switch.paused = self._resuming = False
        self._missed = False
        self._forwards_at_begin = self.forwards
        self.switch.sampling, self.switch.slow = sampling, slow and sampling
        self.switch.stale = False

    def drop(self) -> None:
        """Forget what was deposited: it belongs to no step of ours."""
        self.switch.stale = False
        self.buffer.clear()
        self.hooks.release_leaves()
        for flow in self.flows:
            flow.forget()
        for time in self.times:
            time.drop()
        for site in self.sites:
            site.forget()
        for alignment in self.alignments:
            alignment.take()
        if self.units is not None:
            self.units.end_step()
            self.faults.guard("units", self.units.take)
        if self.parameters is not None:
            self.parameters.drop()

    def before_update(self) -> None:
        """The first optimizer of a sampled step is about to change the weights."""
        if self.parameters is not None and self.faults.alive("parameters"):
            self.faults.guard("parameters", self.parameters.before_step)

    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """Read the gradients that an optimizer (ids of its parameters), or all, will use."""
        if self.parameters is not None:
            self.faults.guard("parameters", self.parameters.read_gradients, only, scale)

    def after_update(self) -> None:
        """The weights have changed."""
        if self.parameters is not None:
            self.faults.guard("parameters", self.parameters.after_step)

    def close(self) -> None:
        """Take off what the model's hooks do not cover, and let go of everything."""
        self.drop()
        for site in self.sites:
            site.close()

    def replay_time(self) -> list[tuple[TimeObserver, Replay]]:
        """Replay the fused recurrent layers, while their weights are still those of the forward."""
        out = []
        for time in self.times:
            replay = self.faults.guard(time.part, time.replay)
            if replay is not None:
                out.append((time, replay))
        return out

    def take_canary(self) -> HostCopy:
        """The canary's counts of this step on their way to the host, and start again from zero."""
        return HostCopy(self.canary.buffer.take())

    def snapshot(self, optimizers: Iterable[Any], replays: Sequence[tuple[TimeObserver, Replay]]) -> Snapshot:
        """Take everything this step deposited, on its way to the host; `begin_step` starts again from nothing."""
        self._fills_grad = any(p.grad is not None for p in self.model.parameters())
        return Snapshot(self, optimizers, replays)

    def first_record(self, vectors: dict[UnitProbe, Array]) -> None:
        """After the first record: inputs that did not come from a rectifier are watched no further."""
        if self._first and self.units is not None and vectors:
            self._first = False
            self.units.keep(lambda p: p in vectors and summaries.zero_share(vectors[p]) >= RECTIFIED_SHARE)


class Snapshot:
    """One sampled step's deposits on their way to the host; `record` turns them into numbers."""

    def __init__(
        self, observation: Observation, optimizers: Iterable[Any], replays: Sequence[tuple[TimeObserver, Replay]]
    ) -> None:
        self._observation = observation
        self._tensors: list[Tensor] = []
        self._rows = self._keep(observation.buffer.take())
        self._parameters = self._take_parameters()
        units = observation.faults.guard("units", observation.units.take) if observation.units else None
        self._units = [(self._keep([t]), p) for t, p in units or ()]
        self._replays = [
            (time, self._keep([r.grad_square, r.act_square, r.counts.to(r.grad_square.dtype)]), r.note)
            for time, r in replays
        ]
        self._sites = [(site, self._keep(site.buffer.take())) for site in observation.sites]
        self._alignments = [(a, a.take()) for a in observation.alignments]
        self._points = {id(flow): flow.points() for flow in observation.flows}
        self._calls = {id(f): (dict(f.forward_calls), dict(f.tracked_calls)) for f in observation.flows}
        self._grams = {id(f): self._keep_all(f.grams) for f in observation.flows}
        self._slices = {id(f): self._keep_all(self._thinned(f.slices)) for f in observation.flows}
        self._not_measured: list[int] = []
        self._wiring: tuple[Array, Array] | None = None
        if observation.parameters is not None:
            self._wiring = observation.faults.guard("parameters", self._take_wiring, optimizers)
        self._copy = HostCopy(self._tensors)
        self._tensors = []

    def _take_wiring(self, optimizers: Iterable[Any]) -> tuple[Array, Array]:
        parameters = self._observation.parameters
        assert parameters is not None
        return parameters.trainable(), parameters.optimized(optimizers)

    def join(self, optimizer: Any, optimizers: Iterable[Any]) -> None:
        """An optimizer found only now is about to make the second half of this step's update."""
        parameters = self._observation.parameters
        if parameters is None or self._wiring is None:
            return
        self._wiring = (self._wiring[0], parameters.optimized(optimizers))
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._not_measured += [i for i, p in enumerate(parameters.current()) if id(p) in held]

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
        rows = added(host[self._rows], COLUMNS)
        out = _Builder(step)
        for flow in self._observation.flows:
            self._observation.faults.guard(flow.part, self._flow, out, flow, rows, host)
        for time, where, note in self._replays:
            self._observation.faults.guard(time.part, _time_flow, out, time, host[where], note)
        for site, where in self._sites:
            if site.flow not in {layout.name for layout in out.layouts}:  # its blocks are in no watched flow
                out.flow(FlowLayout(site.flow, "blocks", (), ()))
                self._observation.faults.guard(site.part, self._site, out, site, host[where])
        out.family()
        self._observation.faults.guard("parameters", self._parameter_family, out, host)
        self._observation.faults.guard("units", self._unit_family, out, host)
        return out.finish(), out.layouts

    def _flow(self, out: _Builder, flow: FlowObserver, rows: Array, host: list[Array]) -> None:
        points = self._points[id(flow)]
        labels = flow.labels(points)
        out.flow(FlowLayout(flow.flow.name, flow.flow.kind, tuple(labels), tuple(labels[1:])))
        picked = np.zeros((len(points), COLUMNS))
        calls = np.full((2, len(points)), np.nan)
        for at, key in enumerate(points):
            owner, own = flow.source(key)
            if (row := owner.rows.get(own)) is not None and row < len(rows):
                picked[at] = rows[row]
            for kind, counted in enumerate(self._calls[id(owner)]):
                calls[kind, at] = counted.get(own, 0)
        metrics = summaries.flow_metrics(picked)
        metrics["forward_calls"], metrics["tracked_calls"] = calls
        if flow.depth:
            metrics.update(summaries.depth_metrics(picked))
        for name, values in metrics.items():
            out.add(name, values, labels if len(values) == len(points) else labels[1:])
        self._slow(out, flow, points, labels, host)
        for site, where in self._sites:
            if site.flow == flow.flow.name:
                self._observation.faults.guard(site.part, self._site, out, site, host[where])
        for alignment, traces in self._alignments:
            if alignment.flow is flow.flow and traces is not None:
                out.add("branch_alignment", traces, alignment.labels)

    @staticmethod
    def _site(out: _Builder, site: SiteObserver, parts: list[Array]) -> None:
        for name, (values, labels) in site.metrics(added(parts, site.buffer.columns)).items():
            out.add(name, values, labels)

    def _slow(
        self, out: _Builder, flow: FlowObserver, points: list[PointKey], labels: list[str], host: list[Array]
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
        if len(units) > 1 and len({u.shape for u in units}) == 1:
            matrix = matrices.cosine_matrix(torch.from_numpy(np.stack(units)))
            out.add("cosine_matrix", matrix, [label for _, label in shown])

    def _parameter_family(self, out: _Builder, host: list[Array]) -> None:
        observation = self._observation
        if observation.parameters is not None and self._wiring is not None and self._parameters is not None:
            names = observation.parameters.names
            values, sampled, vectors = self._parameters
            for where, index in vectors:
                values[tuple(np.array(index).T)] = host[where][0]
            values[2, self._not_measured] = np.nan
            sampled[2, self._not_measured] = False
            for name, array in summaries.parameter_metrics(values, sampled).items():
                out.add(name, array, names)
            for name, array in zip(("param_trainable", "param_optimized"), self._wiring, strict=True):
                out.add(name, array, names)
            out.add("param_is_norm", observation.parameters.is_norm, names)
            norms = dict(zip(names, out.values("param_grad_norm"), strict=True))
            for site, _ in self._sites:
                out.within(site.flow)
                for name, (array, labels) in grad_norms(site.gradient_groups(), norms).items():
                    out.add(name, array, labels)
            out.family()

    def _unit_family(self, out: _Builder, host: list[Array]) -> None:
        observation = self._observation
        vectors = {probe: host[where][0] for where, probe in self._units}
        observation.first_record(vectors)
        vectors = {p: v for p, v in vectors.items() if p.kind != "input" or (p.hook is not None and p.hook.on)}
        metrics, labels = summaries.unit_metrics(
            {p.label: v for p, v in vectors.items()}, {p.label: p.kind for p in vectors}
        )
        for name, array in metrics.items():
            out.add(name, array, labels[name])


def added(parts: list[Array], columns: int) -> Array:
    """The rows that several devices hold, added up."""
    rows = np.zeros((max((len(part) for part in parts), default=0), columns))
    for part in parts:
        rows[: len(part)] += part
    return rows


class _Builder:
    """Collects the metrics of a record under their keys."""

    def __init__(self, step: int) -> None:
        self.layouts: list[FlowLayout] = []
        self._record = Record(step)
        self._labels: dict[str, tuple[str, ...]] = {}
        self._flow: str | None = None

    def flow(self, layout: FlowLayout) -> None:
        """What is added from here on belongs to this flow."""
        self._flow = layout.name if self.layouts else None
        self.layouts.append(layout)

    def within(self, flow: str) -> None:
        """What is added from here on belongs to this flow, which was added before."""
        self._flow = None if self.layouts and self.layouts[0].name == flow else flow

    def values(self, name: str) -> Array:
        """A metric that was added."""
        return self._record.metrics[name]

    def family(self) -> None:
        """What is added from here on belongs to no flow."""
        self._flow = None

    def add(self, name: str, values: Array, labels: Sequence[str]) -> None:
        """Add one metric with the paths of its entries."""
        key = metric_key(name, self._flow)
        self._record.metrics[key] = np.asarray(values, dtype=np.float64)
        self._labels[key] = tuple(labels)

    def note(self, sentence: str) -> None:
        """Add a sentence on what could not be measured."""
        if sentence and sentence not in self._record.notes:
            self._record.notes = (*self._record.notes, sentence)

    def finish(self) -> Record:
        """The record."""
        self._record.metric_labels = self._labels
        self._record.flow_names = tuple(layout.name for layout in self.layouts)
        return self._record


def _time_flow(out: _Builder, time: TimeObserver, parts: list[Array], note: str) -> None:
    """The flows through time of one fused recurrent layer: a flow per layer and direction, points in processing order."""
    gradients, activations, counts = parts
    hidden = time._rnn.proj_size or time._rnn.hidden_size
    for row, name in enumerate(time.row_names()):
        order = slice(None, None, -1) if name.endswith("_reverse") else slice(None)
        labels = [f"{time.path}#{t}" for t in range(gradients.shape[1])][order]
        out.flow(FlowLayout(name, "time", tuple(labels), tuple(labels[1:])))
        rows = np.zeros((gradients.shape[1], COLUMNS))
        rows[:, GRAD_SQUARE], rows[:, SQUARE] = gradients[row][order], activations[row][order]
        rows[:, ELEMENTS] = counts[order] * hidden
        rows[:, BACKWARDS] = ~np.isnan(gradients[row][order])
        for metric, values in summaries.flow_metrics(rows).items():
            out.add(metric, values, labels if len(values) == len(labels) else labels[1:])
    out.note(note)
