"""Numbers of some rows of attention (largest logit of each head, entropy, share on the first key), and how they add up.

Axis letters: B batch, H heads, T queries, S keys, R rows looked at (of T), D features of a head.
"""

from __future__ import annotations

import functools
import math
import threading
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
ENTRIES = 1 << 16
"""So many logits are read at once, at most: what fits a cache."""
SHAPES = 8
"""Of so many shapes some may wait."""


def row_values(logits: Tensor, shares: Tensor | None = None) -> Tensor:
    """Return [..., 3, B, H, R]: of each row the entropy, the share on the first key, and the largest logit.

    The entropy is log Z - sum(p l) in nats, with l the logits less the largest, Z = sum exp l, p = exp(l) / Z; the
    largest p is 1 / Z.

    Args:
        logits: [..., B, H, R, S] fp32 after scale, bias and mask, with OFF where a pair is masked; overwritten.
        shares: likewise, room for the attention matrix.
    """
    top = logits.amax(-1, keepdim=True)
    shares = torch.softmax(logits.sub_(top), -1, out=shares)
    entropy = -shares.amax(-1).log_() - logits.mul_(shares).sum(-1)
    return torch.stack([entropy, shares[..., 0], top.squeeze(-1)], -4)


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
    return after[::stride].contiguous()


@dataclass(frozen=True, eq=False)
class Product:
    """Queries [B, H, R, D] and keys [B, G, S, D] of one call without a mask of its own; views of the model's.

    Attributes:
        query, key: likewise.
        scale: of the logits, None: 1 / sqrt(D).
        causal: whether keys after their query are masked.
        rows: queries in all.
        stride: of those looked at.
    """

    query: Tensor
    key: Tensor
    scale: float | None
    causal: bool
    rows: int
    stride: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        return *self.query.shape[:3], self.key.shape[2]

    def logits(self) -> Tensor:
        """[B, H, R, S]."""
        logits = product_logits(self.query, self.key, self.scale)
        return logits.add_(self._late(traced=torch.compiler.is_compiling())) if self.causal else logits

    def write(self, out: Tensor) -> None:
        """Write the logits to a tensor [B, H, R, S] that has room for them, in one multiplication where that can be."""
        query, key = self.query, self.key
        if query.dtype != torch.float32 or key.dtype != torch.float32 or query.shape[1] != key.shape[1]:
            out.copy_(self.logits())
            return
        scale = 1.0 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        flat, query, key = out.flatten(0, 1), query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
        if self.causal:
            torch.baddbmm(self._late(), query, key, alpha=scale, out=flat)
        else:
            flat.baddbmm_(query, key, beta=0.0, alpha=scale)

    def _late(self, *, traced: bool = False) -> Tensor:
        make = _late_keys.__wrapped__ if traced else _late_keys
        return make(self.rows, self.key.shape[2], self.stride, self.query.device)


class Seen:
    """One call of a layer.

    Args:
        layer: its number.
    """

    __slots__ = ("layer", "values")

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.values: Tensor | None = None
        """[3, B, H, R] of its rows, once they were read."""


class Pile:
    """The logits [K, B, H, R, S] of up to K calls that are alike."""

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self._logits = torch.empty(ENTRIES // math.prod(shape), *shape, device=device)
        self._shares = torch.empty_like(self._logits)
        self._calls: list[Seen] = []
        self.used = True
        """Whether a call came since `Piles.read`."""

    def add(self, call: Seen, rows: Tensor | Product) -> None:
        """Keep a call's logits; where it is the last that has room, all are read."""
        slot = self._logits[len(self._calls)]
        if isinstance(rows, Product):
            rows.write(slot)
        else:
            slot.copy_(rows)
        self._calls.append(call)
        self.used = True
        if len(self._calls) == len(self._logits):
            self.read()

    def read(self) -> None:
        """Make the numbers of the calls that are here, in one pass over all."""
        calls, self._calls = self._calls, []
        if calls:
            values = row_values(self._logits[: len(calls)], self._shares[: len(calls)])
            for call, own in zip(calls, values.unbind(), strict=True):
                call.values = own


class Piles:
    """Logits wait here until a few calls can be read at once: small operations cost more than what they compute.

    Of each shape of logits there is one pile, of at most ENTRIES numbers and as much room beside it (512 KiB), and
    SHAPES of them; a call of more logits is read by itself. A pile stays for the next step while its shape comes again.
    """

    def __init__(self) -> None:
        self._piles: dict[tuple[Any, ...], Pile] = {}

    def add(self, call: Seen, rows: Tensor | Product) -> None:
        """Take over the logits of some rows of a call."""
        shape, device = tuple(rows.shape), rows.query.device if isinstance(rows, Product) else rows.device
        if not 0 < math.prod(shape) <= ENTRIES:
            call.values = row_values(rows.logits() if isinstance(rows, Product) else rows)
            return
        place = threading.get_ident(), device, shape
        pile = self._piles.get(place)
        if pile is None:
            if len(self._piles) == SHAPES:
                self.read()
                self._piles.clear()
            pile = self._piles[place] = Pile(shape, device)
        pile.add(call, rows)

    def read(self) -> None:
        """Make the numbers of all calls; what no call came to since the last time is let go of."""
        for pile in self._piles.values():
            pile.read()
        self._piles = {place: pile for place, pile in self._piles.items() if pile.used}
        for pile in self._piles.values():
            pile.used = False


def calls_sums(calls: Sequence[Seen]) -> list[tuple[int, Tensor]]:
    """Each call's layer and its numbers [3 + H], those of calls that are alike made at once."""
    alike: dict[tuple[Any, ...], tuple[list[int], list[Tensor]]] = {}
    for call in calls:
        assert call.values is not None
        layers, values = alike.setdefault((call.values.shape, call.values.device), ([], []))
        layers.append(call.layer)
        values.append(call.values)
    return [
        pair
        for layers, values in alike.values()
        for pair in zip(layers, head_sums(torch.stack(values)).unbind(), strict=True)
    ]
