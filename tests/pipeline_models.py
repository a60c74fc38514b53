"""What the ranks of tests/pipeline_program.py and the one process of its test have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from watch_models import Block, D

MICRO, STEPS = 4, 3


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(12)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2 * MICRO, 5, D, generator=generator)
    return x, y
