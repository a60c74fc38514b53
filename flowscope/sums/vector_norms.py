"""Norms of many tensors at once with the exactness of fp64 accumulation.

Squares of gradients near 1e-22 vanish in fp32, and sums of millions of squares lose digits. On the host one fused fp32
call serves the small tensors whose norm is in fp32's safe range; everything else is accumulated in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.sums.statistics import FP32_ENTRIES, FP32_SAFE, host_norm, is_host, real, wide
from flowscope.torch_internals import foreach_norm

JOINED_ENTRIES = 4096
"""Tensors up to this size are joined to one: a hundred calls on a few entries each would take three times as long."""
Number = Tensor | float
"""A value already on the host, or a 0-dim tensor still on its device."""


def norms(tensors: Sequence[Tensor]) -> list[Number]:
    """Return the norm of each tensor, in order."""
    joined, fused = [], []
    if not torch.compiler.is_compiling():
        plain = [(i, t.numel()) for i, t in enumerate(tensors) if t.is_cpu and t.dtype is torch.float32]
        joined = [i for i, size in plain if size <= JOINED_ENTRIES]
        fused = [i for i, size in plain if JOINED_ENTRIES < size <= FP32_ENTRIES]
    held: dict[int, float] = {}
    if joined:
        rows = [tensors[i] if tensors[i].dim() == 1 else tensors[i].reshape(-1) for i in joined]
        sizes = np.array([row.numel() for row in rows])
        held = dict(zip(joined, row_norms(torch.cat(rows), sizes), strict=True))
    if fused:
        values = numbers(foreach_norm([tensors[i] for i in fused]))
        held.update((i, v) for i, v in zip(fused, values, strict=True) if isinstance(v, float) and _safe(v))
    return [held[i] if i in held else _norm(t) for i, t in enumerate(tensors)]


def row_norms(joined: Tensor, sizes: NDArray[np.int64]) -> list[float]:
    """Return the norm of each stretch of so many entries of a tensor [entries] on the host, one after the other."""
    squares = torch.zeros(joined.numel() + 1, dtype=torch.float64)  # one more, as the last stretch may be empty
    squares[:-1] = joined
    sums = np.add.reduceat(squares.square_().numpy(), np.cumsum(sizes) - sizes)
    norms: list[float] = np.sqrt(np.where(sizes, sums, 0.0)).tolist()
    return norms


def numbers(scalars: Sequence[Tensor]) -> list[Number]:
    """Return 0-dim tensors of one device as plain numbers where that costs no synchronisation."""
    if not scalars or not is_host(scalars[0]):
        return list(scalars)
    return torch.stack(list(scalars)).tolist()


def _safe(norm: float) -> bool:
    return FP32_SAFE[0] < norm < FP32_SAFE[1]


def _norm(x: Tensor) -> Number:
    x = real(x)
    if is_host(x):
        return host_norm(x)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=wide(x.device))
    return norm
