"""Norms of many tensors at once with the exactness of fp64 accumulation.

Squares of gradients near 1e-22 vanish in fp32. On the CPU, where reading a number waits for nothing, one fused fp32 call
is enough but for the few tensors whose norm leaves fp32's safe range; elsewhere fp64 from the start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowscope.probes.statistics import wide

Number = Tensor | float
"""A value already on the host, or a 0-dim tensor still on its device."""
FP32_SAFE = (1e-15, 1e15)
"""Norms in this range are right to fp32 rounding; outside it, squares of entries under- or overflow fp32."""


def norms(tensors: Sequence[Tensor]) -> list[Number]:
    """Return the norm of each tensor, in order."""
    fused = [i for i, t in enumerate(tensors) if t.dtype == torch.float32 and t.device.type == "cpu"]
    held: dict[int, float] = {}
    if fused:
        values = numbers(torch._foreach_norm([tensors[i] for i in fused]))
        held = {i: v for i, v in zip(fused, values, strict=True) if isinstance(v, float) and _safe(v)}
    return [held[i] if i in held else numbers([_exact_norm(t)])[0] for i, t in enumerate(tensors)]


def numbers(scalars: Sequence[Tensor]) -> list[Number]:
    """Return 0-dim tensors of one device as plain numbers where that costs no synchronisation."""
    if not scalars or scalars[0].device.type != "cpu":
        return list(scalars)
    values: list[Number] = torch.stack(list(scalars)).tolist()
    return values


def _safe(norm: float) -> bool:
    return FP32_SAFE[0] < norm < FP32_SAFE[1]


def _exact_norm(x: Tensor) -> Tensor:
    if x.is_complex():
        x = torch.view_as_real(x)
    return torch.linalg.vector_norm(x, dtype=wide(x.device))
