"""Additive statistics of hidden states and gradients: pure functions `Tensor -> vector of sums` (torch only).

Axis letters: B batch, T tokens or positions, D features, N sampled positions (N <= B*T), L depth.

Everything is a sum (of squares, counts, cosines, counts in logarithmic buckets), so that micro-batches, repeated calls
and ranks combine by addition; `summaries` turns sums into means, norms and quantiles on the host. Sums of squares are
fp64: squares of gradients near 1e-22 vanish in fp32 (measured in the first steps of a plain RNN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

OCTAVES_BELOW = 20
"""1 - cos is resolved down to 2^-20; what is smaller falls into bucket 0."""
BUCKETS_PER_OCTAVE = 4
BUCKETS = (OCTAVES_BELOW + 1) * BUCKETS_PER_OCTAVE + 1

# Columns of one row of the deposit buffer.
SQUARE, NONFINITE, ELEMENTS = 0, 1, 2
GRAD_SQUARE, GRAD_NONFINITE, BACKWARDS = 3, 4, 5
TO_INPUT, TO_INPUT_COUNT, TOKEN, TOKEN_COUNT, BRANCH_SQUARE, CARRY_SQUARE = 6, 7, 8, 9, 10, 11
HISTOGRAM = 12
COLUMNS = HISTOGRAM + BUCKETS


@dataclass(frozen=True)
class Positions:
    """A sample of the positions of one hidden state, kept for the statistics between points.

    Attributes:
        values: [N, D] fp32, detached, N = sequences * tokens.
        norm: [N] their norms.
        sequences: how many sequences the N positions come from; 0 where the activation has no token axis.
    """

    values: Tensor
    norm: Tensor
    sequences: int


def wide(device: torch.device) -> torch.dtype:
    """The accumulation type: fp64, or fp32 where the device has no fp64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def feature_last(x: Tensor, axis: int) -> Tensor:
    """Return x as [B, T, D]: features (at `axis`) last, all positions between batch and features in one axis."""
    x = x.movedim(axis, -1)
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def sample_positions(x: Tensor, axis: int, limit: int, *, sequence: bool) -> Positions:
    """Return at most about `limit` evenly spaced positions of x: whole where B*T <= limit (then every statistic is exact).

    Args:
        x: hidden state, batch first; features at `axis`.
        axis: the feature axis.
        limit: largest number of positions.
        sequence: whether the positions between batch and features are tokens of a sequence.
    """
    states = feature_last(x.detach(), axis)
    if states.is_complex():  # a complex feature is two real ones
        states = torch.view_as_real(states.resolve_conj()).flatten(-2)
    batch, tokens = states.shape[0], states.shape[1]
    if batch * tokens > limit:
        rows = max(1, min(batch, limit // min(tokens, max(2, limit // batch))))
        states = states[:: -(-batch // rows), :: max(1, -(-tokens * rows // limit))]
    sequences = states.shape[0] if sequence and states.shape[1] > 1 else 0
    # always a copy: an in-place operation after the point must not change what was seen, nor the copy keep x alive
    values = states.to(torch.float32, copy=True).reshape(-1, states.shape[-1])
    return Positions(values, torch.linalg.vector_norm(values, dim=-1), sequences)


def square_and_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fp64 sum of squares of x and the number of its non-finite entries, both 0-dim of one dtype.

    The count is of x - x, which is 0 or NaN. On the CPU it is only made where the norm is not finite: fp64 squares of
    fp32 entries cannot overflow, and reading a number there waits for nothing.
    """
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    norm = torch.linalg.vector_norm(x, dtype=wide(x.device))
    countless = x.device.type == "cpu" and x.dtype != torch.float64 and not torch.compiler.is_compiling()
    if countless and math.isfinite(norm.item()):
        return norm * norm, torch.zeros_like(norm)
    return norm * norm, torch.count_nonzero(x - x).to(norm.dtype)


def cosine_buckets(one_minus_cosine: Tensor, valid: Tensor) -> Tensor:
    """Return fp64 counts [BUCKETS] of 1 - cos: bucket 0 below 2^-20, then 4 an octave up to 2.

    Args:
        one_minus_cosine: [N] in [0, 2].
        valid: [N] bool, which entries count.
    """
    index = (torch.log2(one_minus_cosine.clamp_min(1e-30)) + OCTAVES_BELOW) * BUCKETS_PER_OCTAVE + 1
    index = torch.nan_to_num(index, nan=0.0).clamp(0, BUCKETS - 1).long()
    counts = torch.zeros(BUCKETS, dtype=wide(index.device), device=index.device)
    return counts.scatter_add_(0, index, valid.to(counts.dtype))


def depth_statistics(before: Positions | None, now: Positions, origin: Positions | None) -> Tensor:
    """Return the columns TO_INPUT .. end of a row for a point `now` that follows the point `before`.

    1 - cos(a, b) = (|b - a|^2 - (|a| - |b|)^2) / (2 |a| |b|), exact for near-equal vectors where 1 - a.b/|a||b| is not.

    Args:
        before: the previous point's positions, None at the first point or where widths differ.
        now: this point's positions.
        origin: the positions of x_0, None where unknown or of another width.
    """
    device, dtype = now.values.device, wide(now.values.device)
    zero = torch.zeros((), dtype=dtype, device=device)
    to_input = to_input_count = token = token_count = branch = carry = zero
    histogram = torch.zeros(BUCKETS, dtype=dtype, device=device)
    if origin is not None:
        cosine = (origin.values * now.values).sum(-1) / (origin.norm * now.norm)
        valid = torch.isfinite(cosine)
        to_input = torch.where(valid, cosine, 0.0).sum(dtype=dtype)
        to_input_count = valid.sum(dtype=dtype)
    if now.sequences:
        token, token_count = token_cosine_sums(now)
    if before is not None:
        difference = now.values - before.values
        square = (difference * difference).sum(-1)
        gap = now.norm - before.norm
        one_minus = (square - gap * gap) / (2.0 * now.norm * before.norm)
        valid = torch.isfinite(one_minus)
        histogram = cosine_buckets(one_minus, valid)
        branch, carry = square.sum(dtype=dtype), (before.norm * before.norm).sum(dtype=dtype)
    head = torch.stack([to_input, to_input_count, token, token_count, branch, carry])
    return torch.cat([head, histogram])


def token_cosine_sums(now: Positions) -> tuple[Tensor, Tensor]:
    """Return the sum over sequences of the mean cosine between two different tokens, and the number of sequences.

    mean over s != t of u_s . u_t = (|sum_t u_t|^2 - sum_t |u_t|^2) / (T (T - 1)) for the unit vectors u_t.
    """
    tokens = now.values.shape[0] // now.sequences
    unit = now.values / now.norm.clamp_min(1e-30).unsqueeze(-1)
    grouped = unit.view(now.sequences, tokens, -1)
    total = grouped.sum(1)
    mean = ((total * total).sum(-1) - (grouped * grouped).sum((1, 2))) / (tokens * (tokens - 1))
    valid = torch.isfinite(mean)
    dtype = wide(mean.device)
    return torch.where(valid, mean, 0.0).sum(dtype=dtype), valid.sum(dtype=dtype)
