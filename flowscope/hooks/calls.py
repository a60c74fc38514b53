"""Which call of a module is this? A module called k times inside one forward is k points of its flow.

`Calls` is told of the events of one flow: a forward begins, its first block is entered, a block has returned, a
checkpoint recomputes one, a gradient arrives. It answers which point each call is, and knows no statistic.

- A repeated call that goes on from the flow's last output is a loop: the next call of the same module. One that does
  not is a further input (siamese networks, several passes): the calls are counted from 0 again.
- A checkpoint runs a call twice, first without a gradient, then inside backward, the last call first. Where it ran a
  module several times it may recompute them in another order: the gradients, which arrive last call first, decide.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowscope.model.hidden_state import derives_from, floating_tensors, node_number
from flowscope.model.plan import Flow

ENTRY = -1
PointKey = tuple[int, int]
"""(index of the module among the flow's outputs, or ENTRY; number of the call within one pass)."""
MAX_CALLS = 4096


class Pass:
    """The calls of one pass through the flow, from its first block to the last."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.latest = ENTRY
        self.order: dict[PointKey, None] = {}
        self.waiting: set[PointKey] = set()
        """Those that wait for their gradient since the forward: a recomputation of them is no news."""
        self.untracked: dict[int, list[int]] = {}
        """Those that gave no gradient in the forward, by module: a checkpoint recomputes them."""
        self.arrived: Counter[int] = Counter()
        """How many recomputed calls of a module got their gradient."""
        self.output: weakref.ref[Tensor] | None = None
        self.node: int | None = None

    def recomputed(self, index: int, further: int = 0) -> PointKey:
        """The call of a module whose recomputation is due, last one first; `further`: so many after it."""
        calls = self.untracked.get(index, [0])
        return index, calls[-1 - (self.arrived[index] + further) % len(calls)]


class Calls:
    """The calls of one flow's modules, over the passes of a step."""

    def __init__(self, flow: Flow, on_pass: Callable[[], None] = lambda: None) -> None:
        self.flow = flow
        self.first = flow.outputs.index(flow.entry) if flow.entry in flow.outputs else 0
        self.on_pass = on_pass
        """Called when a pass begins: what was remembered of the one before is no neighbour of its points."""
        self.in_training = True
        self.runs = 0
        """Grows whenever a block runs with gradient, outside of compiled code and recomputation."""
        self.forward: dict[PointKey, int] = {}
        self.tracked: dict[PointKey, int] = {}
        """How often each point was called in this step, and how often it could give a gradient."""
        self._executed: dict[PointKey, None] = {}
        self._reordered = False
        # until a whole step has shown that no module is called twice, outputs are marked to tell loops from new inputs
        self._marks = True
        self._repeated = False
        self._pass = Pass()

    # -- forward -------------------------------------------------------------------------------------------------

    def begin_forward(self, *, training: bool) -> None:
        """The root's forward begins: calls are counted from 0 again; one without gradient is not looked at."""
        self.in_training = training
        if training:
            self.begin_pass()

    def begin_pass(self) -> None:
        """Count the calls from 0 again."""
        self._pass = Pass()
        self.on_pass()

    def begins(self, inputs: Any, *, recomputing: bool) -> bool:
        """Whether a call of the first block, which gets `inputs`, begins the flow: a loop's later calls do not."""
        if recomputing:
            return not (self.ambiguous(ENTRY) and self._continues(inputs))
        if self._pass.counts.get(self.first):
            self._repeated = self._marks = True
            if self._continues(inputs):
                return False
            self.begin_pass()
        return True

    def entered(self, *, with_grad: bool, tracked: bool, recomputing: bool) -> None:
        """x_0 was seen."""
        key = (ENTRY, 0)
        if with_grad:
            self._executed.setdefault(key)
            self.forward[key] = self.forward.get(key, 0) + 1
        if tracked:
            if not recomputing:
                self._pass.waiting.add(key)
            self.tracked[key] = self.tracked.get(key, 0) + 1

    def returned(self, index: int, x: Tensor | None, inputs: Any, *, with_grad: bool) -> PointKey:
        """A block has returned x in the forward: count the call, and return the point it is."""
        calls = self._pass.counts.get(index, 0)
        if calls:
            self._repeated = self._marks = True
            if not self._continues(inputs):
                self.begin_pass()
                calls = 0
        now = self._pass
        key = (index, min(calls, MAX_CALLS - 1))
        self._reordered = self._reordered or (index < now.latest and not calls)
        now.latest = index
        now.counts[index] = calls + 1
        self._mark(x)
        now.order.setdefault(key)
        if x is None or not x.requires_grad:
            now.untracked.setdefault(index, []).append(key[1])
        if with_grad:
            self.forward[key] = self.forward.get(key, 0) + 1
            self._executed.setdefault(key)
        return key

    def recomputed(self, index: int, x: Tensor | None) -> PointKey | None:
        """A checkpoint recomputes x: the point it is, None where the forward's own x waits for the gradient."""
        key = self._pass.recomputed(index)
        if key in self._pass.waiting:
            return None
        self._mark(x)
        return key

    def waits(self, key: PointKey) -> bool:
        """Whether a point waits for its gradient since the forward."""
        return key in self._pass.waiting

    def ambiguous(self, index: int) -> bool:
        """Whether only the gradients tell which call of a module (ENTRY: of the first) a recomputation is."""
        return len(self._pass.untracked.get(self.first if index == ENTRY else index, ())) > 1

    def track(self, key: PointKey, *, recomputing: bool) -> None:
        """The call waits for its gradient."""
        if not recomputing:
            self._pass.waiting.add(key)
        elif any(k not in self._executed for k in (*self._pass.order, key)):
            self._executed = dict.fromkeys([*self._pass.order, *self._executed, key])
        self.tracked[key] = self.tracked.get(key, 0) + 1

    def _mark(self, x: Tensor | None) -> None:
        if self._marks:
            self._pass.output = weakref.ref(x) if x is not None else None
            self._pass.node = node_number(x) if x is not None else None

    def _continues(self, inputs: Any) -> bool:
        """Whether a repeated call goes on from the flow's last output (a loop) or starts afresh (a second input)."""
        last = self._pass.output() if self._pass.output else None
        return derives_from(floating_tensors(inputs), last, self._pass.node)

    # -- backward ------------------------------------------------------------------------------------------------

    def arrived(self, key: PointKey) -> PointKey | None:
        """The gradient of an ambiguous recomputation arrived: the point it is, None for an input that is no x_0."""
        index = key[0]
        if index == ENTRY:
            # the outputs of its segment have arrived: the last of them says which call this is the input of
            return key if self._pass.recomputed(self.first, -1) == (self.first, 0) else None
        key = self._pass.recomputed(index)
        self._pass.arrived[index] += 1
        return key

    # -- the step ------------------------------------------------------------------------------------------------

    def points(self) -> list[PointKey]:
        """The points in depth order: structural order unless modules ran in another order or several times."""
        head = [(ENTRY, 0)] if self.flow.entry is not None else []
        ran = [key for key in self._executed if key[0] != ENTRY]
        structural = [(index, 0) for index in range(len(self.flow.outputs))]
        if self._reordered or any(call for _, call in ran):
            reached = {index for index, _ in ran}
            return head + ran + [key for key in structural if key[0] not in reached]
        return head + structural

    def forget(self, *, sampled: bool) -> None:
        """The step is over, or what it showed belongs to no step of ours."""
        if self._executed and sampled:
            self._marks = self._repeated
        self.begin_pass()
        self.forward.clear()
        self.tracked.clear()
