"""Additive statistics at the merge sites of wrapped blocks: gates, norm inputs, mixing matrices, streams (torch only).

Axis letters: B batch, T positions, D features, M = B*T, S streams.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowscope.sums.statistics import wide

GATE_SAMPLES = 1024
LOGIT_RANGE = 16.0
LOGIT_BUCKETS = 64
SATURATED_LOGIT = 5.0
"""|logit| beyond which a sigmoid's derivative is below 0.7 % (Metta's limit)."""

GATE_COLUMNS = 5 + LOGIT_BUCKETS
"""count, sum t, sum t^2, saturated, sum log(1 - t), then counts of the logit in equal buckets over [-16, 16]."""


def gate_sums(logit: Tensor) -> Tensor:
    """Return [GATE_COLUMNS] of a gate's pre-activation (any shape; at most 1,024 evenly spaced values of it).

    log(1 - sigmoid z) = -softplus(z): its mean gives the carry's factor of a highway gate, exp(mean log(1 - t)).
    """
    flat = logit.detach().reshape(-1)
    flat = flat[:: -(-flat.numel() // GATE_SAMPLES)].to(wide(flat.device))
    t = torch.sigmoid(flat)
    count = torch.full_like(flat[0], flat.numel())
    saturated = (flat.abs() > SATURATED_LOGIT).sum(dtype=flat.dtype)
    head = torch.stack([count, t.sum(), (t * t).sum(), saturated, -functional.softplus(flat).sum()])
    shown = torch.nan_to_num(flat.clamp(-LOGIT_RANGE, LOGIT_RANGE), nan=2 * LOGIT_RANGE)  # NaN is in no bucket
    buckets = torch.histc(shown, LOGIT_BUCKETS, -LOGIT_RANGE, LOGIT_RANGE)
    return torch.cat([head, buckets])


def norm_sums(z: Tensor, axis: int, norm: nn.Module) -> Tensor:
    """Return [positions, sum over positions of log(gamma / rms(z))], the log of the factor a norm puts on its input.

    Args:
        z: what the norm is given.
        axis: the feature axis.
        norm: LayerNorm (the mean is subtracted first) or an RMS norm; gamma is the mean of |weight|.
    """
    z = z.detach().to(wide(z.device))
    weight = getattr(norm, "weight", None)
    gamma = weight.detach().abs().mean(dtype=z.dtype) if isinstance(weight, Tensor) else z.new_ones(())
    if isinstance(norm, nn.LayerNorm):
        z = z - z.mean(axis, keepdim=True)
    eps = next((float(v) for v in (getattr(norm, n, None) for n in ("eps", "variance_epsilon")) if v is not None), 0.0)
    rms = (z * z).mean(axis).add(eps).sqrt()
    return torch.stack([torch.full_like(gamma, rms.numel()), (gamma / rms).log().sum()])


def matrix_sums(matrices: Tensor) -> Tensor:
    """Return [count, sum of the entries over the positions], for matrices [M, ...] (M = 1 when static)."""
    total = matrices.detach().sum(0, dtype=wide(matrices.device)).flatten()
    return torch.cat([torch.full_like(total[:1], matrices.shape[0]), total])


def spaced_streams(streams: Tensor, limit: int) -> Tensor:
    """Return [M, S, D] of streams [B, T..., S, D] at M evenly spaced positions, at most `limit`."""
    flat = streams.reshape(-1, *streams.shape[-2:])
    return flat[:: -(-flat.shape[0] // limit)]


def stream_cosine_sums(streams: Tensor, limit: int) -> Tensor:
    """Return [positions, sum of the mean cosine between two different streams], streams [B, T..., S, D].

    mean over i != j of u_i . u_j = (|sum_i u_i|^2 - S) / (S (S - 1)); at most `limit` evenly spaced positions.
    """
    flat = spaced_streams(streams.detach(), limit).float()
    count = flat.shape[1]
    total = functional.normalize(flat, dim=-1).sum(1)
    mean = (torch.linalg.vecdot(total, total) - count) / max(1, count * (count - 1))
    return torch.stack([torch.full_like(mean[0], flat.shape[0]), mean.sum()]).to(wide(flat.device))


def stream_energies(streams: Tensor, limit: int) -> Tensor:
    """Return [S], the sum of squares of each stream of [B, T..., S, D], at most `limit` evenly spaced positions."""
    flat = spaced_streams(streams.detach(), limit).to(wide(streams.device))
    energies: Tensor = torch.linalg.vecdot(flat, flat).sum(0)
    return energies
