"""Numbers of some rows of attention (largest logit of each head, entropy, share on the first key), and how they add up.

Axis letters: B batch, H heads, T queries, S keys, R rows looked at (of T), D features of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowscope.sums.statistics import is_host

SINK, ROWS, HEADS = 1, 2, 3
"""Columns of a layer's numbers: 0 sum of entropies, SINK sum of shares on the first key, ROWS how many rows were seen
(of all heads), from HEADS on the largest logit of each head."""
MASKED = -5e3
"""A logit below this is a masked pair (-inf, the least number of a dtype, -1e4 or -1e9); a row of such is left out."""
OFF = -1e30
"""Stands for -inf."""
MOST = 16
"""Where there are more rows than all are looked at of, about so many are: of one sample if it has as many."""


def row_values(logits: Tensor) -> Tensor:
    """Return [3, B, H, R]: of each row the entropy, the share on the first key, and the largest logit.

    The entropy is log Z - sum(p l) in nats, with l the logits less the largest, Z = sum exp l, p = exp(l) / Z; the
    largest p is 1 / Z.

    Args:
        logits: [B, H, R, S] fp32 after scale, bias and mask, with OFF where a pair is masked; overwritten.
    """
    top = logits.amax(-1, keepdim=True)
    shares = logits.sub_(top).softmax(-1)
    entropy = -shares.amax(-1).log_() - logits.mul_(shares).sum(-1)
    return torch.stack([entropy, shares[..., 0], top.squeeze(-1)])


def head_sums(values: Tensor) -> Tensor:
    """Return [..., 3 + H], the numbers of a layer, from the values [..., 3, B, H, R] of its rows.

    Rows that are wholly masked, or hold an infinity or a NaN, are left out.
    """
    top = values[..., 2, :, :, :]
    seen = (top > MASKED) & (top < math.inf)
    sums = torch.where(seen.unsqueeze(-4), values[..., :ROWS, :, :, :], 0.0).sum((-1, -2, -3))
    largest = torch.where(seen, top, -math.inf).amax((-1, -3))
    return torch.cat([sums, seen.sum((-1, -2, -3)).unsqueeze(-1), largest], -1)


def strides(batch: int, rows: int, limit: int) -> tuple[int, int]:
    """Each how-many-eth sample and row is looked at: all where B*T <= limit, else about MOST, row 0 included."""
    if batch * rows <= limit:
        return 1, 1
    most = min(MOST, limit)
    samples = min(batch, -(-most // rows))
    return -(-batch // samples), max(1, rows * samples // most)


def heads_last(x: Tensor, heads: int) -> Tensor:
    """Return [B, H, R, C] of [..., R, C]: a third axis from the end holds heads, or samples with their heads."""
    if x.dim() == 3:
        split = heads if 0 < heads <= x.shape[0] and x.shape[0] % heads == 0 else 1
        return x.reshape(-1, split, *x.shape[1:])
    return x.reshape(1, 1, *x.shape) if x.dim() == 2 else x.flatten(0, -4) if x.dim() > 4 else x


def product_logits(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return the logits [B, H, R, S] of queries [B, H, R, D] and keys [B, G, S, D], H a multiple of G (GQA)."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    query, key = query.float() * scale, key.float()
    if (groups := key.shape[1]) not in (1, query.shape[1]):
        grouped = query.reshape(query.shape[0], groups, -1, *query.shape[2:]) @ key.unsqueeze(2).transpose(-1, -2)
        return grouped.flatten(1, 2)
    key = key.transpose(-1, -2)
    if query.shape[0] == 1 and is_host(query):  # with its axis of samples it would be copied
        return (query[0] @ key[0]).unsqueeze(0)
    return query @ key


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits with a mask: where a bool one is False they are OFF, a float one is added."""
    return logits.masked_fill(~mask, OFF) if mask.dtype == torch.bool else (logits + mask).clamp_min_(OFF)


@functools.lru_cache(maxsize=8)
def _late_keys(rows: int, keys: int, stride: int, device: torch.device) -> Tensor:
    """[R, S] to add to logits of causal attention: OFF where a key comes after its query, else 0."""
    after = torch.full((rows, keys), OFF, device=device).triu_(1)
    return after[::stride]


@dataclass(frozen=True, eq=False)
class Product:
    """Queries [B, H, R, D] and keys [B, G, S, D] of one call, copied: on the host many are multiplied at once.

    Attributes:
        query, key: likewise.
        kind: what calls must have in common for it: scale, whether it is causal, queries in all, their stride.
    """

    query: Tensor
    key: Tensor
    kind: tuple[float | None, bool, int, int]

    @property
    def alike(self) -> tuple[Any, ...]:
        """Calls for which this is the same are multiplied at once."""
        return self.query.shape, self.key.shape, self.kind

    def logits(self) -> Tensor:
        """[B, H, R, S]."""
        scale, causal, rows, stride = self.kind
        logits = product_logits(self.query, self.key, scale)
        if causal:
            make = _late_keys.__wrapped__ if torch.compiler.is_compiling() else _late_keys
            logits += make(rows, self.key.shape[2], stride, logits.device)
        return logits


def all_values(waiting: Sequence[Tensor | Product]) -> list[Tensor]:
    """The values [3, B, H, R] of calls, those of products that are alike computed at once."""
    groups: dict[tuple[Any, ...], list[tuple[int, Product]]] = {}
    out: dict[int, Tensor] = {}
    for at, call in enumerate(waiting):
        if isinstance(call, Product):
            groups.setdefault(call.alike, []).append((at, call))
        else:
            out[at] = call
    for group in groups.values():
        query, key = (torch.cat([getattr(product, name) for _, product in group]) for name in ("query", "key"))
        values = row_values(Product(query, key, group[0][1].kind).logits())
        out.update(zip((at for at, _ in group), values.chunk(len(group), 1), strict=True))
    return [out[at] for at in range(len(waiting))]
