"""Additive statistics of hidden states and gradients: pure functions `Tensor -> vector of sums`.

Axis letters: B batch, T tokens or positions, D features, N sampled positions (N <= B*T), L depth.

Everything is a sum (of squares, counts, cosines, counts in logarithmic buckets), so that micro-batches, repeated calls
and ranks combine by addition; `point_metrics` turns sums into means, norms and quantiles on the host. Sums of squares
are fp64: squares of gradients near 1e-22 vanish in fp32 (measured in the first steps of a plain RNN).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EARLIER = 1024.0
"""A bad call weighs so much more than the next one: of a sum over ranks (fewer than that) the first can be read off."""
CALLS_APART = 100
"""So many calls of a point are told apart: beyond, a weight is no number any more."""
OCTAVES_BELOW = 20
"""1 - cos is resolved down to 2^-20; what is smaller falls into bucket 0."""
BUCKETS_PER_OCTAVE = 4
BUCKETS = (OCTAVES_BELOW + 1) * BUCKETS_PER_OCTAVE + 1

# Columns of one row of the deposit buffer: norms, then what is compared with other points, from TO_INPUT on.
SQUARE, NONFINITE, ELEMENTS, CALL_BAD = 0, 1, 2, 3
GRAD_SQUARE, GRAD_NONFINITE, BACKWARDS, GRAD_CALL_BAD = 4, 5, 6, 7
TO_INPUT, TO_INPUT_COUNT, TOKEN, TOKEN_COUNT, BRANCH_SQUARE, CARRY_SQUARE = 8, 9, 10, 11, 12, 13
SAMPLE, SAMPLE_COUNT = 14, 15
HISTOGRAM = 16
COLUMNS = HISTOGRAM + BUCKETS


@dataclass(frozen=True)
class Positions:
    """A sample of the positions of one hidden state, kept for the statistics between points.

    Attributes:
        values: [N, D] fp32, detached, N = sequences * tokens.
        sequences: how many sequences the N positions come from; 0 where the activation has no token axis.
        extent: (B, T) of the whole state: in a state of another extent (after a stride), position n is another place.
        samples: how many of the B samples the N positions come from, equally many of each, one sample after another.
    """

    values: Tensor
    sequences: int
    extent: tuple[int, int]
    norms: Tensor | None = None
    samples: int = 0

    @property
    def norm(self) -> Tensor:
        """[N] the norms of the values (on the host most are computed for many points at once, elsewhere)."""
        return lengths(self.values) if self.norms is None else self.norms

    def alike(self, other: Positions | None) -> Positions | None:
        """Return `other` where its positions are the same places and as wide, else None."""
        same = other is not None and other.extent == self.extent and other.values.shape == self.values.shape
        return other if same else None


def lengths(values: Tensor) -> Tensor:
    """Return the norms [..., N] of vectors [..., N, D]."""
    norms: Tensor = torch.linalg.vecdot(values, values).sqrt()
    return norms


def wide(device: torch.device) -> torch.dtype:
    """The accumulation type: fp64, or fp32 where the device has no fp64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_single(x: Tensor) -> Tensor:
    """Return real x as it is in fp32 and fp64, in which its small differences survive, else in fp32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off for our own arithmetic, where it is on (entering the context costs more than asking)."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else contextlib.nullcontext()


def feature_last(x: Tensor, axis: int) -> Tensor:
    """Return x as [B, T, D]: features (at `axis`) last, all positions between batch and features in one axis."""
    if axis not in (-1, x.dim() - 1):
        x = x.movedim(axis, -1)
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(x: Tensor) -> Tensor:
    """Return a view of the bits of real x as whole numbers of the same size."""
    return x.view(_INTEGERS[x.element_size()])


def real(x: Tensor) -> Tensor:
    """Return complex x [...] as its real and imaginary parts [..., 2], real x as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def real_features(states: Tensor) -> Tensor:
    """Return [..., D] with each complex feature as two real ones; real states as they are."""
    return real(states).flatten(-2) if states.is_complex() else states


def spaced(states: Tensor, limit: int) -> Tensor:
    """Return states [B, T, D] where B*T <= limit, else a view of about limit / 2 positions of them, evenly spaced."""
    batch, tokens = states.shape[0], states.shape[1]
    if batch * tokens <= limit:
        return states
    limit = max(2, limit // 2)
    rows = max(1, min(batch, limit // min(tokens, max(2, limit // batch))))
    return states[:: -(-batch // rows), :: max(1, -(-tokens * rows // limit))]


def sample_positions(x: Tensor, axis: int, limit: int, *, sequence: bool) -> Positions:
    """Return all positions of x where B*T <= limit (statistics are then exact), else about limit / 2 of them, evenly.

    Args:
        x: hidden state, batch first; features at `axis`.
        axis: the feature axis.
        limit: largest number of positions.
        sequence: whether the positions between batch and features are tokens of a sequence.
    """
    states = real_features(feature_last(x.detach(), axis))
    batch, tokens = states.shape[0], states.shape[1]
    states = spaced(states, limit)
    sequences = states.shape[0] if sequence and states.shape[1] > 1 else 0
    # always a copy: an in-place operation after the point must not change what was seen, nor the copy keep x alive
    values = states.to(torch.float32, copy=True).reshape(-1, states.shape[-1])
    return Positions(values, sequences, (batch, tokens), None if is_host(x) else lengths(values), states.shape[0])


Sums = Tensor | NDArray[np.float64] | tuple[float, ...]
"""Sums of one deposit: on the host as numbers (eager CPU, where reading waits for nothing), else a tensor."""
FP32_SAFE = (1e-15, 1e15)
"""Norms in this range are right to fp32 rounding; outside it, squares of entries under- or overflow fp32."""
FP32_ENTRIES = 1 << 16
"""Up to so many entries an fp32 norm is within 3e-6 (measured, heavy tails); at 2^23 it is off by 2e-4."""
ROW = 4096
"""Of larger tensors fp32 norms of rows of so many entries are joined in fp64, which is 4 to 25 times as fast as fp64
throughout and within 1e-7 (measured)."""


def is_host(x: Tensor) -> bool:
    """Whether x can be read without waiting and without breaking a graph: on the CPU, not being compiled."""
    return x.is_cpu and not torch.compiler.is_compiling()


def host_norm(x: Tensor) -> float:
    """Return the norm of a tensor on the host with the exactness of fp64 accumulation, in fp32 where that is enough."""
    if x.dtype == torch.float32 and x.numel() <= FP32_ENTRIES:
        norm: float = torch.linalg.vector_norm(x).item()
        if FP32_SAFE[0] < norm < FP32_SAFE[1]:
            return norm
    elif x.dtype == torch.float32 and x.is_contiguous():
        norm = _norm_in_rows(x.view(-1))
        # a row below the safe range adds nothing to a norm that is far above it
        if 1e3 * FP32_SAFE[0] < norm < FP32_SAFE[1]:
            return norm
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _norm_in_rows(flat: Tensor) -> float:
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:]).item()
    return math.hypot(float(torch.linalg.vector_norm(rows, dtype=torch.float64)), rest)


def head(x: Tensor, third: float, weight: float = 0.0) -> Sums:
    """Return [4]: the fp64 sum of squares of x, the number of its non-finite entries, and the constant `third`.

    Last comes `weight` where an entry is not finite, else 0 (`weight_of_call`). The count is of x - x, which is 0 or
    NaN. On the host it is only made where the norm is not finite: fp64 squares of fp32 entries cannot overflow.
    """
    x = real(x)
    if is_host(x):
        norm = host_norm(x)
        safe = math.isfinite(norm) and x.dtype != torch.float64
        count = 0.0 if safe else float(torch.count_nonzero(x - x))
        return norm * norm, count, third, weight * (count > 0)
    wide_norm = torch.linalg.vector_norm(x, dtype=wide(x.device))
    nonfinite = torch.count_nonzero(x - x).to(wide_norm.dtype)
    return torch.stack([wide_norm * wide_norm, nonfinite, torch.full_like(wide_norm, third), (nonfinite > 0) * weight])


def weight_of_call(call: int) -> float:
    """The weight of a point's call, counted from 1: sums of them show the first (`first_of_calls`)."""
    return EARLIER ** -min(call - 1, CALLS_APART)


def first_of_calls(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first call in each of some sums of weights, over calls and ranks; NaN where there is none."""
    with np.errstate(divide="ignore"):
        calls = 1 - np.floor(np.log2(sums) / math.log2(EARLIER))
    return np.where(sums > 0, calls, np.nan)


def nonfinite_count(x: Tensor) -> Tensor:
    """Return [1] the number of non-finite entries of x."""
    return torch.count_nonzero(x - x).reshape(1)


def nonfinite_sum(x: Tensor) -> Tensor | None:
    """Return [1] the number of non-finite entries of x; None where x is on the host and holds none."""
    if is_host(x) and math.isfinite(abs(x.sum().item())):
        return None  # a finite sum has no infinite or NaN term; one that is not may only have overflowed
    return nonfinite_count(x)


def token_cosines(states: Tensor, norms: Tensor) -> Tensor:
    """Return [G] the mean cosine between two different tokens of each sequence; NaN where it has under two.

    A token that is exactly zero (padding that the embedding masks) has no direction and does not count.

    Args:
        states: [G, T, D].
        norms: [G, T] of the tokens.
    """
    present = norms > 0
    weights = torch.where(present, norms.reciprocal(), 0.0)
    total = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
    count = present.sum(1)
    means: Tensor = (torch.linalg.vecdot(total, total) - count) / (count * (count - 1))
    return means


def sample_cosines(states: Tensor, samples: int) -> Tensor:
    """Return [G] the mean cosine between two different samples of each state [G, N, D], positions averaged before."""
    pooled = states.reshape(states.shape[0], samples, -1, states.shape[-1]).mean(2)
    return token_cosines(pooled, lengths(pooled))


LOWEST = -OCTAVES_BELOW - 1.0 / BUCKETS_PER_OCTAVE
"""Where bucket 0 begins, in octaves; what is smaller is moved into it."""


def cosine_buckets(one_minus_cosine: Any) -> Any:
    """Return counts [BUCKETS] of 1 - cos [N]: bucket 0 below 2^-20, then 4 an octave up to 2; NaN is not counted.

    Takes and returns a tensor, or a numpy array on the host.
    """
    if isinstance(one_minus_cosine, Tensor):
        octave = torch.log2(one_minus_cosine.clamp(2.0 ** (LOWEST + 1e-3), 2.0))
        return torch.histc(torch.nan_to_num(octave, nan=9.0), BUCKETS, LOWEST, 1.0)
    return np.bincount(bucket_index(one_minus_cosine), minlength=BUCKETS + 1)[:BUCKETS]


def bucket_index(one_minus_cosine: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Return the bucket of every entry, BUCKETS for what is not finite."""
    valid = np.isfinite(one_minus_cosine)
    octave = np.log2(np.clip(np.where(valid, one_minus_cosine, 1.0), 2.0 ** (LOWEST + 1e-3), 2.0))
    index = np.minimum(((octave - LOWEST) * BUCKETS_PER_OCTAVE).astype(np.int64), BUCKETS - 1)
    return np.where(valid, index, BUCKETS)


def depth_statistics(before: Positions | None, now: Positions, origin: Positions | None) -> Sums:
    """Return the columns TO_INPUT .. end of a row for a point `now` that follows the point `before`.

    1 - cos(a, b) = (|b - a|^2 - (|a| - |b|)^2) / (2 |a| |b|), exact for near-equal vectors where 1 - a.b/|a||b| is not.
    Products of whole vectors are torch's; what is left, a few operations on [N], is numpy's on the host.

    Args:
        before: the previous point's positions, None at the first point or where widths differ.
        now: this point's positions.
        origin: the positions of x_0, None where unknown or of another width.
    """
    inverse = now.norm.reciprocal()
    products: dict[str, Tensor] = {"norm": now.norm, "inverse": inverse}
    if origin is not None:
        products |= {"to_input": torch.linalg.vecdot(origin.values, now.values), "origin": origin.norm}
    if now.sequences:
        shape = now.sequences, now.values.shape[0] // now.sequences
        products["token"] = token_cosines(now.values.view(*shape, -1), now.norm.view(shape))
    if now.samples > 1:
        products["sample"] = sample_cosines(now.values.unsqueeze(0), now.samples)
    if before is not None:
        difference = now.values - before.values
        products |= {"square": torch.linalg.vecdot(difference, difference), "before": before.norm}
    if is_host(now.values):
        with np.errstate(all="ignore"):
            scalars, histogram = _combined(np, {name: product.numpy() for name, product in products.items()})
        return np.concatenate([scalars, np.zeros(BUCKETS) if histogram is None else histogram])
    scalars, histogram = _combined(torch, products)
    zero = now.norm.new_zeros(())
    parts = [torch.stack([part if isinstance(part, Tensor) else zero for part in scalars])]
    return torch.cat([*parts, zero.expand(BUCKETS) if histogram is None else histogram])


def _combined(xp: Any, products: dict[str, Any]) -> tuple[list[Any], Any]:
    """The columns before the buckets and the buckets (None: no previous point), for torch and numpy alike."""
    row: list[Any] = [0.0] * HISTOGRAM

    def add(total: int, count: int, values: Any) -> None:
        """Sum and count of the finite entries."""
        valid = xp.isfinite(values)
        row[total], row[count] = xp.where(valid, values, 0.0).sum(), valid.sum()

    if "to_input" in products:
        add(TO_INPUT, TO_INPUT_COUNT, products["to_input"] * (products["inverse"] / products["origin"]))
    if "token" in products:
        add(TOKEN, TOKEN_COUNT, products["token"])
    if "sample" in products:
        add(SAMPLE, SAMPLE_COUNT, products["sample"])
    if "square" not in products:
        return row[TO_INPUT:], None
    square, before = products["square"], products["before"]
    row[BRANCH_SQUARE], row[CARRY_SQUARE] = square.sum(), (before * before).sum()
    gap = products["norm"] - before
    one_minus_cosine = (square - gap * gap) * products["inverse"] / (2.0 * before)
    return row[TO_INPUT:], cosine_buckets(one_minus_cosine)
