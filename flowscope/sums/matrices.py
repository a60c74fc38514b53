"""Numbers that are not sums: effective rank and the cosines between all points. Slow schedule, computed on the host.

Axis letters: N positions, D features, P points.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def effective_rank_of_gram(gram: Tensor) -> float:
    """Return the effective rank of a matrix [N, D] from its fp64 Gram matrix [N, N], of rows or columns alike.

    From 1 (one direction) to min(N, D) (isotropic): exp(-sum p log p) with p = sigma / sum(sigma) over the singular
    values of the uncentred matrix (Roy & Vetterli 2007; RankMe, Garrido et al. 2023, without its 1e-7 inside the
    logarithm). They are roots of the eigenvalues; those under 1e-7 of the largest or so are rounding and count as zero.
    0.0 for a matrix of zeros, NaN where an entry is not finite.
    """
    if not bool(gram.isfinite().all()):
        return math.nan
    eigenvalues = torch.linalg.eigvalsh(gram)
    floor = gram.shape[0] * torch.finfo(torch.float64).eps * eigenvalues[-1]
    if not float(eigenvalues[-1]) > 0.0:
        return 0.0
    sigma = eigenvalues[eigenvalues > floor].sqrt()
    p = sigma / sigma.sum()
    return float(torch.exp(-(p * p.log()).sum()))


def cosine_matrix(x: Tensor) -> NDArray[np.float64]:
    """Return [P, P]: the cosine between two points of `x` [P, N, D], mean over the N positions, within [-1, 1].

    A position where either vector is zero or not finite is left out of that pair's mean; NaN where none is left.
    """
    points = x.detach().cpu().to(torch.float64)
    # by the largest entry first: squares of fp64 values may overflow
    scale = points.abs().amax(dim=-1, keepdim=True)
    seen = (scale > 0) & scale.isfinite()
    units = torch.where(seen, points / scale, 0.0)
    units = torch.where(seen, units / units.norm(dim=-1, keepdim=True), 0.0).flatten(1)
    pairs = seen.flatten(1).to(torch.float64)
    counts = pairs @ pairs.T
    mean = torch.where(counts > 0, (units @ units.T / counts).clamp(-1.0, 1.0), math.nan)
    return mean.numpy()
