"""`kromhc`: residual mappings that are Kronecker products of small doubly stochastic ones (arXiv 2601.21579).

Axis letters: M = all of B and T flattened, S streams (n of them).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor

from flowscope.merging.manifold import ManifoldConnection, ManifoldSite
from flowscope.merging.permutations import mean_permutation, permutations
from flowscope.merging.streams import StreamOptions

LARGEST = 5
"""The largest prime factor of the number of streams: of a factor p, p! permutations are mixed."""


class KroneckerOptions(StreamOptions):
    """Manifold-constrained hyper-connections whose mixing is a Kronecker product."""

    starting = ("init_identity",)
    init_identity: float = Field(8.0, description="first logit of the identity over those of the other permutations")

    @field_validator("streams")
    @classmethod
    def _factors(cls, streams: int) -> int:
        if max(prime_factors(streams), default=1) > LARGEST:
            raise ValueError(f"expected a product of 2, 3 and 5 (a power of 2 in the paper), got {streams}")
        return streams


def prime_factors(n: int) -> list[int]:
    """Return the prime factors of n, ascending: 12 -> [2, 2, 3]; none of 1."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors


def kronecker(one: Tensor, other: Tensor) -> Tensor:
    """Return the Kronecker products [A*B, A*B, M] of matrices [A, A, M] and [B, B, M]."""
    a, b = one.shape[0], other.shape[0]
    product = one[:, None, :, None] * other[None, :, None, :]
    return product.reshape(a * b, a * b, -1)


class KroneckerSite(ManifoldSite):
    """Coefficients of one site as those of `mhc`, with p! logits for each prime factor p of n, one after the other."""

    def first_mixing(self, options: Any) -> Tensor:
        """Return the first logits of all factors: each one's identity above its others by `init_identity`."""
        self.factors = prime_factors(self.streams)
        for p in set(self.factors):
            self.register_buffer(f"matrices_{p}", permutations(p), persistent=False)
        parts = [torch.zeros(math.factorial(p)) for p in self.factors]
        for part in parts:
            part[0] = options.init_identity
        return torch.cat(parts) if parts else torch.zeros(0)

    def mixing(self, logits: Tensor) -> Tensor:
        """Return U_1 x ... x U_K, each U_k the mean of the permutations of its factor."""
        product = logits.new_ones(1, 1, logits.shape[1])
        sizes = [math.factorial(p) for p in self.factors]
        for p, part in zip(self.factors, torch.split_with_sizes(logits, sizes), strict=True):
            product = kronecker(product, mean_permutation(part, getattr(self, f"matrices_{p}")))
        return product


class KroneckerConnection(ManifoldConnection):
    """`x_{k+1} = Hres x_k + Hpost^T f(Hpre x_k)` as `mhc`, with Hres a Kronecker product of doubly stochastic factors.

    Hres = U_1 x ... x U_K over the prime factors of n (2 x 2 where n is a power of 2), each U_k a mean of permutations:
    exactly doubly stochastic, with 2K logits in the place of n^2 (`mhc`) or n! (`mhc-lite`). One scale `a` for all
    factors. It cannot mix any two streams alone: a factor acts on all pairs that differ in its digit. Starts equal to
    the original, as `mhc` does.
    """

    mode = "kromhc"
    Options = KroneckerOptions
    Site = KroneckerSite
