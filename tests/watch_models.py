"""Small models whose forward can hand out its hidden states, and the truth about their gradients from torch.autograd.

Axis letters: B batch, T tokens, D features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flowscope

B, T, D, IN, OUT = 3, 5, 8, 4, 7
Taps = list[Tensor] | None


def keep(taps: Taps, x: Tensor) -> Tensor:
    if taps is not None:
        taps.append(x)
    return x


class Block(nn.Module):
    """x + fc2(tanh(fc1(norm(x))))."""

    def __init__(self, inner: type[nn.Module] = nn.Tanh, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.act, self.drop = inner(), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm(x)))))


class Stack(nn.Module):
    """Embedding, L blocks, head; `forward(x, taps)` appends x_0 ... x_L to taps."""

    def __init__(self, depth: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(IN, D)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(D, OUT)

    def forward(self, x: Tensor, taps: Taps = None) -> Tensor:
        x = keep(taps, self.embed(x))
        for block in self.blocks:
            x = keep(taps, self.call(block, x))
        return self.head(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Checkpointed(Stack):
    """Every block is computed again in the backward pass."""

    reentrant = False

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class AddsToItsInput(nn.Module):
    """x += fc(norm(x)), in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x += self.fc(self.norm(x.clone()))
        return x


def data(seed: int = 0, batch: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, T, IN, generator=generator), torch.randn(batch, T, OUT, generator=generator)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], taps: Taps = None) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]) if taps is None else model(batch[0], taps), batch[1])


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr)


def watched(model: nn.Module, optimizer: Any = None, **options: Any) -> flowscope.Scope:
    config = {"console": "off", **options.pop("config", {})}
    return flowscope.watch(model, optimizer, every=options.pop("every", 1), config=config, **options)


def norms(*gradients: Sequence[Tensor | None]) -> np.ndarray:
    """Norm of each point's gradient over several passes: sqrt of the sum of squares, fp64; NaN where none arrived."""
    out = []
    for per_point in zip(*gradients, strict=True):
        seen = [g.detach().abs().double() for g in per_point if g is not None]
        out.append(float(sum(g.square().sum() for g in seen)) ** 0.5 if seen else np.nan)
    return np.array(out)


def truth(model: nn.Module, batch: tuple[Tensor, Tensor], scale: float = 1.0) -> list[Tensor]:
    """dL/dx_0 ... dL/dx_L of an unwatched copy of the model, from torch.autograd.grad."""
    twin = copy.deepcopy(model)
    taps: list[Tensor] = []
    return list(torch.autograd.grad(loss_of(twin, batch, taps) * scale, taps))


def one_step(
    model: nn.Module, batch: tuple[Tensor, Tensor] | None = None, twin: nn.Module | None = None, **options: Any
) -> Any:
    """One watched SGD step; returns the record and the true gradients of its points (from `twin`, else a copy)."""
    batch = batch or data()
    expected = truth(twin or model, batch)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with watched(model, optimizer, **options) as scope:
        loss_of(model, batch).backward()
        optimizer.step()
    return scope.records[0], expected


def train(scope: flowscope.Scope, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """A loop that tells `scope` its losses; returns them."""
    losses = []
    for k in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, data(k))
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
        losses.append(loss.item())
    return losses


def scaled_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    scaler: Any,
    *optimizers: torch.optim.Optimizer,
    overflow: str | None = None,
) -> Tensor:
    """A step through a GradScaler; the scaled gradient of the module `overflow` gets an inf. Returns the loss."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(model, batch)
    scaler.scale(loss).backward()
    if overflow is not None:
        model.get_submodule(overflow).weight.grad[0, 0] = float("inf")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return loss


def close_to(actual: Any, expected: Any, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual, dtype=np.float64), np.asarray(expected), rtol=rtol, atol=0)
