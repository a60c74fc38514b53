"""What of a sampled step adds up over ranks, as parts of one fp64 vector: how each is gathered and put back.

A part has a name and a length, the same on all ranks that share it. Ranks that saw nothing of it send zeros. Counts of
units are packed: each of a double's 52 bits of whole numbers is used, so that a unit costs log2(ranks + 1) bits.

Axis letters: U units, N numbers of one part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.records import Array
from flowscope.sums.statistics import wide

BITS = 52


@dataclass(frozen=True)
class Sharing:
    """This rank's share in the sum over ranks.

    Attributes:
        ranks: how many ranks add up.
        device: where the vector lives.
        states: whether this rank's hidden states count (of ranks that hold the same ones, only the first's do).
        replicas: how many ranks' hidden states count: calls are those of one of them, on average.
        divisor: how often a rank's gradients are too large, because the gradients of all are averaged.
        first: whether this rank is the first of those that add up.
        first_rank: that first one's global rank.
        rank: this rank's place among them.
    """

    ranks: int
    device: torch.device
    states: bool
    replicas: int
    divisor: float
    first: bool
    first_rank: int
    rank: int


@dataclass(frozen=True)
class Part:
    """One part of the vector.

    Attributes:
        name: what it is; the same on all ranks.
        size: N.
        gather: gives [N] fp64 on the vector's device; only called where this rank has something to add.
        scatter: takes the sum [N] over the ranks, on the host.
        fixed: whether the structure of the model alone decides on name and size.
        largest: whether the largest of each number is asked for, in the place of the sum.
    """

    name: str
    size: int
    gather: Callable[[], Tensor]
    scatter: Callable[[Array], None]
    fixed: bool = True
    largest: bool = False


def flat(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of tensors of one shape from several devices as one row on `device`."""
    total = tensors[0].reshape(-1).to(device, wide(device), non_blocking=True)
    for tensor in tensors[1:]:
        total = total + tensor.reshape(-1).to(device, wide(device), non_blocking=True)
    return total


def from_host(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return numbers of the host as one row on `device`, without waiting for it."""
    row = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64).reshape(-1)).to(wide(device))
    return row if device.type == "cpu" else row.pin_memory().to(device, non_blocking=True)


@lru_cache
def digits(ranks: int) -> int:
    """How many counts up to `ranks` one double holds exactly."""
    return max(1, int(BITS / math.log2(ranks + 1)))


def packed_size(count: int, ranks: int) -> int:
    """How many doubles `count` packed counts take."""
    return -(-count // digits(ranks))


def pack(flags: Tensor, ranks: int) -> Tensor:
    """Return flags [U] of 0 and 1 as digits to the base ranks + 1; sums over `ranks` ranks carry nothing over."""
    if flags.device.type == "cpu":  # of many small products torch's take several times as long
        return torch.from_numpy(packed(flags.numpy(), ranks)).to(flags.dtype)
    width, count = digits(ranks), packed_size(flags.numel(), ranks)
    padded = flags.new_zeros(count * width)
    padded[: flags.numel()] = flags
    return padded.view(count, width) @ from_host((ranks + 1.0) ** np.arange(width), flags.device).to(flags.dtype)


def packed(flags: NDArray[Any], ranks: int) -> Array:
    """The same of flags on the host."""
    width, count = digits(ranks), packed_size(flags.size, ranks)
    padded = np.zeros(count * width)
    padded[: flags.size] = flags
    return padded.reshape(count, width) @ (ranks + 1.0) ** np.arange(width)


def unpack(packed: Array, count: int, ranks: int) -> Array:
    """Return the counts [U] from the sum of what `pack` gave."""
    whole = np.rint(packed).astype(np.int64)[:, None]
    powers = (ranks + 1) ** np.arange(digits(ranks), dtype=np.int64)
    return (whole // powers % (ranks + 1)).reshape(-1)[:count].astype(np.float64)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor (no collective), any other tensor as it is."""
    if type(x) is Tensor or not hasattr(x, "to_local"):
        return x
    part: Tensor = x.to_local()
    return part
