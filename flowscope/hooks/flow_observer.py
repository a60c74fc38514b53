"""The hooks of one flow: what each call of its modules shows goes to the rows of its points.

In the forward a hook finds the hidden state, asks `Calls` which point it is, lets the measures of the flow look at it,
and registers their deposit on its gradient (flowscope/hooks).

Axis letters: D features, L depth, P = L + 1 points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.hooks.calls import ENTRY, Calls, PointKey
from flowscope.hooks.hooks import Hooks
from flowscope.hooks.lineage import FlowLineage, Lineage
from flowscope.hooks.points import Deposits, PointMeasure
from flowscope.model.hidden_state import AxisReader, beside, hidden_input, hidden_output, is_compiling
from flowscope.model.plan import Flow, display_path
from flowscope.sums import statistics
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.payload import local
from flowscope.torch_internals import in_backward

PLAIN, TRACED, RECOMPUTED = "plain", "traced", "recomputed"
"""How a hook is called: in a forward, while torch.compile traces one, inside backward (a checkpoint recomputes)."""


class FlowObserver:
    """The hooks of one flow.

    Args:
        model: in which its modules are.
        flow: which modules they are.
        measures: what is measured at its points.
        hooks: where it registers.
        buffer: in which its points have their rows.
        borrowed: path -> the flow that watches this module already; its rows are this flow's too.
        lineage: which points of the model come from which.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: Flow,
        measures: Sequence[PointMeasure],
        hooks: Hooks,
        buffer: DepositBuffer,
        borrowed: Mapping[str, FlowObserver],
        lineage: Lineage,
    ) -> None:
        self.flow, self.hooks, self.switch, self.canary = flow, hooks, hooks.switch, hooks.canary
        self.fuse = f"flow {flow.name}"
        self.borrowed = borrowed
        self.seen = Deposits(buffer, measures)
        self.lineage = FlowLineage(flow, None if flow.kind == "time" else lineage)
        self.calls = Calls(flow, self._begin_pass)
        self.paths = [display_path(path) for path in flow.outputs]
        self._readers: list[AxisReader] = []
        self._labelled: tuple[list[PointKey], tuple[str, ...]] = ([], ())
        every_step = {len(flow.outputs) - 1} | ({0} if flow.entry is None else set())
        for index, path in enumerate(flow.outputs):
            module = model.get_submodule(path)
            self._readers.append(AxisReader.of(module))
            if path not in self.borrowed:
                unsampled = index in every_step
                hooks.after(module, self.fuse, partial(self._after, index), None if unsampled else hooks.switch)
                self.seen.row((index, 0))
        if flow.entry is not None and flow.entry not in self.borrowed:
            hooks.before(model.get_submodule(flow.entry), self.fuse, self._before)
            self.seen.row((ENTRY, 0))

    # -- forward -------------------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        self.seen.begin_pass()
        self.lineage.begin_pass()

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
                self.hooks.on_gradient(x, self.fuse, partial(self.canary.count, "backward"), "canary")
        elif called == TRACED:
            # inside a checkpoint x belongs to the graph outside, so a hook on it may only capture x itself
            if tracked:
                self.hooks.on_gradient(x, self.fuse, partial(self._deposit_entry, (ENTRY, 0), x), (ENTRY, 0))
        elif not (called == RECOMPUTED and self.calls.waits((ENTRY, 0))):
            self._observe_entry(x, tracked=tracked, recomputing=called == RECOMPUTED)

    def _observe_entry(self, x: Tensor, *, tracked: bool, recomputing: bool) -> None:
        key, with_grad = (ENTRY, 0), torch.is_grad_enabled()
        seen = self.seen.look(key, x, self._readers[0])
        self.calls.entered(with_grad=with_grad, tracked=tracked, recomputing=recomputing)
        if with_grad and not recomputing:
            self.lineage.entered(x)
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
            if key is None or x is None:
                return
            follows = called == PLAIN
            if follows and torch.is_grad_enabled():
                follows = self.lineage.returned(key, (args, kwargs), x)
            self._observe(key, x, like, beside(output, x), follows=follows, recomputing=called == RECOMPUTED)

    def _observe(
        self,
        key: PointKey,
        x: Tensor,
        like: Tensor | None,
        others: Sequence[Tensor],
        *,
        follows: bool,
        recomputing: bool,
    ) -> None:
        index = key[0]
        if not x.requires_grad:
            self.seen.pass_by(key, x, self._readers[index])
            return
        # in a recomputation the block's input is the point before
        before = like if recomputing and self.flow.entry is not None else None
        seen = self.seen.look(key, x, self._readers[index], follows=follows, before=before, beside=others)
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
            self.hooks.on_gradient(x, self.fuse, partial(self.canary.count, "backward"), "canary")

    def _drop_stale(self, called: str) -> None:
        if called == PLAIN and self.switch.stale:
            self.hooks.on_stale_run()

    # -- backward ----------------------------------------------------------------------------------------------------

    def _register(self, x: Tensor, key: PointKey, seen: list[Any], *, ambiguous: bool = False) -> None:
        entry = self.seen.take_entry() if key[0] != ENTRY and not is_compiling() else None
        self.hooks.on_gradient(x, self.fuse, partial(self._deposit, key, seen, ambiguous, entry), key)

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
