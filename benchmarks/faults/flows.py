"""Routers and solvers: expert collapse, solvers that stop converging or cost more and more."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.faults.case import Catalogue, Draw, Program, Shown, above, names, supervised
from benchmarks.faults.data import digits
from benchmarks.faults.models import Decoder, class_loss, word_loss
from benchmarks.faults.transformers import decoder, learned

case = Catalogue("experts and solvers")


class Router(nn.Linear):
    """Scores of experts."""


class Experts(nn.Module):
    """Top-1 mixture of feed-forward experts with Switch's balance loss; `balance` is its coefficient."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.num_experts, self.top_k = count, 1
        self.router = Router(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        chance = self.router(x).softmax(-1)
        best, index = chance.max(-1)
        share = nn.functional.one_hot(index, self.num_experts).double().flatten(0, -2).mean(0)
        self.penalty = self.num_experts * (share.to(x.dtype) * chance.flatten(0, -2).mean(0)).sum()
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            chosen = (index == k).unsqueeze(-1)
            if bool(chosen.any()):
                out = out + chosen * best.unsqueeze(-1) * expert(x)
        return out


def mixture(draw: Draw, bias: float, balance: float) -> Program:
    count = draw.pick("experts", 4, 3, 6)
    model = Decoder("pre", draw.pick("depth", 3, 2, 4), mlp=lambda width: Experts(width, count))
    for block in model.blocks:
        block.mlp.router.bias.data[draw.pick("expert", 1, 0, 2)] += bias

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return word_loss(model, batch) + balance * sum(block.mlp.penalty for block in model.blocks)

    return decoder(draw, model, draw.factor("lr", 2e-3, 1.5), 150, loss=loss_of)


@case("X01", "router that sends every word to one expert", "expert_collapse")
def router_collapse(draw: Draw) -> Program:
    program = mixture(draw, draw.factor("bias", 15.0, 1.3), 0.0)
    program.place = r"blocks\.\d+\.mlp(\.router)?"
    return program


class Equilibrium(nn.Module):
    """z = tanh(W z + U x) by fixed-point iteration, gradient through the last steps; says how it went.

    `iterations`, `residual` and `tolerance` are what solvers usually expose.
    """

    def __init__(self, width: int, gain: float, limit: int = 20, tolerance: float = 1e-3) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width, bias=False), nn.Linear(64, width)
        nn.init.orthogonal_(self.inner.weight, gain)
        self.limit, self.tolerance = limit, tolerance

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + self.outer(x))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), self.inner.in_features)
        self.iterations, self.residual = 0, 1.0
        with torch.no_grad():
            while self.iterations < self.limit and self.residual > self.tolerance:
                after = self.step(z, x)
                self.residual = float((after - z).norm() / after.norm())
                z, self.iterations = after, self.iterations + 1
        for _ in range(3):
            z = self.step(z, x)
        return z


def equilibrium(draw: Draw, gain: float) -> tuple[nn.Sequential, Program]:
    width = draw.pick("width", 48, 32, 64)
    model = nn.Sequential(Equilibrium(width, gain), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 1.5))
    return model, supervised(draw, model, digits(), optimizer, class_loss, steps=200)


@case("X02", "an equilibrium layer that stops converging", "solver_unconverged", "solver_cost")
def unconverged(draw: Draw) -> Program:
    model, program = equilibrium(draw, 0.3)
    at, plain = draw.step("step", 63, 33, 120), program.step
    gain = draw.factor("gain", 12.0, 1.3)

    def step(k: int) -> Tensor:
        if k == at:
            with torch.no_grad():
                model[0].inner.weight.mul_(gain)
        return plain(k)

    def shows(shown: Shown) -> str | None:
        residual = model[0].residual
        return None if residual > model[0].tolerance else f"it converges: {residual:.1e}"

    program.step, program.first, program.place, program.shows = step, at, names("0"), shows
    return program


healthy = Catalogue("controls: transformers", healthy=True)


@healthy("X91", "balanced mixture of experts")
def balanced(draw: Draw) -> Program:
    program = mixture(draw, 0.0, 0.02)
    program.shows = learned(2.1)
    return program


@healthy("X92", "an equilibrium layer that converges")
def converging(draw: Draw) -> Program:
    _, program = equilibrium(draw, 0.5)
    program.shows = above(0.8)
    return program
