"""A byte-level language model small enough for a laptop's CPU: the data, the model and one training step.

The text is the Python standard library's own source, so nothing is downloaded. The decoder is written the plain way,
`x = x + branch(x)`, with the norm before the branch (`norm="pre"`) or after the add (`norm="post"`). With 24 blocks and
without warm-up the second does not train: that is the failure the demo shows.

Axis letters: B batch, T tokens, D features, H heads, V vocabulary (256 bytes), L blocks.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


def load_text(limit: int = 2_000_000) -> Tensor:
    """The first `limit` bytes of the standard library's modules, in alphabetical order, as a uint8 tensor."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8)


def batches(text: Tensor, batch: int = 8, length: int = 32, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random pairs (tokens, next tokens), each [B, T]; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
        window = text[starts + torch.arange(length + 1)].long()
        yield window[:, :-1], window[:, 1:]


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D/H]
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a residual add."""

    def __init__(self, width: int, heads: int, norm: Literal["pre", "post"]) -> None:
        super().__init__()
        self.norm = norm
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm == "pre":
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class ByteLM(nn.Module):
    """A decoder over bytes: [B, T] to logits [B, T, V]."""

    def __init__(
        self,
        norm: Literal["pre", "post"] = "pre",
        depth: int = 24,
        width: int = 64,
        heads: int = 4,
        length: int = 32,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, norm) for _ in range(depth))
        # a Post-LN block already ends in a norm
        self.final = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(width, VOCABULARY)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier for the matrices, zero biases, as in the Transformer paper's code."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight, std=1.0)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One step as anybody writes it: forward, backward, clip, update. Returns the detached loss."""
    tokens, targets = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()
