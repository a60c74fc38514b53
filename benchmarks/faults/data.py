"""The data: small sets of scikit-learn, a Markov chain, the adding problem. Nothing is downloaded.

Axis letters: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits, make_blobs, make_circles
from torch import Tensor

from benchmarks.faults.case import Batch

Split = tuple[Batch, Batch]


@lru_cache
def digits() -> Split:
    """8x8 digits over 16, [1400, 64] and [397, 64], the same split always."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    data = torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])
    return (data[0][:1400], data[1][:1400]), (data[0][1400:], data[1][1400:])


def images() -> Split:
    """The digits as [B, 1, 8, 8]."""
    (x, y), (xt, yt) = digits()
    return (x.view(-1, 1, 8, 8), y), (xt.view(-1, 1, 8, 8), yt)


@lru_cache
def circles() -> Split:
    """Two rings in the plane, labels 0 and 1 as floats [B, 1]."""
    x, y = make_circles(1000, noise=0.18, factor=0.4, random_state=0)
    points, label = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32).view(-1, 1)
    return (points[:800], label[:800]), (points[800:], label[800:])


@lru_cache
def blobs(*, raw: bool = False) -> Split:
    """Three clouds in the plane, z-scored or as they are (coordinates up to 15)."""
    x, y = make_blobs(1000, centers=3, cluster_std=1.5, random_state=5 if raw else 3)
    if not raw:
        x = (x - x.mean(0)) / x.std(0)
    points, label = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return (points[:800], label[:800]), (points[800:], label[800:])


@lru_cache
def diabetes(*, raw: bool = False) -> Split:
    """Ten measurements and the progression; z-scored and scaled to [0, 1], or as they are."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    if not raw:
        x, y = (x - x.mean(0)) / x.std(0), (y - y.min()) / (y.max() - y.min())
    order = np.random.default_rng(0).permutation(len(x))
    inputs, target = torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order], dtype=torch.float32)
    return (inputs[:350], target[:350].view(-1, 1)), (inputs[350:], target[350:].view(-1, 1))


def adding(batch: int, length: int, seed: int) -> Iterator[Batch]:
    """The adding problem: [B, T, 2] values and two marks, target the sum of the marked values [B, 1]."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(batch)
    while True:
        values = torch.rand(batch, length, generator=generator)
        marks = torch.zeros(batch, length)
        marks[rows, torch.randint(length // 2, (batch,), generator=generator)] = 1
        marks[rows, torch.randint(length // 2, length, (batch,), generator=generator)] = 1
        yield torch.stack([values, marks], -1), (values * marks).sum(1, keepdim=True)


VOCABULARY = 16


@lru_cache
def transitions() -> Tensor:
    """Rows of a Markov chain over 16 words: 1.3 nats with the last word known, 2.5 without."""
    return torch.tensor(np.random.default_rng(0).dirichlet([0.12] * VOCABULARY, VOCABULARY), dtype=torch.float32)


def markov(batch: int, length: int, seed: int, lag: int = 1) -> Iterator[Batch]:
    """Words and next words, both [B, T]; each depends on the one `lag` before it."""
    generator = torch.Generator().manual_seed(seed)
    table = transitions().cumsum(1)
    while True:
        words = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
        chance = torch.rand(batch, length + 1, 1, generator=generator)
        for t in range(lag, length + 1):
            words[:, t] = (table[words[:, t - lag]] < chance[:, t]).sum(1).clamp(max=VOCABULARY - 1)
        yield words[:, :-1], words[:, 1:]
