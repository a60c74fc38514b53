"""All probes of one model together: their hooks, the switch that turns them on for a step, what happens in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.hyper_connections import by_flow
from flowscope.discovery.view import ModelView
from flowscope.faults import LOGGER
from flowscope.hooks.points import placed
from flowscope.instruments import Instrument, instruments_for
from flowscope.probes.alignment import AlignmentObserver
from flowscope.probes.buffer import DepositBuffer, HostCopy
from flowscope.probes.canary import Canary
from flowscope.probes.deposit import FlowObserver
from flowscope.probes.gates import GateObserver
from flowscope.probes.hooks import Hooks
from flowscope.probes.known_streams import KnownStreams
from flowscope.probes.layout import floating_tensors, is_compiling
from flowscope.probes.passes import Earlier, Passes
from flowscope.probes.recurrent import Replay
from flowscope.probes.sites import SiteObserver, group_by_flow
from flowscope.probes.snapshot import Snapshot
from flowscope.probes.statistics import COLUMNS
from flowscope.probes.through_time import TimeObserver
from flowscope.probes.trajectories import TrajectoryObserver

Array = NDArray[np.float64]

EVENTS = (
    "begin_step",
    "start_forward",
    "scaled_by",
    "before_update",
    "read_gradients",
    "after_update",
    "update_failed",
    "discard",
    "drop",
)
"""Methods of `Instrument` that are told of what happens."""


class Observation:
    """The probes of one model, and the switch that turns them on for a step."""

    def __init__(
        self,
        view: ModelView,
        config: WatchConfig,
        hooks: Hooks,
        instruments: Sequence[Instrument | type[Instrument]] = (),
    ) -> None:
        model, plan = view.model, view.flows
        self.model, self.plan, self.config, self.hooks = model, plan, config, hooks
        self.faults = hooks.faults
        self.switch = hooks.switch
        self.canary = Canary()
        self.flows: list[FlowObserver] = []
        self.times: list[TimeObserver] = []
        self.trajectories: list[TrajectoryObserver] = []
        of_parameters = "parameters" in config.metrics
        self.parameters = view.parameters
        self.instruments = instruments_for(view, config, instruments)
        for instrument in self.instruments:
            self.faults.guard(instrument.fuse, instrument.attach, view, hooks)
        self.buffer = DepositBuffer(placed(hooks.statistics, COLUMNS)[1])
        self._hear = {event: self._hearing(event) for event in EVENTS}
        self.on_forward: Callable[[], bool] = lambda: True
        """Called when a training forward of the root begins; says whether it is observed."""
        self.on_run: Callable[[], Any] = lambda: None
        """Called when a flow begins after an optimizer of another model has stepped."""
        self.owner: Any = None
        """Who must live as long as the hooks of the model do (the scope, even if the user does not keep it)."""
        self._warned: set[str] = set()
        self.passes = Passes(model, self.switch)
        self._aside: list[Tensor] = []
        """What passes of the first step deposited that left no gradient: inner ones of an attack or of a meta-learner,
        or parts of a step that never fills `.grad`."""
        self.sites: list[SiteObserver | KnownStreams] = [
            SiteObserver(group, name, config, self.switch, hooks)
            for name, group in group_by_flow(view.connections, plan)
        ]
        wrapped = {site.flow for site in self.sites}
        self.sites += [
            KnownStreams(group, name, config, self.switch, hooks)
            for name, group in by_flow(view.hyper_connections, plan)
            if name not in wrapped
        ]
        found = view.gates if of_parameters else []
        self.gates = GateObserver(view, found, self.switch, hooks) if view.named_gates or found else None
        self.alignments = [
            AlignmentObserver(model, flow, self.switch, hooks)
            for flow in plan
            if config.branch_alignment and flow.kind in ("blocks", "stage")
        ]
        hooks.before(model, "root hook", self._root, first=True)
        if any(kind in config.metrics for kind in ("flow", "depth")):
            self._observe_flows()
            self.trajectories = [TrajectoryObserver(path, f, self.switch, hooks) for path, f in view.dynamics if path]
        if not self.flows and not self.times:
            hooks.after(model, "root hook", self._root_output)
        self._prepare_buffers(view.devices)
        self.fixed_rows = self.buffer.rows
        """Rows of points known from the structure alone; further calls of a module get theirs when they are seen."""

    def _prepare_buffers(self, devices: set[torch.device]) -> None:
        buffers = [self.buffer, self.canary.buffer, *(site.buffer for site in self.sites)]
        if self.gates is not None:
            buffers.append(self.gates.buffer)
        buffers += [instrument.buffer for instrument in self.instruments if instrument.buffer is not None]
        for buffer in buffers:
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
            # streams have no one hidden state: their depth metrics are those of the sub-layer inputs (probes/sites.py)
            streams = any(site.streams for site in self.sites if site.flow == flow.name)
            observer = make(flow, hooks=self.hooks, buffer=self.buffer, borrowed=borrowed, streams=streams)
            observer.on_drop = self._flow_begins
            built[flow.name] = observer
            if flow.kind != "network":
                owners.update(dict.fromkeys(flow.outputs, observer))
        self.flows = [built[flow.name] for flow in self.plan if flow.name in built]

    # -- hooks of the root ------------------------------------------------------------------------------------------

    def _root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        training = torch.is_grad_enabled()
        if not is_compiling():
            self._start_forward(training=training)
        if training and not self.switch.paused:
            for tensor in floating_tensors((args, kwargs)):
                self.canary.count("input", tensor)

    def _start_forward(self, *, training: bool) -> None:
        if not training:
            for flow in self.flows:
                flow.start_forward(training=False)
            for site in self.sites:
                site.in_training = False
            return
        if not self.on_forward():
            return
        self.passes.forwards += 1
        for flow in self.flows:
            flow.start_forward(training=True)
        self._tell("start_forward")
        parts: list[Any] = [*self.sites, *self.trajectories]
        for part in parts:
            part.start_forward()

    def _flow_begins(self) -> None:
        self.on_run()

    def review(self) -> None:
        """A forward begins that is not the first of its step: earlier ones may have deposited for nothing."""
        earlier = self.passes.review()
        if earlier is Earlier.DISCARD:
            self._discard_deposits()
        elif earlier is Earlier.ASIDE:
            self._aside += self.buffer.take()

    def runs(self) -> int:
        """Grows whenever the model runs with gradient, also where its own `__call__` is not what the loop calls."""
        return self.passes.forwards + sum(flow.runs for flow in self.flows)

    def warn_once(self, sentence: str) -> None:
        """Log a warning, unless this one was logged before."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            LOGGER.warning("flowscope: %s.", sentence)

    def _discard_deposits(self) -> None:
        """Forget what backward deposited, not what forwards in flight wait with."""
        self._drop_sums()
        self._tell("discard")
        for site in self.sites:
            site.buffer.clear()
        for flow in self.flows:
            flow.grams.clear()
            flow.slices.clear()

    def _drop_sums(self) -> None:
        """Forget the sums of all probes that hold nothing else between a forward and its backward."""
        self._aside.clear()
        self.buffer.clear()
        if self.gates is not None:
            self.gates.buffer.clear()
        for trajectory in self.trajectories:
            trajectory.drop()

    def _root_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.switch.paused and torch.is_grad_enabled():
            for tensor in floating_tensors(output):
                self.canary.count("forward", tensor)

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self, *, sampling: bool, slow: bool) -> None:
        """Turn the probes on or off for the step that begins; what is pending is dropped."""
        if self.switch.sampling or sampling:
            self.drop()
        self.passes.begin_step(sampling=sampling)
        self.switch.sampling, self.switch.slow = sampling, slow
        if sampling:
            self._tell("begin_step")

    def drop(self) -> None:
        """Forget what was deposited: it belongs to no step of ours."""
        self._drop_sums()
        self.hooks.release_leaves()
        for flow in self.flows:
            flow.forget()
        for time in self.times:
            time.drop()
        for site in self.sites:
            site.forget()
        for alignment in self.alignments:
            alignment.take()
        self.parameters.let_go()
        self._tell("drop")

    def scaled_by(self, scale: Tensor | float | None) -> None:
        """The loss scale of this step's backward, None where there is no scaler."""
        self._tell("scaled_by", scale)

    def before_update(self, *, updating: bool = True) -> None:
        """The first optimizer of a sampled step is about to change the weights."""
        self.faults.guard("parameter list", partial(self.parameters.hold, fixed=updating))
        self._tell("before_update", updating=updating)

    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """Read the gradients that an optimizer (ids of its parameters), or all, will use."""
        self.passes.gradients_used()
        self._tell("read_gradients", only, scale)

    def after_update(self) -> None:
        """The weights have changed."""
        self._tell("after_update")

    def update_failed(self) -> None:
        """The optimizer raised: what it was about to use is read again."""
        self.parameters.let_go()
        self._tell("update_failed")

    def _hearing(self, event: str) -> list[tuple[str, Callable[..., None]]]:
        """The instruments for which an event means something, with their methods."""
        default = getattr(Instrument, event)
        always = event in ("drop", "discard")
        hearing = [i for i in self.instruments if always or getattr(type(i), event) is not default]
        return [(instrument.fuse, getattr(instrument, event)) for instrument in hearing]

    def _tell(self, event: str, *args: Any, **named: Any) -> None:
        """Call a method of all instruments; a fault switches off that one alone."""
        for fuse, method in self._hear[event]:
            self.faults.guard(fuse, partial(method, *args, **named))

    def expects(self, part: str) -> bool:
        """Whether a part of the all-reduce vector that the ranks once had in common may still come."""
        return all(instrument.expects(part) for instrument in self.instruments)

    def replicated(self) -> NDArray[np.bool_] | None:
        """Which of `Snapshot.replicas` are the same on all ranks; None where nothing is compared."""
        return next((found for i in self.instruments if (found := i.replicated()) is not None), None)

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
        buffer = self.canary.buffer
        return HostCopy([] if buffer.empty() else buffer.take())

    def snapshot(self, optimizers: Iterable[Any], replays: Sequence[tuple[TimeObserver, Replay]]) -> Snapshot:
        """Take everything this step deposited, on its way to the host; `begin_step` starts again from nothing."""
        self.passes.step_ended()
        return Snapshot(self, optimizers, replays)

    def take_rows(self) -> list[Tensor]:
        """The rows of the step that ends; they are zero from here on."""
        aside, self._aside = self._aside, []
        return self.buffer.take() + ([] if self.passes.fills_grad else aside)
