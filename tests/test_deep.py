"""1,024 blocks of width 32, wrapped and watched: gradient reaches the input, equal to autograd's; they train.

Axis letters: B=3 batch, T=4 tokens, D=32 features, L=1,024 blocks. log10 of the products is printed (pytest -s).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flowscope

B, T, D, L = 3, 4, 32, 1024


class PreNormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class PostNormBlock(PreNormBlock):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))


class Deep(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(5, D)
        self.blocks = nn.ModuleList(block() for _ in range(L))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 7)

    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = self.stem(x)
        states = [x]
        for block in self.blocks:
            x = block(x)
            states.append(x)
        if taps is not None:
            taps += states
        return self.head(self.norm(x))


def wrapped(mode: str, block: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Deep(block), torch.randn(B, T, 5)
    target = torch.stack([x.sum(-1).sin(), *x.unbind(-1), x.prod(-1)], dim=-1)
    return flowscope.wrap(model, mode, example_inputs=x), x, target


def watched(model: nn.Module, optimizer: Any, every: int) -> flowscope.Scope:
    return flowscope.watch(model, optimizer, every=lambda step: step % every == 0, config={"console": "off"})


@pytest.mark.parametrize(
    ("mode", "block"),
    [
        ("keel", PreNormBlock),
        ("keel-postln", PreNormBlock),
        ("keel-postln", PostNormBlock),
        ("dhc", PreNormBlock),
        ("mhc", PreNormBlock),
    ],
)
def test_gradient_reaches_the_first_of_1024_blocks(mode: str, block: type[nn.Module]) -> None:
    model, x, target = wrapped(mode, block)
    twin, taps = copy.deepcopy(model), []
    loss = nn.functional.mse_loss(twin(x, taps), target)
    norms = np.array([float(g.double().norm()) for g in torch.autograd.grad(loss, taps)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer, 1) as scope:
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    product = scope.records[0]["gradient_product"]
    assert product.shape == (L + 1,)
    np.testing.assert_allclose(product, norms / norms[-1], rtol=1e-4)
    print(f"{mode} on {block.__name__}: log10 of the gradient product {np.log10(product[0]):+.3f}")
    if mode != "keel":
        assert 1e-2 <= product[0] <= 1e2
    assert not [alert for alert in scope.alerts if alert.severity == "error"]


@pytest.mark.parametrize(("mode", "block"), [("keel", PreNormBlock), ("keel-postln", PostNormBlock)])
def test_1024_blocks_train(mode: str, block: type[nn.Module]) -> None:
    model, x, target = wrapped(mode, block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    with watched(model, optimizer, 8) as scope:
        for _ in range(24):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    products = [record["gradient_product"][0] for record in scope.records]
    logs = ", ".join(f"{np.log10(p):+.2f}" for p in products)
    print(f"{mode} on {block.__name__}: loss {losses[0]:.3f} to {losses[-1]:.3f}, log10 of the products {logs}")
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])
    assert len(products) == 3
    assert all(1e-2 <= p <= 1e2 for p in products)
