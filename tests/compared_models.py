"""A model, its batches and its loss that another process can import."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    """Three blocks; its forward takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale


def factory() -> nn.Module:
    """A new model."""
    return Model()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Three batches."""
    generator = torch.Generator().manual_seed(3)
    return [(x, x[..., :2].cumsum(1)) for x in torch.randn(3, 4, 5, 8, generator=generator)]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error."""
    return (model(batch[0], scale=2.0) - batch[1]).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(model.parameters(), 0.05)
