"""`branch_alignment`: how far a block's branch Jacobian J_f is a multiple of the identity, c = tr(J_f) / D (opt-in).

The gated-highway article explains decay by J_f = c I with c near -1; this measures c. For a block y = x + f(x) of equal
widths, dy/dx = I + J_f, and Hutchinson's estimate with random signs v gives c = v^T (dy/dx) v / v^T v - 1.

It runs one extra backward through each block on the slow schedule, from inside the forward, so it is off unless
`WatchConfig.branch_alignment` asks for it: tensor hooks of the user inside the block fire once more, and a checkpointed
block is recomputed once more (BatchNorm then counts the batch twice).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks, in_backward, masked
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import hidden_input, hidden_output, is_compiling
from flowscope.model.plan import Flow, display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder


class BranchAlignment(Instrument):
    """The blocks of one flow."""

    name = "branch_alignment"
    families = ()
    metrics = (
        Metric(
            "branch_alignment",
            "Mean diagonal of the branch's Jacobian, estimated.",
            formula="vᵀ(dy/dx)v / vᵀv - 1, v of random signs",
            view="Depth",
            rows="blocks",
            ranks="first",
        ),
    )

    def __init__(self, flow: Flow) -> None:
        self._flow, self.fuse = flow, f"{self.name} {flow.name}"
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seen: dict[int, Tensor] = {}

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One a flow of blocks, where it is asked for."""
        return [cls(flow) for flow in view.flows if config.branch_alignment and flow.kind in ("blocks", "stage")]

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at the blocks."""
        self._switch = hooks.switch
        for index, path in enumerate(self._flow.outputs):
            hooks.after(view.model.get_submodule(path), self.fuse, partial(self._after, index), hooks.switch)

    def _after(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._switch.slow or self._switch.paused or index in self._seen:
            return
        if is_compiling() or in_backward() or not torch.is_grad_enabled():
            return
        x = hidden_input(args, kwargs)
        y = hidden_output(output, x)
        if x is None or y is None or x.shape != y.shape or not (x.requires_grad and y.requires_grad) or y is x:
            return
        signs = self._signs(y)
        with masked():
            (gradient,) = torch.autograd.grad(y, x, signs, retain_graph=True, allow_unused=True)
        if gradient is not None:
            self._seen[index] = (signs.double() * gradient.double()).sum() / y.numel() - 1.0

    def _signs(self, like: Tensor) -> Tensor:
        """Random signs from a generator of our own: the training's random numbers stay as they are."""
        generator = self._generators.setdefault(like.device, torch.Generator(like.device).manual_seed(0))
        bits = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
        return (2 * bits - 1).to(like.dtype)

    def take(self) -> Taken | None:
        """C of each block where it could be measured."""
        seen, self._seen = self._seen, {}
        tensors = [c.reshape(1) for c in seen.values()]
        return Taken(self.name, tensors, partial(self._read, list(seen))) if seen else None

    def drop(self) -> None:
        """Forget the estimates."""
        self._seen = {}

    def _read(self, blocks: Sequence[int], out: RecordBuilder, parts: list[Array]) -> None:
        if self._flow.name in {layout.name for layout in out.layouts}:
            values = np.full(len(self._flow.outputs), np.nan)
            values[blocks] = np.concatenate(parts)
            out.within(self._flow.name)
            out.add("branch_alignment", values, [display_path(path) for path in self._flow.outputs])
