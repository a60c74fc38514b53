"""Numbers that tell two tensors apart: a checksum of every bit, and sums from which the size of a difference follows.

All of it adds up over samples (axis 0), so that micro-batches, ranks and shards of one tensor combine by addition, and
one process that saw the whole batch has what several have together. Nothing is read from a device.

Axis letters: G tensors of one shape, B samples or rows, R and W the rest of a sample, M what is left of it, K
projections.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowscope.sums.statistics import as_integers, real, wide

PROJECTIONS = 4
"""K: the difference of two projections over the norm is wrong by a factor of three once in a hundred times."""
COLUMNS = 2 + 2 * PROJECTIONS
"""Checksum, sum of squares, K projections, K sums of squares of the samples' projections."""
CHECKSUM, SQUARES, SUMS, SAMPLES = 0, 1, 2, 2 + PROJECTIONS
BITS = 36
"""Of a checksum: 131,072 of them add up in fp64 without rounding."""
WHOLE = 4096
"""Up to so many entries a sample, each has a weight of its own in the checksum."""
ROW = 2 + PROJECTIONS
"""Columns of a parameter's fingerprint: checksum, sum of squares, K projections."""
CHUNK = 1 << 20
GROUPS = 1024
"""Up to so many rows, each is projected for itself."""

_MASK = (1 << BITS) - 1
_LOW = (1 << 31) - 1
_ODD = 0x5851F42D4C957F2D
"""Knuth's multiplier of MMIX."""


def fingerprints(x: Tensor, axis: int = -1) -> Tensor:
    """Return [G, COLUMNS] of tensors [G, B, ...], fp64.

    Args:
        x: real floating-point tensors, stacked.
        axis: of the features in one of them: the projections are of sums over all axes but this and the first.
    """
    return torch.cat([checksums(x)[:, None].to(wide(x.device)), _projections(x, axis)], dim=1)


def checksums(x: Tensor) -> Tensor:
    """Return [G] int64 of tensors [G, B, ...]: one changed bit changes it, the order of the samples does not."""
    return (_of_samples(x) & _MASK).sum(1)


def ordered_checksums(x: Tensor) -> Tensor:
    """Return [G] int64 likewise, which the order of the samples changes too."""
    samples = _of_samples(x)
    return _mixed((samples * _weights(samples.shape[1], samples)).sum(1)) & _MASK


def _of_samples(x: Tensor) -> Tensor:
    """[G, B] int64."""
    bits = x if x.dtype == torch.bool else as_integers(x)
    count, rows = (*bits.shape, 1)[:2]
    if not bits.numel():  # an empty shard
        return bits.new_zeros(count, rows, dtype=torch.int64)
    bits = bits.reshape(count, rows, -1, bits.shape[-1] if bits.dim() > 2 else 1)
    if bits.shape[2] * bits.shape[3] <= WHOLE:
        sums = bits.flatten(2).to(torch.int64)
    else:  # a sum makes no copy of a large tensor; what changes places in it shows in the projections
        sums = bits.sum(-1, dtype=torch.int64)
    # a sample of zeros counts too
    return _mixed((_mixed(sums) * _weights(sums.shape[-1], sums)).sum(-1) + _ODD)


def _weights(count: int, like: Tensor) -> Tensor:
    return torch.arange(1, 2 * count, 2, device=like.device)


def _mixed(h: Tensor) -> Tensor:
    h = (h ^ (h >> 29)) * _ODD
    return h ^ (h >> 32)


def _projections(x: Tensor, axis: int) -> Tensor:
    """[G, 1 + 2 K] of [G, B, ...]."""
    dtype = wide(x.device)
    count, rows = x.shape[0], x.shape[1] if x.dim() > 1 else 1
    flat = x.reshape(count, rows, -1)
    squares = torch.linalg.vector_norm(flat, dim=(1, 2), dtype=dtype)[:, None] ** 2
    if x.dim() > 3:
        sums = x.flatten(3).sum(3, dtype=dtype) if axis == 1 else x.flatten(2, -2).sum(2, dtype=dtype)
    elif rows > GROUPS:
        sums = flat.sum(1, keepdim=True, dtype=dtype)
    else:
        sums = flat.to(dtype)
    projected = sums @ signs(sums.shape[-1], x)
    # rows that were added up have no projections of their own
    of_samples = (projected**2).sum(1) if sums.shape[1] == rows else torch.zeros_like(projected[:, 0])
    return torch.cat([squares, projected.sum(1), of_samples], dim=1)


def row_fingerprints(x: Tensor, starts: Sequence[tuple[int, int]]) -> Tensor:
    """Return [G, 2 + K] of parameters or their gradients [G, B, ...]: checksum, sum of squares, projections, fp64.

    Rows have signs of their own, so that those of a gradient that add up to zero do not hide what differs.

    Args:
        x: real floating-point tensors, stacked; shards add up.
        starts: G, the numbers of the first row and column of each in the whole tensor.
    """
    dtype, rows = wide(x.device), x.shape[1]
    if not x.numel():
        return torch.zeros(x.shape[0], ROW, dtype=dtype, device=x.device)
    flat = x.reshape(x.shape[0], rows, -1)
    squares = torch.linalg.vector_norm(flat, dim=(1, 2), dtype=dtype)[:, None] ** 2
    step = max(1, CHUNK // max(1, flat.shape[2]))
    projected = torch.stack([_of_rows(tensor, start, step) for tensor, start in zip(flat, starts, strict=True)])
    return torch.cat([checksums(x)[:, None].to(dtype), squares, projected], dim=1)


def _of_rows(x: Tensor, start: tuple[int, int], step: int) -> Tensor:
    """[K] of [B, M], so many rows at a time: a copy in fp64 of all would take twice the memory."""
    rows, columns = (signs(at + size, x)[at:] for at, size in zip(start, x.shape, strict=True))
    parts = [
        x[at : at + step].to(rows.dtype) @ columns * rows[at : at + step] for at in range(0, max(1, x.shape[0]), step)
    ]
    return torch.cat(parts).sum(0)


_SIGNS: dict[tuple[int, torch.device], Tensor] = {}


def signs(size: int, like: Tensor) -> Tensor:
    """Return [M, K] of 1 and -1, the same everywhere, on the device of `like`."""
    if torch.compiler.is_compiling():
        return _signs(size, like)
    key = size, like.device
    if key not in _SIGNS:
        _SIGNS[key] = _signs(size, like)
    return _SIGNS[key]


def _signs(size: int, like: Tensor) -> Tensor:
    numbers = torch.arange(1, size + 1, device=like.device)[:, None]
    h = (numbers * (2654435761 * torch.arange(3, 3 + 2 * PROJECTIONS, 2, device=like.device))) & _LOW
    for factor in (1103515245, 1664525917):
        h = ((h ^ (h >> 15)) * factor) & _LOW
    return (((h >> 17) & 1) * 2 - 1).to(wide(like.device))


def stacked(tensors: Sequence[Tensor], small: int = 1 << 16) -> list[tuple[list[int], Tensor]]:
    """Return tensors as stacks [G, B, ...] of equal shape with their numbers; large ones each for itself, uncopied."""
    groups: dict[object, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike = (tensor.shape, tensor.dtype, tensor.device) if tensor.numel() <= small else i
        groups.setdefault(alike, []).append(i)
    return [(group, _stack([tensors[i] for i in group])) for group in groups.values()]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    parts = [real(tensor) for tensor in tensors]
    x = parts[0][None] if len(parts) == 1 else torch.stack(parts)
    return x if x.dim() > 1 else x[:, None]
