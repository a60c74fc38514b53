"""The models: chains of layers, a small convnet, a small decoder in all the ways its residual paths may be written.

Axis letters: B batch, T positions, D features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.faults.data import VOCABULARY

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from byte_lm import Attention


def he(model: nn.Module) -> nn.Module:
    """He-uniform weights, biases 0."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def chain(
    features: int, width: int, depth: int, outputs: int, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """`depth` hidden layers of `width`, each with its activation, and a linear head."""
    layers: list[nn.Module] = []
    for k in range(depth):
        layers += [nn.Linear(width if k else features, width), activation()]
    model = nn.Sequential(*layers, nn.Linear(width if depth else features, outputs))
    he(model)
    return model


class Exponential(nn.Module):
    """exp(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class RowNorm(nn.Module):
    """x over its length, without an eps."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


def convnet(channels: int = 8, *, norm: bool = True, momentum: float = 0.1, dropout: float = 0.0) -> nn.Sequential:
    """Two convolutions and a head, for [B, 1, 8, 8]."""

    def stage(before: int, after: int) -> list[nn.Module]:
        layers: list[nn.Module] = [nn.Conv2d(before, after, 3, padding=1)]
        layers += [nn.BatchNorm2d(after, momentum=momentum)] if norm else []
        return [*layers, nn.ReLU(), nn.MaxPool2d(2)]

    extra: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    model = nn.Sequential(
        *stage(1, channels), *stage(channels, 2 * channels), nn.Flatten(), *extra, nn.Linear(8 * channels, 10)
    )
    he(model)
    return model


class LastState(nn.Module):
    """A recurrent layer whose last state is read by a linear head, [B, T, 2] to [B, 1]."""

    def __init__(self, width: int, kind: Literal["rnn", "lstm"] = "rnn", gain: float = 1.0) -> None:
        super().__init__()
        self.rnn = (nn.RNN if kind == "rnn" else nn.LSTM)(2, width, batch_first=True)
        self.head = nn.Linear(width, 1)
        if kind == "rnn":
            nn.init.orthogonal_(self.rnn.weight_hh_l0, gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


Norm = Literal["pre", "post", "none", "bare"]


class Block(nn.Module):
    """Attention and a feed-forward layer; "none": residual adds without norms, "bare": neither."""

    def __init__(self, width: int, heads: int, norm: Norm, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.attention = Attention(width, heads)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        if norm in ("pre", "post"):
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm == "pre":
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        if self.norm == "post":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        if self.norm == "none":
            x = x + self.attention(x)
            return x + self.mlp(x)
        return self.mlp(self.attention(x))


class Decoder(nn.Module):
    """Words [B, T] to logits [B, T, V].

    Args:
        norm, depth, width, heads, length: of the blocks.
        shared: all blocks are one module.
        tied: the head's weight is the embedding's.
        mlp: makes the feed-forward part of each block.
    """

    def __init__(
        self,
        norm: Norm = "pre",
        depth: int = 6,
        width: int = 32,
        heads: int = 4,
        length: int = 16,
        *,
        shared: bool = False,
        tied: bool = False,
        mlp: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(length, width))
        first = Block(width, heads, norm, mlp(width) if mlp else None)
        rest = (Block(width, heads, norm, mlp(width) if mlp else None) for _ in range(depth - 1))
        self.blocks = nn.ModuleList([first, *([first] * (depth - 1) if shared else rest)])
        self.final = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(width, VOCABULARY)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight, std=0.5 if tied else 1.0)
        nn.init.normal_(self.position, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def word_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next words."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of classes, or of one logit where labels are floats."""
    out = model(batch[0])
    if out.shape[-1] == 1 and batch[1].is_floating_point():
        return F.binary_cross_entropy_with_logits(out, batch[1])
    return F.cross_entropy(out, batch[1])


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean square error."""
    return F.mse_loss(model(batch[0]), batch[1])
