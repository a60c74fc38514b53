"""The instruments of one model: what they are told of a step, and when they give what they saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import isfunction
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments import Instrument, instruments_for
from flowscope.model.hidden_state import floating_tensors, is_compiling
from flowscope.model.view import ModelView
from flowscope.observation.passes import Passes
from flowscope.observation.snapshot import Snapshot
from flowscope.sums.buffer import HostCopy

ASKED_OF_ALL = ("attach", "take", "layout")
ALWAYS_TOLD = ("drop", "discard")
"""Events that every instrument is told of: the default of the one calls the other."""
EVENTS = [name for name in vars(Instrument) if isfunction(getattr(Instrument, name)) and name not in ASKED_OF_ALL]
"""Methods of `Instrument` that are told of what happens or asked: of an instrument that has its own."""
SEVERAL_THREADS = (
    "the model runs in several threads at once, and what their passes show is mixed: call counts, cosines and "
    "attention of a record may be of any of them"
)


class Observation:
    """The instruments of one model.

    Args:
        view: what is in the model.
        config: the scope's settings.
        hooks: where instruments register; its switch turns them on for a step.
        further: instruments from outside, classes or instances.

    Attributes:
        instruments: those that are attached, in order.
        faults: which instruments have failed.
        switch: what hooks ask first.
        passes: which forwards belong to the step under way.
        on_forward: called when a training forward of the root begins; says whether it is observed.
        on_run: called when a flow begins after an optimizer of another model has stepped.
        owner: who must live as long as the hooks of the model do (the scope, even if the user does not keep it).

    Raises:
        FlowscopeError: one from outside is no instrument, or bears a name that is taken.
    """

    def __init__(
        self, view: ModelView, config: WatchConfig, hooks: Hooks, further: Sequence[Instrument | type[Instrument]] = ()
    ) -> None:
        self.view, self.config, self.hooks = view, config, hooks
        self.faults, self.switch = hooks.faults, hooks.switch
        self.instruments = instruments_for(view, config, further, self.faults)
        self.passes = Passes(view.parameters, hooks.switch, config.exact_steps)
        self.on_forward: Callable[[], bool] = lambda: True
        self.on_run: Callable[[], Any] = lambda: None
        self.owner: Any = None
        hooks.on_stale_run = lambda: self.on_run()
        hooks.trained = view.parameters.current
        # the last one first: statistics per point stand behind the flows at whose points they are measured
        for instrument in reversed(self.instruments):
            self.faults.guard(instrument.fuse, instrument.attach, view, hooks)
        self.instruments = [i for i in self.instruments if i.fuse not in self.faults.failed]
        self._told = {event: [(i.fuse, getattr(i, event)) for i in self._hearing(event)] for event in EVENTS}
        self._weighs = any("parameters" in i.families or not i.families for i in self.instruments)
        """Whether any of them may look at the parameters."""
        hooks.before_all(view.model, "root hook", self._root)
        hooks.after(view.model, "root hook", self._root_ends, always=True)
        if not any(instrument.counts_canary for instrument in self.instruments):
            hooks.after(view.model, "root hook", self._root_output)
        if any(device.type != "cpu" for device in view.devices):
            self.faults.meter.clock = perf_counter_ns
        for buffer in (hooks.canary.buffer, *(i.buffer for i in self.instruments if i.buffer is not None)):
            buffer.prepare(view.devices)

    @property
    def model(self) -> nn.Module:
        """The user's."""
        return self.view.model

    def _hearing(self, event: str) -> list[Instrument]:
        default = getattr(Instrument, event)
        own = [i for i in self.instruments if event in ALWAYS_TOLD or getattr(type(i), event) is not default]
        # the default is asked once
        return own if event != "rests" else [i for i in self.instruments if i in own or not i.rests()]

    def _tell(self, event: str, *args: Any, **named: Any) -> None:
        """Call a method of the instruments; a fault switches off that one alone."""
        for fuse, method in self._told[event]:
            self.faults.guard(fuse, method, *args, **named)

    def _answers(self, question: str, *args: Any) -> list[Any]:
        """What the instruments say that have an answer."""
        asked = (self.faults.guard(fuse, method, *args) for fuse, method in self._told[question])
        return [answer for answer in asked if answer is not None]

    # -- hooks of the root ------------------------------------------------------------------------------------------

    def _root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        training = torch.is_grad_enabled()
        if not is_compiling():
            if self.passes.begins_in_thread():
                self.hooks.warn_once(SEVERAL_THREADS)
            if training:
                self._start_forward()
            else:
                self._tell("start_evaluation")
        if training and not self.switch.paused:
            self.faults.attempt("canary", self._count, "input", (args, kwargs))

    def _root_ends(self, *args: Any) -> None:
        if not is_compiling():
            self.passes.ends_in_thread()

    def _count(self, kind: str, given: Any) -> None:
        for tensor in floating_tensors(given):
            self.hooks.canary.count(kind, tensor)

    def _start_forward(self) -> None:
        if self.on_forward():
            self.passes.forwards += 1
            self._tell("start_forward")

    def review(self) -> None:
        """A forward begins that is not the first of its step: earlier ones may have deposited for nothing."""
        if event := self.passes.review():
            self._tell(event)

    def _root_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.switch.paused and torch.is_grad_enabled():
            self._count("forward", output)

    def runs(self) -> int:
        """Grows whenever the model runs with gradient, also where its own `__call__` is not what the loop calls."""
        total: int = self.passes.forwards + sum(self._answers("runs"))
        return total

    def rests(self) -> bool:
        """Whether nobody needs to hear of a step that is not sampled."""
        return all(self._answers("rests"))

    # -- the step ------------------------------------------------------------------------------------------------------

    def begin_step(self, *, sampling: bool, slow: bool, seldom: bool) -> None:
        """Turn the instruments on or off for the step that begins; what is pending is dropped."""
        if self.switch.sampling or sampling:
            self.faults.attempt("drop of a step", self.drop)
        self.switch.sampling, self.switch.slow, self.switch.seldom = sampling, slow, seldom
        self.hooks.turns.now.clear()
        if sampling:
            self._tell("begin_step")
        self.faults.attempt("passes", partial(self.passes.begin_step, sampling=sampling))

    def drop(self) -> None:
        """Forget what was deposited: it belongs to no step of ours."""
        self.faults.attempt("leaves", self.hooks.release_leaves)
        self._let_go()
        self._tell("drop")

    def _let_go(self) -> None:
        self.faults.attempt("parameter list", self.view.parameters.let_go)

    def replay(self) -> None:
        """The weights are still (nearly) those of the forward, for the last time in this step."""
        self._tell("replay")

    def scaled_by(self, scale: Tensor | float | None) -> None:
        """The loss scale of this step's backward, None where there is no scaler."""
        self._tell("scaled_by", scale)

    def before_update(self, *, updating: bool = True) -> None:
        """The first optimizer of a sampled step is about to change the weights."""
        if self._weighs:
            self.faults.attempt("parameter list", partial(self.view.parameters.hold, fixed=updating))
        self._tell("before_update", updating=updating)

    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """Read the gradients that an optimizer (ids of its parameters), or all, will use."""
        self.faults.attempt("passes", self.passes.gradients_used)
        self._tell("read_gradients", only, scale)

    def after_update(self) -> None:
        """The weights have changed."""
        self._tell("after_update")

    def update_failed(self) -> None:
        """The optimizer raised: what it was about to use is read again."""
        self._let_go()
        self._tell("update_failed")

    def snapshot(self) -> Snapshot:
        """Take everything this step deposited, on its way to the host; `begin_step` starts again from nothing."""
        self.faults.attempt("passes", self.passes.step_ended)
        self._tell("recall", counts=not self.passes.fills_grad)
        snapshot = Snapshot(self.instruments, self.faults)
        self._let_go()
        return snapshot

    def take_canary(self) -> HostCopy:
        """The canary's counts of this step on their way to the host, and start again from zero."""
        buffer = self.hooks.canary.buffer
        return HostCopy([] if buffer.empty() else buffer.take())

    def close(self) -> None:
        """Take off what the model's hooks do not cover, and let go of everything."""
        self.faults.attempt("closing", self.drop)
        self._tell("close")

    # -- over ranks ----------------------------------------------------------------------------------------------------

    def layout(self) -> list[Any]:
        """What ranks must have in common for their numbers to add up."""
        return [[i.fuse, self.faults.guard(i.fuse, i.layout)] for i in self.instruments]

    def expects(self, part: str) -> bool:
        """Whether a part of the all-reduce vector that the ranks once had in common may still come."""
        return all(self._answers("expects", part))

    def replicated(self) -> NDArray[np.bool_] | None:
        """Which of `Snapshot.replicas` are the same on all ranks; None where nothing is compared."""
        return next(iter(self._answers("replicated")), None)
