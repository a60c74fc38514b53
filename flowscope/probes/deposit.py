"""Deposit on backward: forward statistics of a point wait for its gradient, then both are added to the point's row.

What got no backward is therefore not counted (evaluation, no_grad, the discarded first pass of reentrant
checkpointing), and micro-batches and calls become one sum. `FlowObserver` watches one flow; a module called k times
inside one forward is k points.

Axis letters: B batch, T tokens, D features, L depth, P = L + 1 points.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.plan import Flow, display_path
from flowscope.probes import statistics
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.canary import Canary
from flowscope.probes.depth import DepthRow, DepthRows
from flowscope.probes.hooks import Hooks, Switch, in_backward
from flowscope.probes.layout import (
    AxisReader,
    derives_from,
    floating_tensors,
    hidden_input,
    hidden_output,
    is_compiling,
    node_number,
)
from flowscope.probes.payload import local
from flowscope.probes.statistics import Positions, Sums, full_precision, is_host

ENTRY = -1
PointKey = tuple[int, int]
"""(index of the module among the flow's outputs, or ENTRY; number of the call within one forward)."""
Forward = tuple[Sums, Sums | DepthRow | None]
"""A point's forward sums that wait for its gradient: those of the whole tensor, and those between points."""
MAX_CALLS = 4096


class FlowObserver:
    """The hooks of one flow and the rows of its points."""

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
    ) -> None:
        self.flow, self.config, self.switch, self.canary, self.buffer = flow, config, switch, canary, buffer
        self.hooks, self.faults = hooks, hooks.faults
        self.part = f"flow {flow.name}"
        self.paths = [display_path(path) for path in flow.outputs]
        self.borrowed = borrowed or {}
        self.depth = "depth" in config.metrics and flow.kind in ("blocks", "stage", "chain", "concat")
        self.on_drop: Callable[[], None] = lambda: None
        self.rows: dict[PointKey, int] = {}
        self.sharded: set[PointKey] = set()
        self.forward_calls: Counter[PointKey] = Counter()
        self.tracked_calls: Counter[PointKey] = Counter()
        self.grams: dict[PointKey, Tensor] = {}
        self.slices: dict[PointKey, Tensor] = {}
        self.widths: dict[PointKey, int] = {}
        self._executed: dict[PointKey, None] = {}
        self._readers: list[AxisReader] = []
        self._canaries = {len(flow.outputs) - 1} | ({0} if flow.entry is None else set())
        self._reordered = False
        self.in_training = True
        self.runs = 0
        """Grows whenever blocks run with gradient, outside of compiled code and recomputation."""
        # until a whole step has shown that no module is called twice, outputs are marked to tell loops from new inputs
        self._repeats = True
        self._repeated = False
        self._depth_rows = DepthRows()
        self._labelled: tuple[list[PointKey], tuple[str, ...]] = ([], ())
        self._new_pass()
        for index, path in enumerate(flow.outputs):
            module = model.get_submodule(path)
            self._readers.append(AxisReader.of(module))
            if path not in self.borrowed:
                every_step = index in self._canaries
                hooks.after(module, self.part, partial(self._after, index), None if every_step else switch)
                self._row((index, 0))
        self.has_entry = flow.entry is not None and flow.entry not in self.borrowed
        if self.has_entry:
            hooks.before(model.get_submodule(str(flow.entry)), self.part, self._before)
            self._row((ENTRY, 0))

    # -- forward -------------------------------------------------------------------------------------------------

    def _new_pass(self) -> None:
        self._calls: Counter[int] = Counter()
        self._latest = ENTRY
        self._recomputed: Counter[int] = Counter()
        self._tracked: set[PointKey] = set()
        self._order: dict[PointKey, None] = {}
        self._untracked: dict[int, list[int]] = {}
        self._last_output: weakref.ref[Tensor] | None = None
        self._last_number: int | None = None
        self._previous: Positions | None = None
        self._origin: Positions | None = None
        self._entry_waits: Forward | None = None

    def start_forward(self, *, training: bool) -> None:
        """The root's forward begins: calls are counted from 0 again; one without gradient is not looked at."""
        self.in_training = training
        if training:
            self._new_pass()

    def _mark_output(self, x: Tensor | None) -> None:
        if not self._repeats:
            return
        self._last_output = weakref.ref(x) if x is not None else None
        self._last_number = node_number(x) if x is not None else None

    def _continues(self, args: Any, kwargs: Any) -> bool:
        """Whether a repeated call goes on from the flow's last output (a loop) or starts afresh (a second input)."""
        last = self._last_output() if self._last_output else None
        return derives_from(floating_tensors((args, kwargs)), last, self._last_number)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first block is entered: its input may be x_0."""
        if self.switch.paused or not (self.in_training or torch.is_grad_enabled()):
            return
        tracing = is_compiling()
        recomputing = not tracing and in_backward()
        begins, late = (True, None) if tracing else self._begins(args, kwargs, recomputing=recomputing)
        x = hidden_input(args, kwargs) if begins else None
        if x is None:
            return
        tracked = x.requires_grad and torch.is_grad_enabled()
        if not self.switch.sampling:
            if tracked and not recomputing:
                self.hooks.on_gradient(x, self.part, partial(self.canary.count, "backward"), "canary")
        elif tracing:
            # inside a checkpoint x belongs to the graph outside, so a hook on it may only capture x itself
            if tracked:
                self.hooks.on_gradient(x, self.part, partial(self._deposit_entry, (ENTRY, 0), x), (ENTRY, 0))
        elif not (recomputing and (ENTRY, 0) in self._tracked):
            self._observe_entry(x, late, tracked=tracked, recomputing=recomputing)

    def _begins(self, args: Any, kwargs: Any, *, recomputing: bool) -> tuple[bool, int | None]:
        """Whether a call of the first block begins the flow (a loop's later calls do not); None: shown later."""
        first = self.flow.outputs.index(str(self.flow.entry)) if self.flow.entry in self.flow.outputs else 0
        if recomputing:
            if len(self._untracked.get(first, ())) > 1:
                return not self._continues(args, kwargs), first
            return True, None
        self._drop_stale()
        if self._calls[first]:
            if self._continues(args, kwargs):
                return False, None
            self._new_pass()
        return True, None

    def _observe_entry(self, x: Tensor, late: int | None, *, tracked: bool, recomputing: bool) -> None:
        key = (ENTRY, 0)
        forward, positions = self._forward(key, self._readers[0], x, None)
        self._origin = self._origin or positions
        self._previous = positions
        if torch.is_grad_enabled():
            self._executed.setdefault(key)
            self.forward_calls[key] += 1
        if tracked:
            if not recomputing:
                self._tracked.add(key)
            self.tracked_calls[key] += 1
            self._entry_waits = None
            self._register(x, key, forward, self._slow_slices(self._readers[0], x), late)
        elif not recomputing and torch.is_grad_enabled():
            self._entry_waits = forward

    def _after(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A block has run: its output is a point."""
        if self.switch.paused or not (self.in_training or torch.is_grad_enabled()):
            return
        tracing = is_compiling()
        recomputing = not tracing and in_backward()
        if not tracing and not recomputing and torch.is_grad_enabled():
            self.runs += 1
        plain = isinstance(output, Tensor) and not tracing and not recomputing
        like = None if plain else hidden_input(args, kwargs)
        x = hidden_output(output, like)
        if not self.switch.sampling:
            if x is not None and x.requires_grad:
                self._canary(index, x, recomputing=recomputing)
        elif tracing:
            if x is not None and x.requires_grad:
                self._observe_traced(index, x, like)
        else:
            key = self._recall(index, x) if recomputing else self._call(index, x, args, kwargs)
            if key is None or x is None:
                return
            if x.requires_grad:
                self._observe(index, key, x, like, recomputing)
            elif self.depth:
                self._remember(self._positions(self._readers[index], x))

    def _observe_traced(self, index: int, x: Tensor, like: Tensor | None) -> None:
        if x is like:
            self._hide(index - 1)
            like = None
        before = self._positions(self._readers[index], like) if like is not None and self.depth else None
        forward, _ = self._forward((index, 0), self._readers[index], x, before)
        self._register(x, (index, 0), forward, None)

    def _call(self, index: int, x: Tensor | None, args: Any, kwargs: Any) -> PointKey:
        """Count a call in the forward, and return the point it is."""
        self._drop_stale()
        calls = self._calls.get(index, 0)  # a Counter makes a Python call of what it does not know
        if calls:
            self._repeated = self._repeats = True
            if not self._continues(args, kwargs):
                self._new_pass()
                calls = 0
        key = (index, min(calls, MAX_CALLS - 1))
        self._reordered = self._reordered or (index < self._latest and not calls)
        self._latest = index
        self._calls[index] = calls + 1
        self._mark_output(x)
        self._order.setdefault(key)
        if x is None or not x.requires_grad:
            self._untracked.setdefault(index, []).append(key[1])
        if torch.is_grad_enabled():
            self.forward_calls[key] = self.forward_calls.get(key, 0) + 1
            self._executed.setdefault(key)
        return key

    def _recall(self, index: int, x: Tensor | None) -> PointKey | None:
        """Return the point that a checkpoint recomputes, None where the first pass already waits for its gradient."""
        key = self._recalled(index)
        if key in self._tracked:
            return None
        self._mark_output(x)
        return key

    def _observe(self, index: int, key: PointKey, x: Tensor, like: Tensor | None, recomputing: bool) -> None:
        reader = self._readers[index]
        before = self._positions_before(reader, like, recomputing=recomputing)
        forward, positions = self._forward(key, reader, x, before)
        if positions is not None:
            self._remember(positions)
        if index == len(self.flow.outputs) - 1:
            self.canary.count("forward", x)
        late = None
        if recomputing:
            if any(k not in self._executed for k in (*self._order, key)):
                self._executed = dict.fromkeys([*self._order, *self._executed, key])
            if len(self._untracked.get(index, ())) > 1:
                late = index
        else:
            self._tracked.add(key)
        self.tracked_calls[key] = self.tracked_calls.get(key, 0) + 1
        self._register(x, key, forward, self._slow_slices(reader, x) if self.switch.slow else None, late)

    def _recalled(self, index: int, offset: int = 0) -> PointKey:
        """The call that a checkpoint recomputes: those without gradient in the first pass, the last one first."""
        calls = self._untracked.get(index, [0])
        return index, calls[-1 - (self._recomputed[index] + offset) % len(calls)]

    def _canary(self, index: int, x: Tensor, *, recomputing: bool) -> None:
        if index == len(self.flow.outputs) - 1:
            self.canary.count("forward", x)
        if index == 0 and self.flow.entry is None and not recomputing:
            self.hooks.on_gradient(x, self.part, partial(self.canary.count, "backward"), "canary")

    def _drop_stale(self) -> None:
        if self.switch.stale:
            self.on_drop()

    def _remember(self, positions: Positions) -> None:
        self._previous = positions
        if self.flow.entry is None and self._origin is None:
            self._origin = positions

    def _own_part(self, key: PointKey, x: Tensor) -> Tensor:
        """This rank's part of a DTensor; where it is only a part, ranks of the same batch add up too."""
        part = local(x)
        if part is not x and any(placement.is_shard() for placement in x.placements):  # type: ignore[attr-defined]
            self.sharded.add(key)
        return part

    def _positions(self, reader: AxisReader, x: Tensor) -> Positions:
        x = local(x)
        states, axis, sequence = reader.read(x)
        return statistics.sample_positions(states, axis, self.config.positions, sequence=sequence)

    def _positions_before(self, reader: AxisReader, like: Tensor | None, *, recomputing: bool) -> Positions | None:
        """The previous point's positions: remembered in a plain forward, in a recomputation the block's input."""
        if not self.depth:
            return None
        if not recomputing:
            return self._previous
        return self._positions(reader, like) if like is not None and self.flow.entry is not None else None

    def _forward(
        self, key: PointKey, reader: AxisReader, x: Tensor, before: Positions | None
    ) -> tuple[Forward, Positions | None]:
        """Return the forward sums of a point, and the positions seen."""
        x = self._own_part(key, x.detach())
        head = statistics.head(x, float(x.numel()))
        if self.flow.kind == "concat" and not is_compiling():
            states, axis, _ = reader.read(x)
            self.widths[key] = states.shape[axis]
        if not self.depth:
            return (head, None), None
        if is_host(x):  # only copies are made here
            between, positions = self._between(key, reader, x, before, self._depth_rows.add)
        else:
            with full_precision(x):
                between, positions = self._between(key, reader, x, before, statistics.depth_statistics)
        return (head, between), positions

    def _between(
        self,
        key: PointKey,
        reader: AxisReader,
        x: Tensor,
        before: Positions | None,
        compare: Callable[[Positions | None, Positions, Positions | None], Sums | DepthRow],
    ) -> tuple[Sums | DepthRow, Positions]:
        positions = self._positions(reader, x)
        origin = self._origin if key[0] != ENTRY else positions
        if origin is None and self.flow.entry is None:
            origin = positions
        return compare(positions.alike(before), positions, positions.alike(origin)), positions

    # -- slow probes' material --------------------------------------------------------------------------------------

    def _slow_slices(self, reader: AxisReader, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """On the slow schedule: the Gram matrix of 64 positions of one sequence, and 16 positions for cosines."""
        if is_compiling() or not self.switch.slow or not self.depth:
            return None
        with full_precision(x):
            states, axis, _ = reader.read(local(x.detach()))
            states = statistics.real_features(statistics.feature_last(states, axis))
            one = (states[:, 0] if states.shape[1] == 1 else states[0])[:64].to(statistics.wide(x.device))
            flat = states.reshape(-1, states.shape[-1])
            some = flat[:: -(-flat.shape[0] // 16)][:16].float()
            return one @ one.T, some / torch.linalg.vector_norm(some, dim=-1, keepdim=True)

    # -- backward ----------------------------------------------------------------------------------------------------

    def _register(
        self, x: Tensor, key: PointKey, forward: Forward, slow: tuple[Tensor, Tensor] | None, late: int | None = None
    ) -> None:
        entry = None
        if key[0] != ENTRY and not is_compiling():
            entry, self._entry_waits = self._entry_waits, None
        self.hooks.on_gradient(x, self.part, partial(self._deposit, key, forward, slow, late, entry), key)

    def _deposit(
        self,
        key: PointKey,
        forward: Forward,
        slow: tuple[Tensor, Tensor] | None,
        late: int | None,
        entry: Forward | None,
        gradient: Tensor | None,
    ) -> None:
        if self.switch.paused:
            return
        if gradient is None:
            self._add(key, forward, None)
            return
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        gradient = local(gradient)
        if late is not None and key[0] == ENTRY:
            # the outputs of its segment have deposited: the last of them says which call this is the input of
            if self._recalled(late, -1) != (late, 0):
                return
        elif late is not None:
            key = self._recalled(late)
            self._recomputed[late] += 1
        backward = statistics.head(gradient, 1.0)
        self._add(key, forward, backward)
        if entry is not None:
            self._add((ENTRY, 0), entry, None)
        if key[0] == ENTRY or (self.flow.entry is None and key == (0, 0)):
            self.canary.buffer.add(Canary.KINDS.index("backward"), 0, backward[1:2])
        if slow is not None:
            self.grams[key], self.slices[key] = slow

    def _add(self, key: PointKey, forward: Forward, backward: Sums | None) -> None:
        row = self._row(key)
        head, between = forward
        if isinstance(head, tuple) and isinstance(backward, tuple):
            self.buffer.add(row, statistics.SQUARE, head + backward)  # their columns are neighbours
        else:
            self.buffer.add(row, statistics.SQUARE, head)
            if backward is not None:
                self.buffer.add(row, statistics.GRAD_SQUARE, backward)
        if between is not None:
            sums = between.read() if isinstance(between, DepthRow) else between
            self.buffer.add(row, statistics.TO_INPUT, sums)

    def _hide(self, index: int) -> None:
        """Compiled: the next block changed this point in place. What its hook gets is a part of the gradient: NaN."""
        if (row := self.rows.get((index, 0))) is not None:
            for column in (statistics.GRAD_SQUARE, *([statistics.SQUARE] if index == ENTRY else [])):
                self.buffer.hide(row, column)

    def _deposit_entry(self, key: PointKey, x: Tensor, gradient: Tensor | None) -> None:
        self._deposit(key, self._forward(key, self._readers[0], x, None)[0], None, None, None, gradient)

    def _row(self, key: PointKey) -> int:
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = self.buffer.new_row()
        return row

    # -- what the flush reads ------------------------------------------------------------------------------------------

    def points(self) -> list[PointKey]:
        """The points in depth order: structural order unless modules ran in another order or several times."""
        head = [(ENTRY, 0)] if self.flow.entry is not None else []
        ran = [key for key in self._executed if key[0] != ENTRY]
        if self._reordered or any(call for _, call in ran):
            reached = {index for index, _ in ran}
            return head + ran + [(i, 0) for i in range(len(self.paths)) if i not in reached]
        return head + [(i, 0) for i in range(len(self.paths))]

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
        if self._executed and self.switch.sampling:
            self._repeats = self._repeated
        self._new_pass()
        self.forward_calls.clear()
        self.tracked_calls.clear()
        self.grams.clear()
        self.slices.clear()
