"""Stacks of causal attention computed in each of the usual ways, and the numbers of their logits by plain loops.

Axis letters: B batch, H heads, T tokens, D features.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

B, H, T, D = 3, 4, 7, 32
NAMES = ("attention_logit_max", "attention_logit_head", "attention_entropy", "attention_sink")
BY_HEAD = "attention_logit_max_by_head"


class Attention(nn.Module):
    """Causal self-attention; `kind` says what computes it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.num_heads, self.kind = H, kind
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, D // H).permute(2, 0, 3, 1, 4)
        if self.kind == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            logits = q @ k.transpose(-1, -2) / math.sqrt(D // H)
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mixed = logits.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class MultiHead(nn.Module):
    """nn.MultiheadAttention with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.inner(x, x, x, need_weights=False, attn_mask=later)[0]


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(D), MultiHead() if kind == "multi-head" else Attention(kind)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(3 * self.norm(x))


class Stack(nn.Module):
    """An embedding and blocks, each computed again in backward where `reentrant` says how."""

    def __init__(self, kind: str = "sdpa", reentrant: bool | None = None, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.reentrant = nn.Linear(D, D), reentrant
        self.blocks = nn.ModuleList(Block(kind) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def data(seed: int = 0, batch: int = B) -> Tensor:
    return torch.randn(batch, T, D, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: Stack, x: Tensor) -> list[np.ndarray]:
    """[B, H, T, T] of each block, -inf above the diagonal."""
    out = []
    x = model.embed(x)
    for block in model.blocks:
        inside = 3 * block.norm(x)
        weights = block.mixer.inner if isinstance(block.mixer, MultiHead) else block.mixer.qkv
        weight = getattr(weights, "in_proj_weight", None)
        mixed = F.linear(inside, weight, weights.in_proj_bias) if weight is not None else weights(inside)
        q, k, _ = mixed.double().view(*x.shape[:2], 3, H, D // H).permute(2, 0, 3, 1, 4).numpy()
        logits = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(D // H)
        out.append(np.where(np.triu(np.ones(logits.shape[-2:]), 1), -np.inf, logits))
        x = block(x)
    return out


def naive(logits: list[np.ndarray]) -> dict[str, Any]:
    """The metrics of one step that saw these logits [B, H, T, S]: row by row, masked pairs left out."""
    rows = {name: [] for name in NAMES}
    largest = np.max([block.max((0, 2, 3)) for block in logits], axis=0)
    for block in logits:
        for sample in block:
            for head in sample:
                for row in head:
                    known = row[np.isfinite(row)]
                    if known.size:
                        p = np.exp(known - known.max())
                        p /= p.sum()
                        rows["attention_entropy"].append(-np.sum(p * np.log(np.maximum(p, 1e-300))))
                        rows["attention_sink"].append(p[0] if np.isfinite(row[0]) else 0.0)
    means = {name: np.mean(values) for name, values in rows.items() if values}
    heads = {"attention_logit_max": largest.max(), "attention_logit_head": largest.argmax(), BY_HEAD: largest}
    return {**heads, **means}
