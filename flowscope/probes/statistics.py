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


def real_features(states: Tensor) -> Tensor:
    """Return [..., D] with each complex feature as two real ones; real states as they are."""
    return torch.view_as_real(states.resolve_conj()).flatten(-2) if states.is_complex() else states


def sample_positions(x: Tensor, axis: int, limit: int, *, sequence: bool) -> Positions:
    """Return at most about `limit` evenly spaced positions of x: whole where B*T <= limit (then every statistic is exact).

    Args:
        x: hidden state, batch first; features at `axis`.
        axis: the feature axis.
        limit: largest number of positions.
        sequence: whether the positions between batch and features are tokens of a sequence.
    """
    states = real_features(feature_last(x.detach(), axis))
    batch, tokens = states.shape[0], states.shape[1]
    if batch * tokens > limit:
        rows = max(1, min(batch, limit // min(tokens, max(2, limit // batch))))
        states = states[:: -(-batch // rows), :: max(1, -(-tokens * rows // limit))]
    sequences = states.shape[0] if sequence and states.shape[1] > 1 else 0
    # always a copy: an in-place operation after the point must not change what was seen, nor the copy keep x alive
    values = states.to(torch.float32, copy=True).reshape(-1, states.shape[-1])
    return Positions(values, torch.linalg.vecdot(values, values).sqrt(), sequences)


Head = Tensor | tuple[float, float, float]
"""Three sums of one tensor: on the host as numbers (eager CPU, where reading waits for nothing), else as a tensor [3]."""


def head(x: Tensor, third: float) -> Head:
    """Return the fp64 sum of squares of x, the number of its non-finite entries, and the constant `third`.

    The count is of x - x, which is 0 or NaN. On the CPU it is only made where the norm is not finite: fp64 squares of
    fp32 entries cannot overflow.
    """
    if x.is_complex():
        x = torch.view_as_real(x)
    norm = torch.linalg.vector_norm(x, dtype=wide(x.device))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        value = norm.item()
        safe = math.isfinite(value) and x.dtype != torch.float64
        return value * value, 0.0 if safe else float(torch.count_nonzero(x - x)), third
    nonfinite = torch.count_nonzero(x - x).to(norm.dtype)
    return torch.stack([norm * norm, nonfinite, torch.full_like(norm, third)])


def nonfinite_count(x: Tensor) -> Tensor:
    """Return [1] the number of non-finite entries of x."""
    return torch.count_nonzero(x - x).reshape(1)


def cosine_buckets(one_minus_cosine: Tensor) -> Tensor:
    """Return counts [BUCKETS] of 1 - cos [N]: bucket 0 below 2^-20, then 4 an octave up to 2; NaN is not counted."""
    lowest = -OCTAVES_BELOW - 1.0 / BUCKETS_PER_OCTAVE
    octave = torch.log2(one_minus_cosine.clamp(2.0 ** (lowest + 1e-3), 2.0))
    return torch.histc(torch.nan_to_num(octave, nan=9.0), BUCKETS, lowest, 1.0)


def depth_statistics(before: Positions | None, now: Positions, origin: Positions | None) -> Tensor:
    """Return the columns TO_INPUT .. end of a row for a point `now` that follows the point `before`.

    1 - cos(a, b) = (|b - a|^2 - (|a| - |b|)^2) / (2 |a| |b|), exact for near-equal vectors where 1 - a.b/|a||b| is not.

    Args:
        before: the previous point's positions, None at the first point or where widths differ.
        now: this point's positions.
        origin: the positions of x_0, None where unknown or of another width.
    """
    out = torch.zeros(COLUMNS - TO_INPUT, dtype=torch.float32, device=now.values.device)
    inverse = now.norm.reciprocal()
    if origin is not None:
        cosine = torch.linalg.vecdot(origin.values, now.values) * (inverse / origin.norm)
        valid = torch.isfinite(cosine)
        out[0] = torch.where(valid, cosine, 0.0).sum()
        out[1] = valid.sum()
    if now.sequences:
        means = token_cosines(now, inverse)
        valid = torch.isfinite(means)
        out[2] = torch.where(valid, means, 0.0).sum()
        out[3] = valid.sum()
    if before is not None:
        difference = now.values - before.values
        square = torch.linalg.vecdot(difference, difference)
        gap = now.norm - before.norm
        out[4] = square.sum()
        out[5] = torch.dot(before.norm, before.norm)
        out[6:] = cosine_buckets((square - gap * gap) * inverse / (2.0 * before.norm))
    return out


def token_cosines(now: Positions, inverse: Tensor) -> Tensor:
    """Return, per sequence, the mean cosine between two different tokens.

    mean over s != t of u_s . u_t = (|sum_t u_t|^2 - T) / (T (T - 1)) for the unit vectors u_t; NaN for a zero token.

    Args:
        now: N = sequences * T positions.
        inverse: [N] reciprocal norms.
    """
    tokens = now.values.shape[0] // now.sequences
    weights = inverse.view(now.sequences, 1, tokens)
    total = torch.bmm(weights, now.values.view(now.sequences, tokens, -1)).squeeze(1)
    return (torch.linalg.vecdot(total, total) - tokens) / (tokens * (tokens - 1))
