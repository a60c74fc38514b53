"""Small models of the flows that are no plain stack: mixtures of experts, equilibrium layers, differential equations.

Axis letters: B batch, T tokens, D features, E experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import flowscope
from flowscope.records import Record

B, T, D, IN, OUT = 3, 5, 6, 4, 7


class Mixture(nn.Module):
    """Feed-forward experts behind a linear router, in the form most repositories have."""

    def __init__(self, experts: int = 4, top_k: int = 2, width: int = D) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(self.top_k, -1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        picked = every.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
        return (picked * weights.unsqueeze(-1)).sum(-2)


class MixtureBlock(nn.Module):
    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), Mixture(experts, top_k)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class MixtureStack(nn.Module):
    def __init__(self, sizes: tuple[tuple[int, int], ...] = ((4, 2), (3, 1))) -> None:
        super().__init__()
        self.embed = nn.Linear(IN, D)
        self.blocks = nn.ModuleList(MixtureBlock(*size) for size in sizes)
        self.head = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Map(nn.Module):
    """f(z, x) = act(W z + U x)."""

    def __init__(self, weight: Tensor, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.inner, self.outer, self.act = nn.Linear(*weight.shape, bias=False), nn.Linear(IN, len(weight)), act
        with torch.no_grad():
            self.inner.weight.copy_(weight)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.act(self.inner(z) + self.outer(x))


class Implicit(nn.Module):
    """z = f(z, x) iterated without gradient, then once with it (as torchdeq's one-step gradient does)."""

    def __init__(self, weight: Tensor, iterations: int = 9, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.f, self.head, self.count = Map(weight, act), nn.Linear(len(weight), OUT), iterations

    def solve(self, x: Tensor) -> Tensor:
        z = x.new_zeros(len(x), self.head.in_features)
        with torch.no_grad():
            for _ in range(self.count):
                z = self.f(z, x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.f(self.solve(x).requires_grad_(), x))


class Dynamics(nn.Module):
    """dy/dt = net(y) exp(-t)."""

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.net, self.rate = nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D)), rate

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.rate * self.net(y) * torch.exp(-t)


class Integrated(nn.Module):
    """A neural ODE between two linear layers; `solve(func, y, times, **options)` is the solver."""

    def __init__(self, solve: Callable[..., Any], rate: float = 1.0, **options: Any) -> None:
        super().__init__()
        self.embed, self.func, self.head = nn.Linear(IN, D), Dynamics(rate), nn.Linear(D, OUT)
        self.solve, self.options = solve, options

    def forward(self, x: Tensor) -> Tensor:
        y = self.solve(self.func, self.embed(x), torch.tensor([0.0, 1.0]), **self.options)[-1]
        return self.head(y)


def weight_of_radius(radius: float, width: int = D) -> Tensor:
    """A matrix whose spectral radius is `radius`, not its norm: triangular, with a large entry off the diagonal."""
    weight = torch.diag(torch.linspace(0.1, 1.0, width) * radius)
    weight[0, -1] = 2.0
    return weight


def inputs(count: int, batch: int = B, tokens: tuple[int, ...] = ()) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(batch, *tokens, IN, generator=generator) for _ in range(count)]


def record_of(
    model: nn.Module, steps: list[list[Any]], call: Callable[[nn.Module, Any], Tensor], **config: Any
) -> Record:
    """Train on micro-batches (a list a step) and return the last step's record."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off", "slow_every": 1, **config}) as scope:
        for micro_batches in steps:
            for batch in micro_batches:
                call(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return scope.records[-1]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()
