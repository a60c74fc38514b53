"""A short run as it is on disk, for families that damage files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import flowscope

WIDTH = 6


class Block(nn.Module):
    """A residual block with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.branch = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.gate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(x) * self.branch(self.norm(x))


class Net(nn.Module):
    """Blocks and a recurrent layer: two flows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.rnn(x)[0])


def train(folder: Path, steps: int = 8, model: nn.Module | None = None) -> Path:
    """Train with a bad step and a rate far too large, so that there are alerts; returns the file of the run."""
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    config = {"slow_every": 3, "console": "off"}
    with flowscope.watch(model, optimizer, log_dir=folder, every=1, config=config) as scope:
        for step in range(steps):
            loss = model(torch.randn(4, 5, 3)).square().mean() * (float("nan") if step == 4 else 1)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_()
            optimizer.step()
            scope.step(loss=loss)
    return folder / "flowscope.jsonl"
