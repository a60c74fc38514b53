"""The hooks of one flow: what each call of its modules shows goes to the rows of its points.

In the forward a hook finds the hidden state, asks `Calls` which point it is, lets the measures of the flow look at it,
and registers their deposit on its gradient (flowscope/hooks).

Axis letters: D features, L depth, P = L + 1 points.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.plan import Flow, display_path
from flowscope.hooks.calls import ENTRY, Calls, PointKey
from flowscope.hooks.points import PointMeasure, PointRows, Stranger, placed
from flowscope.instruments.cosines import Cosines
from flowscope.instruments.gradient_flow import AddedNorms, Norms
from flowscope.instruments.rank import Rank
from flowscope.instruments.widths import Widths
from flowscope.probes import statistics
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.canary import Canary
from flowscope.probes.hooks import Hooks, Switch
from flowscope.probes.layout import AxisReader, hidden_input, hidden_output, is_compiling
from flowscope.probes.payload import local
from flowscope.torch_internals import in_backward

__all__ = ["FlowObserver", "PointKey"]

PLAIN, TRACED, RECOMPUTED = "plain", "traced", "recomputed"
"""How a hook is called: in a forward, while torch.compile traces one, inside backward (a checkpoint recomputes)."""


class FlowObserver:
    """The hooks of one flow and the rows of its points.

    Args:
        streams: whether the points are several residual streams, which have no one hidden state to compare.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: Flow,
        config: WatchConfig,
        switch: Switch,
        canary: Canary,
        hooks: Hooks,
        buffer: DepositBuffer,
        borrowed: dict[str, FlowObserver] | None = None,
        *,
        streams: bool = False,
    ) -> None:
        self.flow, self.switch, self.canary, self.hooks = flow, switch, canary, hooks
        self.part = f"flow {flow.name}"
        self.borrowed = borrowed or {}
        self.on_drop: Callable[[], None] = lambda: None
        self.seen = PointRows(buffer, _measures(flow, config, hooks, buffer, streams=streams))
        self.calls = Calls(flow, self.seen.begin_pass)
        self.paths = [display_path(path) for path in flow.outputs]
        self._readers: list[AxisReader] = []
        self._labelled: tuple[list[PointKey], tuple[str, ...]] = ([], ())
        every_step = {len(flow.outputs) - 1} | ({0} if flow.entry is None else set())
        for index, path in enumerate(flow.outputs):
            module = model.get_submodule(path)
            self._readers.append(AxisReader.of(module))
            if path not in self.borrowed:
                hooks.after(module, self.part, partial(self._after, index), None if index in every_step else switch)
                self.seen.row((index, 0))
        if flow.entry is not None and flow.entry not in self.borrowed:
            hooks.before(model.get_submodule(flow.entry), self.part, self._before)
            self.seen.row((ENTRY, 0))

    # -- forward -------------------------------------------------------------------------------------------------

    def start_forward(self, *, training: bool) -> None:
        """The root's forward begins."""
        self.calls.begin_forward(training=training)

    def _called(self) -> str | None:
        """How the hook is called; None where nobody looks: paused, or a pass that trains nothing."""
        if self.switch.paused or not (self.calls.in_training or torch.is_grad_enabled()):
            return None
        if is_compiling():
            return TRACED
        return RECOMPUTED if in_backward() else PLAIN

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first block is entered: its input may be x_0."""
        called = self._called()
        if called is None:
            return
        if called != TRACED:
            self._drop_stale(called)
            if not self.calls.begins((args, kwargs), recomputing=called == RECOMPUTED):
                return
        x = hidden_input(args, kwargs)
        if x is None:
            return
        tracked = x.requires_grad and torch.is_grad_enabled()
        if not self.switch.sampling:
            if tracked and called != RECOMPUTED:
                self.hooks.on_gradient(x, self.part, partial(self.canary.count, "backward"), "canary")
        elif called == TRACED:
            # inside a checkpoint x belongs to the graph outside, so a hook on it may only capture x itself
            if tracked:
                self.hooks.on_gradient(x, self.part, partial(self._deposit_entry, (ENTRY, 0), x), (ENTRY, 0))
        elif not (called == RECOMPUTED and self.calls.waits((ENTRY, 0))):
            self._observe_entry(x, tracked=tracked, recomputing=called == RECOMPUTED)

    def _observe_entry(self, x: Tensor, *, tracked: bool, recomputing: bool) -> None:
        key, with_grad = (ENTRY, 0), torch.is_grad_enabled()
        seen = self.seen.look(key, x, self._readers[0])
        self.calls.entered(with_grad=with_grad, tracked=tracked, recomputing=recomputing)
        if tracked:
            self.seen.hold_entry(None)
            self._register(x, key, seen, ambiguous=recomputing and self.calls.ambiguous(ENTRY))
        elif not recomputing and with_grad:
            self.seen.hold_entry(seen)

    def _after(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A block has run: its output is a point."""
        called = self._called()
        if called is None:
            return
        if called == PLAIN and torch.is_grad_enabled():
            self.calls.runs += 1
        like = None if called == PLAIN and isinstance(output, Tensor) else hidden_input(args, kwargs)
        x = hidden_output(output, like)
        if not self.switch.sampling:
            if x is not None and x.requires_grad:
                self._canary(index, x, recomputing=called == RECOMPUTED)
        elif called == TRACED:
            if x is not None and x.requires_grad:
                self._observe_traced(index, x, like)
        else:
            self._drop_stale(called)
            key = (
                self.calls.recomputed(index, x)
                if called == RECOMPUTED
                else self.calls.returned(index, x, (args, kwargs), with_grad=torch.is_grad_enabled())
            )
            if key is not None and x is not None:
                self._observe(key, x, like, recomputing=called == RECOMPUTED)

    def _observe(self, key: PointKey, x: Tensor, like: Tensor | None, *, recomputing: bool) -> None:
        index = key[0]
        if not x.requires_grad:
            self.seen.pass_by(key, x, self._readers[index])
            return
        # in a recomputation the block's input is the point before
        before = like if recomputing and self.flow.entry is not None else None
        seen = self.seen.look(key, x, self._readers[index], follows=not recomputing, before=before)
        if index == len(self.flow.outputs) - 1:
            self.canary.count("forward", x)
        self.calls.track(key, recomputing=recomputing)
        self._register(x, key, seen, ambiguous=recomputing and self.calls.ambiguous(index))

    def _observe_traced(self, index: int, x: Tensor, like: Tensor | None) -> None:
        if x is like:
            self.seen.hide((index - 1, 0))
            like = None
        self._register(x, (index, 0), self.seen.look((index, 0), x, self._readers[index], follows=False, before=like))

    def _canary(self, index: int, x: Tensor, *, recomputing: bool) -> None:
        if index == len(self.flow.outputs) - 1:
            self.canary.count("forward", x)
        if index == 0 and self.flow.entry is None and not recomputing:
            self.hooks.on_gradient(x, self.part, partial(self.canary.count, "backward"), "canary")

    def _drop_stale(self, called: str) -> None:
        if called == PLAIN and self.switch.stale:
            self.on_drop()

    # -- backward ----------------------------------------------------------------------------------------------------

    def _register(self, x: Tensor, key: PointKey, seen: list[Any], *, ambiguous: bool = False) -> None:
        entry = self.seen.take_entry() if key[0] != ENTRY and not is_compiling() else None
        self.hooks.on_gradient(x, self.part, partial(self._deposit, key, seen, ambiguous, entry), key)

    def _deposit(
        self, key: PointKey, seen: list[Any], ambiguous: bool, entry: list[Any] | None, gradient: Tensor | None
    ) -> None:
        """The gradient of a point has arrived; None: it cannot be seen."""
        if self.switch.paused:
            return
        if gradient is not None:
            gradient = local(gradient.coalesce().values() if gradient.is_sparse else gradient)
        if ambiguous:
            settled = self.calls.arrived(key)
            if settled is None:
                return
            key = settled
        self.seen.deposit(key, seen, gradient)
        if entry is not None:
            self.seen.deposit((ENTRY, 0), entry, None)
        if gradient is not None and (key[0] == ENTRY or (self.flow.entry is None and key == (0, 0))):
            self.canary.count("backward", statistics.real(gradient))

    def _deposit_entry(self, key: PointKey, x: Tensor, gradient: Tensor | None) -> None:
        self._deposit(key, self.seen.look(key, x, self._readers[0]), False, None, gradient)

    # -- what the flush reads ------------------------------------------------------------------------------------------

    def points(self) -> list[PointKey]:
        """The points in depth order."""
        return self.calls.points()

    def labels(self, points: list[PointKey]) -> tuple[str, ...]:
        """Module paths of the points; `path:input` for x_0, `path#call` where a module is called several times."""
        if points != self._labelled[0]:
            repeated = {index for index, call in points if call}
            entry = f"{display_path(str(self.flow.entry))}:input"
            named = (
                entry if i == ENTRY else f"{self.paths[i]}#{call}" if i in repeated else self.paths[i]
                for i, call in points
            )
            self._labelled = (points, tuple(named))
        return self._labelled[1]

    def source(self, key: PointKey) -> tuple[FlowObserver, PointKey]:
        """The observer that holds the row of a point (another flow's where this flow borrows it)."""
        path = str(self.flow.entry) if key[0] == ENTRY else self.flow.outputs[key[0]]
        owner = self.borrowed.get(path)
        if owner is None:
            return self, key
        if key[0] == ENTRY:
            return owner, (ENTRY, 0)
        return owner, (owner.flow.outputs.index(path), key[1])

    def forget(self) -> None:
        """Forget this step's Python-side counts, slow material and remembered positions."""
        self.calls.forget(sampled=self.switch.sampling)
        self.seen.forget()

    @property
    def rows(self) -> dict[PointKey, int]:
        """The row of each point."""
        return self.seen.numbers

    @property
    def sharded(self) -> set[PointKey]:
        """Points of which ranks of the same batch hold a part each."""
        return self.seen.sharded

    @property
    def runs(self) -> int:
        """Grows whenever blocks run with gradient."""
        return self.calls.runs

    @property
    def forward_calls(self) -> dict[PointKey, int]:
        """How often each point was called in this step."""
        return self.calls.forward

    @property
    def tracked_calls(self) -> dict[PointKey, int]:
        """How often each point could give a gradient."""
        return self.calls.tracked

    @property
    def depth(self) -> bool:
        """Whether its hidden states are compared with one another."""
        return any(isinstance(measure, Cosines) for measure in self.seen.measures)

    @property
    def grams(self) -> dict[PointKey, Tensor]:
        """Of the step's slow schedule."""
        return next((measure.grams for measure in self.seen.measures if isinstance(measure, Rank)), {})

    @property
    def slices(self) -> dict[PointKey, Tensor]:
        """Likewise."""
        return next((measure.slices for measure in self.seen.measures if isinstance(measure, Rank)), {})

    @property
    def widths(self) -> dict[PointKey, int]:
        """Of the points of a flow that concatenates."""
        return next((measure.widths for measure in self.seen.measures if isinstance(measure, Widths)), {})


def _measures(
    flow: Flow, config: WatchConfig, hooks: Hooks, buffer: DepositBuffer, *, streams: bool
) -> list[PointMeasure]:
    measures: list[PointMeasure] = [AddedNorms(Norms(), buffer, statistics.SQUARE)]
    if "depth" in config.metrics and flow.kind in ("blocks", "stage", "chain", "concat") and not streams:
        measures.append(Cosines(buffer, statistics.TO_INPUT, config.positions, origin_first=flow.entry is None))
        measures.append(Rank(hooks.switch))
    if flow.kind == "concat":
        measures.append(Widths())
    firsts, _ = placed(hooks.statistics, statistics.COLUMNS)
    further = zip(hooks.statistics, firsts, strict=True)
    return measures + [Stranger(statistic, buffer, at, hooks.faults) for statistic, at in further]
