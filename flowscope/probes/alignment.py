"""`branch_alignment`: how far a block's branch Jacobian J_f is a multiple of the identity, c = tr(J_f) / D (opt-in).

The gated-highway article explains decay by J_f = c I with c near -1; this measures c. For a block y = x + f(x) of equal
widths, dy/dx = I + J_f, and Hutchinson's estimate with random signs v gives c = v^T (dy/dx) v / v^T v - 1.

It runs one extra backward through each block on the slow schedule, from inside the forward, so it is off unless
`WatchConfig.branch_alignment` asks for it: tensor hooks of the user inside the block fire once more, and a checkpointed
block is recomputed once more (BatchNorm then counts the batch twice).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.discovery.plan import Flow, display_path
from flowscope.probes.hooks import Hooks, Switch, in_backward, masked
from flowscope.probes.layout import hidden_input, hidden_output, is_compiling


class AlignmentObserver:
    """The blocks of one flow; `take` gives the estimates of the step."""

    def __init__(self, model: nn.Module, flow: Flow, switch: Switch, hooks: Hooks) -> None:
        self.flow, self.part, self._switch = flow, f"branch_alignment {flow.name}", switch
        self.labels = [display_path(path) for path in flow.outputs]
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seen: dict[int, Tensor] = {}
        for index, path in enumerate(flow.outputs):
            hooks.after(model.get_submodule(path), self.part, partial(self._after, index), switch)

    def _after(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (self._switch.sampling and self._switch.slow) or self._switch.paused or index in self._seen:
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
        generator = self._generators.get(like.device)
        if generator is None:
            generator = self._generators[like.device] = torch.Generator(like.device).manual_seed(0)
        bits = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
        return (2 * bits - 1).to(like.dtype)

    def take(self) -> NDArray[np.float64] | None:
        """Return c per block (NaN where it could not be measured), None where nothing was; start again from nothing."""
        seen, self._seen = self._seen, {}
        if not seen:
            return None
        return np.array([float(seen[i]) if i in seen else np.nan for i in range(len(self.labels))])
