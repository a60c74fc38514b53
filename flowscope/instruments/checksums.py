"""Whether a large tensor is exactly what it was before a step: its bits as integers, added up.

Its sampled entries tell most often. Only where none of them moved (an embedding of which a batch uses few rows, or a
parameter that nothing changes) is the whole tensor read from the next sampled step on, twice a step: as much as two
norms of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from flowscope.sums.statistics import as_integers
from flowscope.sums.vector_norms import Number, numbers

ENTRIES = 16_384
"""At most so many entries tell one batch from another."""


class Checksums:
    """The sums of those tensors, by number, that are in doubt."""

    def __init__(self) -> None:
        self._doubtful: set[int] = set()
        self._before: dict[int, Tensor] = {}

    def doubt(self, which: Iterable[int]) -> None:
        """Look at all entries of these from now on, and of no others."""
        self._doubtful = set(which)

    def take_before(self, tensors: Mapping[int, Tensor]) -> None:
        """The sums before the step."""
        self._before = {i: checksum(tensors[i]) for i in self._doubtful if i in tensors}

    def same(self, tensors: Mapping[int, Tensor]) -> dict[int, Number]:
        """1 for each tensor whose sum is what it was, else 0."""
        before, self._before = self._before, {}
        same = {i: (checksum(tensors[i]) == total).float() for i, total in before.items() if i in tensors}
        return {i: number for i, equal in same.items() for number in numbers([equal])}


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's entries, read as integers of their size: every change of one entry changes it."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return as_integers(real).sum(dtype=torch.int64)


def ordered_checksum(tensor: Tensor) -> Tensor:
    """Like `checksum` of up to `ENTRIES` evenly spaced entries, but the same entries in another order have another sum.

    Token ids are small whole numbers: plain sums of different batches would often be equal.
    """
    entries = real_entries(tensor)
    bits = as_integers(entries[:: -(-entries.numel() // ENTRIES) or 1]).long()
    return ((bits + 1) * _weights(bits.numel(), bits.device)).sum()


def real_entries(tensor: Tensor) -> Tensor:
    """The entries as a vector of real numbers."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


@lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> Tensor:
    """Odd whole numbers that look random, one an entry; products and sums wrap around at 2^64."""
    places = torch.arange(1, count + 1, device=device)
    return (places * 0x5851F42D4C957F2D) ^ (places * 0x14057B7EF767814F) | 1
