"""A table of the numbers of attention layers: what is added to it, and what ranks make of theirs.

A row holds the sums of `attention_rows.head_sums`, and the largest logit of each head.

Axis letters: N layers, H heads of the widest one, C columns of a rank's places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowscope.records import Array
from flowscope.sums.attention_rows import HEADS
from flowscope.sums.payload import Part, Sharing
from flowscope.sums.statistics import wide

PLACES = 1 << 16
"""Where ranks, layers and heads are more than so many numbers, ranks tell only which head has the largest logit."""
UNSEEN = -1e300
"""Stands for -inf in a sum."""


def blank(table: Tensor) -> Tensor:
    """Rows [..., 3 + H] of nothing."""
    table[..., :HEADS] = 0.0
    table[..., HEADS:] = -math.inf
    return table


def combined(one: Tensor, other: Tensor) -> Tensor:
    """The numbers [..., 3 + H] of two sets of calls as one's."""
    sums = one[..., :HEADS] + other[..., :HEADS]
    return torch.cat([sums, torch.maximum(one[..., HEADS:], other[..., HEADS:])], -1)


def fitted(sums: Tensor, like: Tensor) -> Tensor:
    """Numbers [..., 3 + h] with as many columns as a table, and of its dtype; more heads are taken for one."""
    further = like.shape[-1] - sums.shape[-1]
    if further < 0:
        sums, further = (
            torch.cat([sums[..., :HEADS], sums[..., HEADS:].amax(-1, keepdim=True)], -1),
            like.shape[-1] - HEADS - 1,
        )
    sums = sums.to(like.dtype)
    return F.pad(sums, (0, further), value=-math.inf) if further else sums


def add(table: Tensor, calls: Iterable[tuple[int, Tensor]]) -> None:
    """Add to a table [N, 3 + H] the numbers [3 + H] of calls, each with its layer; many layers at once."""
    rounds: list[dict[int, Tensor]] = []
    for layer, sums in calls:
        free = next((held for held in rounds if layer not in held), None)
        if free is None:
            rounds.append(free := {})
        free[layer] = sums
    for held in rounds:
        if len({len(sums) for sums in held.values()}) > 1:
            held = {layer: fitted(sums, table) for layer, sums in held.items()}
        none = blank(torch.empty_like(next(iter(held.values()))))
        found = torch.stack([held.get(layer, none) for layer in range(len(table))])
        table.copy_(combined(table, fitted(found, table)))


class AttentionStep:
    """The numbers of one step.

    Args:
        tables: [N, 3 + H], one a device.
        count: N.
        heads: H.
    """

    def __init__(self, tables: list[Tensor], count: int, heads: int) -> None:
        self._tables, self._count, self._heads = tables, count, heads
        self._shared: tuple[Array, Array] | None = None

    def numbers(self, parts: list[Array]) -> tuple[Array, Array, Array, Array | None]:
        """[N, 3] the sums, [N] the largest logit and its head, [N, H] that of each head; of all ranks where shared.

        Args:
            parts: the host's copies of the tables.
        """
        if self._shared is None:
            sums = sum((part[:, :HEADS] for part in parts), np.zeros((self._count, HEADS)))
            heads = np.full((self._count, self._heads), -np.inf)
            for part in parts:
                np.maximum(heads, part[:, HEADS:], out=heads)
        else:
            sums, places = self._shared
            if places.shape[-1] != self._heads:
                first = places[..., 0].argmax(0)
                largest, head = places[first, np.arange(self._count)].T
                return sums, largest, head, None
            heads = places.max(0)
        return sums, heads.max(1), heads.argmax(1).astype(float), heads

    def parts(self, sharing: Sharing, agreed: Mapping[str, int]) -> list[Part]:
        """The part of the all-reduce vector: the sums, and in places of its own each rank's largest logits."""
        del agreed
        count, device, ranks = self._count, sharing.device, sharing.ranks
        columns = self._heads if ranks * count * self._heads <= PLACES else 2
        ends = HEADS * count, (HEADS + ranks * columns) * count

        def gather() -> Tensor:
            vector = torch.zeros(ends[1] + ranks, dtype=wide(device), device=device)
            if not sharing.states or not self._tables:
                return vector
            table = blank(torch.empty_like(self._tables[0], device=device))
            for held in self._tables:
                table = combined(table, held.to(device))
            vector[: ends[0]] = table[:, :HEADS].reshape(-1)
            own = table[:, HEADS:].clamp_min(UNSEEN)
            own = own if columns == self._heads else torch.stack(own.max(1), 1)
            # a sum has no largest: each rank has places of its own
            vector[ends[0] : ends[1]].view(ranks, -1)[sharing.rank] = own.reshape(-1)
            vector[ends[1] + sharing.rank] = 1.0
            return vector

        def scatter(total: Array) -> None:
            places = total[ends[0] : ends[1]].reshape(ranks, count, columns)
            places = np.where(places <= UNSEEN, -np.inf, places)
            places[total[ends[1] :] == 0] = -np.inf
            self._shared = total[: ends[0]].reshape(count, HEADS), places

        return [Part(f"attention {count} {columns}", ends[1] + ranks, gather, scatter, fixed=False)]
