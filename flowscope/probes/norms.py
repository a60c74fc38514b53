"""Norms of many tensors at once with the exactness of fp64 accumulation.

Squares of gradients near 1e-22 vanish in fp32, and sums of millions of squares lose digits. On the host one fused fp32
call serves the small tensors whose norm is in fp32's safe range; everything else is accumulated in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowscope.probes.statistics import FP32_ENTRIES, FP32_SAFE, host_norm, is_host, wide

Number = Tensor | float
"""A value already on the host, or a 0-dim tensor still on its device."""


def norms(tensors: Sequence[Tensor]) -> list[Number]:
    """Return the norm of each tensor, in order."""
    small = (i for i, t in enumerate(tensors) if t.is_cpu and t.dtype is torch.float32 and t.numel() <= FP32_ENTRIES)
    fused = [] if torch.compiler.is_compiling() else list(small)
    held: dict[int, float] = {}
    if fused:
        values = numbers(torch._foreach_norm([tensors[i] for i in fused]))
        held = {i: v for i, v in zip(fused, values, strict=True) if isinstance(v, float) and _safe(v)}
    return [held[i] if i in held else _norm(t) for i, t in enumerate(tensors)]


def numbers(scalars: Sequence[Tensor]) -> list[Number]:
    """Return 0-dim tensors of one device as plain numbers where that costs no synchronisation."""
    if not scalars or not is_host(scalars[0]):
        return list(scalars)
    values: list[Number] = torch.stack(list(scalars)).tolist()
    return values


def _safe(norm: float) -> bool:
    return FP32_SAFE[0] < norm < FP32_SAFE[1]


def _norm(x: Tensor) -> Number:
    if x.is_complex():
        x = torch.view_as_real(x)
    if is_host(x):
        return host_norm(x)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=wide(x.device))
    return norm
