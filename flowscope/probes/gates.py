"""Gates of the user's own model: modules named by `watch(gates=...)` whose outputs are gate values in (0, 1).

The values are turned back into logits and counted as the gates of wrapped blocks are, on deposit on backward.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.discovery.plan import display_path
from flowscope.errors import FlowscopeError
from flowscope.probes import site_statistics, site_summaries
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.hooks import Hooks, Switch
from flowscope.probes.layout import hidden_output
from flowscope.probes.statistics import full_precision

EDGE = 1e-7
"""Gate values are clipped to [EDGE, 1 - EDGE] before the logit: 0 and 1 read as logits of -16 and 16."""


class GateObserver:
    """The modules that match the patterns, in module order; their metrics stand under the flow name "gates"."""

    NAME = "gates"
    PART = "gates"

    def __init__(self, model: nn.Module, patterns: Sequence[str], switch: Switch, hooks: Hooks) -> None:
        self._switch, self._hooks = switch, hooks
        modules = [(path, module) for path, module in model.named_modules() if path]
        for pattern in patterns:
            if not any(_matches(path, pattern) for path, _ in modules):
                raise FlowscopeError(
                    f"watch(gates=...): {pattern!r} matches no module of {type(model).__name__}. Expected paths as in "
                    "model.named_modules(), where * matches anything, of modules whose outputs are gates in (0, 1)."
                )
        chosen = [(path, m) for path, m in modules if any(_matches(path, pattern) for pattern in patterns)]
        self.labels = [display_path(path) for path, _ in chosen]
        self.buffer = DepositBuffer(site_statistics.GATE_COLUMNS)
        for row, (_, module) in enumerate(chosen):
            self.buffer.new_row()
            hooks.after(module, self.PART, partial(self._after, row), switch)

    def _after(self, row: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        gate = hidden_output(output, None)
        if gate is None or not self._switch.sampling or self._switch.paused or not gate.requires_grad:
            return
        with full_precision(gate):
            sums = site_statistics.gate_sums(torch.logit(gate.detach().float(), eps=EDGE))
        self._hooks.on_gradient(gate, self.PART, partial(self._deposit, row, sums), row)

    def _deposit(self, row: int, sums: Tensor, gradient: Tensor) -> None:
        del gradient
        self.buffer.add(row, 0, sums)

    def metrics(self, sums: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """gate_mean, gate_std, gate_p05, gate_p95, gate_saturation, one entry a gate module."""
        rows = [sums[row] if row < len(sums) else None for row in range(len(self.labels))]
        return site_summaries.gate_metrics(rows)


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(display_path(path), pattern)
