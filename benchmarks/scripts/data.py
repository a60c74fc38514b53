"""Data that no script has to fetch: ten noisy patterns, a text with a grammar, the balancing pole."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def patterns(count: int, size: int = 28, channels: int = 1, classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images [count, channels, size, size], smooth patterns of a class in noise, and their classes [count]."""
    draws = torch.Generator().manual_seed(1)
    coarse = torch.randn(classes, channels, 5, 5, generator=draws)
    prototypes = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=draws)
    return prototypes[labels] + 0.5 * torch.randn(count, channels, size, size, generator=draws), labels


def text(length: int, vocabulary: int = 24, seed: int = 0) -> Tensor:
    """Return tokens [length] of a chain in which each token has few that follow."""
    draws = torch.Generator().manual_seed(1)
    chances = torch.rand(vocabulary, vocabulary, generator=draws) ** 8
    draws = torch.Generator().manual_seed(seed)
    tokens = [0]
    for _ in range(length - 1):
        tokens.append(int(torch.multinomial(chances[tokens[-1]], 1, generator=draws)))
    return torch.tensor(tokens)


class CartPole:
    """The classic pole on a cart (Barto, Sutton and Anderson 1983): reward 1 a step until it falls, at most 200."""

    def __init__(self, seed: int = 0) -> None:
        self._draws = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self) -> Tensor:
        """Begin again; returns the state [4]."""
        self.state = (torch.rand(4, generator=self._draws) - 0.5) * 0.1
        self.steps = 0
        return self.state

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        """Push to the left (0) or right (1); returns state, reward and whether it is over."""
        x, speed, angle, turning = self.state.tolist()
        push = 10.0 if action else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        inner = (push + 0.05 * turning * turning * sine) / 1.1
        bends = (9.8 * sine - cosine * inner) / (0.5 * (4 / 3 - 0.1 * cosine * cosine / 1.1))
        moves = inner - 0.05 * bends * cosine / 1.1
        self.state = torch.tensor(
            [x + 0.02 * speed, speed + 0.02 * moves, angle + 0.02 * turning, turning + 0.02 * bends]
        )
        self.steps += 1
        over = abs(float(self.state[0])) > 2.4 or abs(float(self.state[2])) > 0.21 or self.steps >= 200
        return self.state, 1.0, over
