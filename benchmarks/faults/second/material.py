"""Data and small tools of the programs: digits, a small grammar's text, minibatches, scoring."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's handwritten digits: images (N, 1, 8, 8) in [0, 1] and labels, 1,400 to train, 397 held out."""
    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(bunch.target)
    order = torch.tensor(np.random.default_rng(7).permutation(len(y)))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def minibatches(n: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """`steps` batches of indices below `n`, epoch by epoch in a fresh order; a last incomplete batch is dropped."""
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for chunk in torch.randperm(n, generator=generator).split(size):
            if len(chunk) < min(size, n):
                break
            yield chunk
            done += 1
            if done == steps:
                return


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of rows that `model`, in eval mode and without a graph, puts in their class."""
    was = model.training
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(-1) == y).float().mean().item()
    model.train(was)
    return right


ALPHABET = " .abcdefghijklmnopqrstuvwxyz"
_SUBJECTS = ["the cat", "a dog", "my neighbour", "the old man", "every child", "no bird", "the quiet teacher"]
_VERBS = ["sees", "likes", "follows", "paints", "forgets", "hears"]
_OBJECTS = ["the river", "a small house", "bread", "two apples", "the long road", "music", "her garden"]
_TAILS = ["", "", " at night", " in the rain", " with care"]


@functools.cache
def text(length: int = 40_000) -> Tensor:
    """Character indices (length,) into `ALPHABET` of sentences drawn from a grammar of four slots."""
    rng = np.random.default_rng(3)
    parts: list[str] = []
    size = 0
    while size < length:
        sentence = f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}{rng.choice(_TAILS)}. "
        parts.append(sentence)
        size += len(sentence)
    return torch.tensor([ALPHABET.index(letter) for letter in "".join(parts)[:length]])


def windows(length: int, batch: int, generator: torch.Generator) -> Tensor:
    """Random windows (batch, length) of `text`."""
    data = text()
    starts = torch.randint(0, len(data) - length, (batch,), generator=generator)
    return torch.stack([data[start : start + length] for start in starts])
