"""`python -m benchmarks.parting.cost`: what a step that is told to the bit costs, against those beside it in one run.

Every second step is sampled: the first ten of these are told to the bit, the next ten are not. Ratios are of processor
time, each sampled step against the mean of its neighbours, so that what else the machine does cancels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

import flowscope

TOLD = 10
WARM = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seconds(width: int, depth: int, batch: int, tokens: int, clock: Callable[[], float]) -> list[float]:
    """The time of each step of one run: 0, 2, 4, ... are sampled, the first `TOLD` of them told to the bit."""
    torch.manual_seed(0)
    model = Model(width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"exact_steps": TOLD, "console": "off"}
    found = []
    with flowscope.watch(model, optimizer, every=lambda step: step % 2 == 0, config=config) as scope:
        for _ in range(4 * TOLD + 1):
            x = torch.randint(512, (batch, tokens))
            begin = clock()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            scope.step(loss=loss.detach())
            found.append(clock() - begin)
    return found


def ratios(times: Sequence[float], first: int, last: int) -> list[float]:
    """Each sampled step against the mean of the two beside it."""
    return [2 * times[n] / (times[n - 1] + times[n + 1]) for n in range(first, last, 2)]


def main() -> None:
    """One line a model."""
    torch.set_num_threads(1)
    for width, depth, batch, tokens in ((64, 4, 8, 32), (256, 6, 8, 128)):
        times = seconds(width, depth, batch, tokens, time.process_time)
        told = ratios(times, 2 * WARM, 2 * TOLD)
        sampled = ratios(times, 2 * TOLD, 4 * TOLD)
        count = f"{depth} blocks of width {width}, {batch} x {tokens} tokens"
        unsampled = statistics.median(times[1::2])
        print(
            f"{count}: told to the bit {statistics.median(told):.2f} ({min(told):.2f} to {max(told):.2f}), "
            f"sampled {statistics.median(sampled):.2f} ({min(sampled):.2f} to {max(sampled):.2f}) "
            f"times an unsampled step of {unsampled:.3g} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
