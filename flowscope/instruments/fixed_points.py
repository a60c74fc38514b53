"""How far a map is from its fixed point, and whether it contracts there: what is measured at a deep equilibrium layer.

Axis letters: B batch, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowscope.hooks.hooks import masked
from flowscope.model.structure import keeps_statistics
from flowscope.sums.statistics import full_precision

ITERATIONS = 40
"""Products with the transposed Jacobian; the growth over the last half of them is the estimate."""


def relative_residual(z: Tensor, image: Tensor) -> Tensor:
    """Return |f(z) - z| / |f(z)| over the whole batch, a 0-d tensor (NaN where f(z) is 0)."""
    with torch.no_grad(), full_precision(z):
        z, image = z.detach(), image.detach()
        wide = torch.promote_types(torch.float32, image.dtype)
        ratio: Tensor = torch.linalg.vector_norm(image.to(wide) - z.to(wide)) / torch.linalg.vector_norm(image.to(wide))
        return ratio


def spectral_radius(z: Tensor, image: Tensor, generator: torch.Generator) -> Tensor:
    """Return an estimate of the spectral radius of df/dz, a 0-d tensor, from the graph of `image` = f(z).

    Power iteration with the transposed Jacobian, which has the same eigenvalues: (|v_n| / |v_m|)^(1 / (n - m)) with
    n = 40 and m = 20. A pair of complex eigenvalues lets single norms oscillate, their growth over many steps does not.
    For samples that do not see each other it is the largest of their radii. Exactly 0 where the map ends in 0.

    Args:
        z: the point, [B, ..., D], with gradient.
        image: f(z), of the same shape; its graph is kept.
        generator: draws the first vector, so that the training's random numbers stay as they are.
    """
    v = torch.randn(image.shape, generator=generator, device=image.device, dtype=torch.float32).to(image.dtype)
    v = v / torch.linalg.vector_norm(v)
    growth = torch.zeros((), device=image.device)
    half = ITERATIONS // 2
    with masked():
        for k in range(ITERATIONS):
            (v,) = torch.autograd.grad(image, z, v, retain_graph=True, allow_unused=True, materialize_grads=True)
            norm = torch.linalg.vector_norm(v.float())
            if k >= half:
                growth = growth + norm.log()
            v = v / norm.clamp_min(torch.finfo(torch.float32).tiny).to(v.dtype)
    return (growth / (ITERATIONS - half)).exp()


def may_be_differentiated_again(module: nn.Module) -> bool:
    """Whether extra backward passes through a module change nothing: no hooks of others in backward, no statistics.

    A checkpoint inside it is recomputed, which BatchNorm would count as a further batch; FSDP gathers weights.
    """
    for child in module.modules():
        foreign: Any = (child._backward_hooks, child._backward_pre_hooks)
        if any(foreign) or keeps_statistics(child) or "FSDP" in type(child).__name__:
            return False
    return True
