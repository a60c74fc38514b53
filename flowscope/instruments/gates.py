"""Gates of the user's own model: modules whose outputs are gate values in [0, 1], named by `watch(gates=...)` or found.

The values are turned back into logits and counted as the gates of wrapped blocks are, on deposit on backward. Whether a
candidate is a gate is decided once, from the autograd graph of the first sampled forward: no value is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks, in_backward
from flowscope.instruments import gate_products as products
from flowscope.instruments.instrument import Array, Instrument, Taken, table_rows
from flowscope.model.gates import GateCandidate
from flowscope.model.hidden_state import floating_tensors, hidden_output, is_compiling, node_number
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.records import FlowLayout
from flowscope.sums import site_metrics, site_statistics
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.statistics import full_precision

EDGE = 1e-7
"""Gate values are clipped to [EDGE, 1 - EDGE] before the logit: 0 and 1 read as logits of -16 and 16."""
FOUND = "found"
"""The cell of the flow where the user named no gate."""


class Gates(Instrument):
    """The gates in module order; their metrics stand under the flow name "gates", which has no points.

    Args:
        found: candidates, which are gates if their output is a sigmoid's that something else is multiplied by; one
            whose name says gate only has to be no output of the model.
    """

    name = "gates"
    families = ()
    metrics = site_metrics.GATES
    buffer: DepositBuffer

    def __init__(self, found: Sequence[GateCandidate]) -> None:
        self._found = found

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One, where the user named gates or some are found."""
        found = view.gates if "parameters" in config.metrics else []
        return [cls(found)] if view.named_gates or found else []

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what gates and candidates return, until it is decided which candidates are gates."""
        self._switch, self._hooks, found = hooks.switch, hooks, self._found
        named = dict(view.named_gates)
        candidates = {c.path: c for c in found if c.path not in named}
        gates = [(path, module) for path, module in view.modules if path in named or path in candidates]
        self._labels = [display_path(path) for path, _ in gates]
        """Of all rows, those of candidates too."""
        self._named = bool(named)
        """Whether the user named any."""
        self.buffer = DepositBuffer(site_statistics.GATE_COLUMNS)
        self._candidates: dict[int, GateCandidate] = {}
        """By row, those that are not decided yet."""
        self._refused: set[int] = set()
        self._calls: dict[int, int] = {}
        """Row by the number of the node that a call gave, in the forward under way."""
        self._overlaid: set[int] = set()
        self._handles: dict[int, Any] = {}
        for row, (path, module) in enumerate(gates):
            self.buffer.new_row()
            if path in candidates:
                self._candidates[row] = candidates[path]
            self._handles[row] = hooks.after(module, self.fuse, partial(self._after, row), hooks.switch)
        if self._candidates:
            opens = hooks.before(view.model, self.fuse, self._opens, hooks.switch, first=True)
            self._of_root = opens, hooks.after(view.model, self.fuse, self._decide, hooks.switch)

    # -- which candidates are gates -----------------------------------------------------------------------------------

    def _opens(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_compiling() and not in_backward():
            self._calls.clear()
            self._overlaid.clear()

    def _may_be(self, row: int, gate: Tensor) -> bool:
        """Whether to count what a module gave while some are not decided; notes its node, for `_decide`."""
        candidate = self._candidates.get(row)
        if is_compiling():
            return candidate is None or (candidate.sigmoid and candidate.named)
        if candidate is not None and not candidate.sigmoid and not products.is_sigmoid(gate):
            self._refuse(row)
            return False
        number = node_number(gate)
        if number is not None and not in_backward():
            if (inner := self._calls.get(number)) is not None and inner != row:
                self._overlaid.add(inner)  # a module around a sigmoid, which gives what the sigmoid gives
            self._calls[number] = row
        return True

    def _decide(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The model has run: which candidates are gates, for good."""
        if is_compiling() or self._switch.paused or not self._candidates.keys() & {*self._calls.values()}:
            return
        uses = products.uses_of(floating_tensors(output), set(self._calls))
        if not uses.walked:
            return
        for row, candidate in list(self._candidates.items()):
            numbers = {number for number, called in self._calls.items() if called == row}
            if not numbers and row not in self._overlaid:
                continue  # did not run: the next forward may tell
            used = candidate.named or numbers <= uses.multiplied
            if not numbers or not used or numbers & uses.returned:
                self._refuse(row)
            else:
                del self._candidates[row]
        self._calls.clear()
        if not self._candidates:
            for handle in self._of_root:
                self._hooks.remove(handle)

    def _refuse(self, row: int) -> None:
        self._refused.add(row)
        self._candidates.pop(row, None)
        self._hooks.remove(self._handles[row])

    # -- what gates do ------------------------------------------------------------------------------------------------

    def _after(self, row: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        gate = hidden_output(output, None)
        if gate is None or self._switch.paused or not gate.requires_grad:
            return
        if self._candidates and not self._may_be(row, gate):
            return
        with full_precision(gate):
            sums = site_statistics.gate_sums(torch.logit(gate.detach().float(), eps=EDGE))
        self._hooks.on_gradient(gate, self.fuse, partial(self.buffer.deposit, row, sums), row)

    def layout(self) -> list[Any]:
        """The labels."""
        return self._labels

    def take(self) -> Taken:
        """The sums of all rows, those of candidates too."""
        return Taken(self.name, self.buffer.take(), self._read, "table")

    def _shown(self) -> list[int]:
        """The rows that are gates: decided, or undecided but for the name (no forward's graph could be read)."""
        undecided = {row for row, c in self._candidates.items() if not (c.sigmoid and c.named)}
        return [row for row in range(len(self._labels)) if row not in undecided and row not in self._refused]

    def _read(self, out: RecordBuilder, parts: list[Array]) -> None:
        rows = self._shown()
        if not rows:
            return
        sums = table_rows(parts, self.buffer.columns, self.buffer.rows)[rows]
        out.flow(FlowLayout(self.name, "gates", (), (), "" if self._named else FOUND))
        for name, values in site_metrics.gate_metrics(sums).items():
            out.add(name, values, [self._labels[row] for row in rows])
