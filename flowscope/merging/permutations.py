"""`mhc-lite`: residual mappings that are doubly stochastic exactly, as means of permutations (arXiv 2601.05732).

Axis letters: M = all of B and T flattened, S streams (n of them), R = n! permutations.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from flowscope.merging.manifold import ManifoldConnection, ManifoldSite
from flowscope.merging.streams import StreamOptions


class PermutationOptions(StreamOptions):
    """Manifold-constrained hyper-connections without iterations."""

    starting = ("init_identity",)
    streams: int = Field(4, ge=1, le=5, description="number of residual streams n; n! permutations are mixed")
    init_identity: float = Field(8.0, description="first logit of the identity over those of the other permutations")


@functools.cache
def permutations(n: int) -> Tensor:
    """Return the permutation matrices [n!, n, n], the identity first; on the host."""
    return torch.eye(n)[torch.tensor(list(itertools.permutations(range(n))))]


def mean_permutation(logits: Tensor, matrices: Tensor) -> Tensor:
    """Return sum_r softmax(logits)_r P_r, [S, S, M] of logits [R, M] and matrices [R, S, S]."""
    n = matrices.shape[-1]
    flat = matrices.flatten(1).to(device=logits.device, dtype=logits.dtype)
    return (flat.t() @ torch.softmax(logits, 0)).view(n, n, -1)


class PermutationSite(ManifoldSite):
    """Coefficients of one site as those of `mhc`, with R = n! logits of the residual mapping."""

    matrices: Tensor

    def first_mixing(self, options: Any) -> Tensor:
        """Return [n!] logits: the identity's above the others by `init_identity`."""
        self.register_buffer("matrices", permutations(self.streams), persistent=False)
        first = torch.zeros(len(self.matrices))
        first[0] = options.init_identity
        return first

    def mixing(self, logits: Tensor) -> Tensor:
        """Return sum_r softmax(logits)_r P_r."""
        return mean_permutation(logits, self.matrices)


class PermutationConnection(ManifoldConnection):
    """`x_{k+1} = Hres x_k + Hpost^T f(Hpre x_k)` as `mhc`, with Hres = sum_r a_r P_r, a = softmax over n! permutations.

    By the theorem of Birkhoff and von Neumann each doubly stochastic matrix is such a mean, and each such mean is
    doubly stochastic: no Sinkhorn iterations, no error in the columns. The number of parameters grows with n!: for more
    than 5 streams see `kromhc`. Starts equal to the original, as `mhc` does.
    """

    mode = "mhc-lite"
    Options = PermutationOptions
    Site = PermutationSite
