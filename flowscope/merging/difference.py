"""By how much two outputs of one model differ, and how much of that rounding explains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.model.nested import nested_tensors

TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 1e-2


def floating(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output."""
    return [x for x in nested_tensors(value) if x.is_floating_point()]


def alike(before: Any, after: Any) -> bool:
    """Whether two outputs hold the same number of tensors, each with as many axes."""
    return [x.dim() for x in floating(before)] == [x.dim() for x in floating(after)]


def difference(before: Any, after: Any) -> float:
    """Return the largest relative difference between two outputs; inf where they hold tensors of other shapes."""
    if not alike(before, after):
        return math.inf
    return max((relative(a, b) for a, b in zip(floating(before), floating(after), strict=True)), default=0.0)


def relative(a: Tensor, b: Tensor) -> float:
    """Return max |a - b| over max |a|; inf where the shapes differ, or only one of two numbers is finite."""
    if a.shape != b.shape:
        return math.inf
    if a.is_meta or not a.numel():
        return 0.0
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.detach().to(wide), b.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    change = (a - b).abs().masked_fill(same, 0.0).max().item()
    scale = a.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return change / (scale or 1.0) if math.isfinite(change) else math.inf


def tolerance(model: nn.Module, output: Any) -> float:
    """Return by how much an output that is promised to be kept may move: 1e-4, 1e-2 where bf16 or fp16 is in play."""
    low = any(x.is_floating_point() and x.itemsize <= 2 for x in (*floating(output), *model.parameters()))
    return LOW_PRECISION_TOLERANCE if low else TOLERANCE
