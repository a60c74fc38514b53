"""The product with normalised rows that every generated coefficient starts from, in one pass each way.

Axis letters: R rows (positions, or positions times streams), K outputs, D features of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def project_normalised(rows: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """Return weight @ norm(rows)^T: rows [R, D], weight [K, D] -> [K, R].

    norm is LayerNorm (`centred`) or RMSNorm without affine part: a shift and a scale per row. Both are applied to the
    small product, ((h - mean) / std) w = (h w') / std with w' = w - mean(w), so no normalised copy of the rows is made
    or kept. Differentiable twice and in forward mode. Autograd's own rules would do as well, but take 30 nodes and make
    three tensors of the rows' size in backward where one is enough.
    """
    if torch.compiler.is_compiling():  # dynamo traces no Function with a forward-mode rule, and fuses the plain form
        return _forward(rows, weight, eps, centred)[0]
    logits: Tensor = _NormalisedProduct.apply(rows, weight, eps, centred)[0]  # type: ignore[no-untyped-call]
    return logits


def centre(weight: Tensor, centred: bool) -> Tensor:
    """Return the rows of a weight less their means where the norm is `centred`."""
    return weight - weight.mean(-1, keepdim=True) if centred else weight


def _forward(rows: Tensor, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [K, R], 1/std [R], mean [R] (0 where not centred)."""
    norm = torch.linalg.vector_norm(rows, dim=-1)
    square = norm * norm / rows.shape[-1]
    mean = rows.mean(-1) if centred else torch.zeros_like(square)
    variance = (square - mean * mean).clamp_min(0.0) if centred else square
    inverse = torch.rsqrt(variance + eps)
    return (centre(weight, centred) @ rows.t()) * inverse, inverse, mean


class _NormalisedProduct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(rows, weight, eps, centred)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float, bool], output: tuple[Tensor, ...]) -> None:
        rows, weight, _, ctx.centred = inputs
        ctx.save_for_backward(rows, weight, *output)
        ctx.save_for_forward(rows, weight, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inverse: Tensor, grad_mean: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, logits, inverse, mean = ctx.saved_tensors
        d = rows.shape[-1]
        grad_product = grad * inverse
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            # d inverse = -inverse^3/2 d variance, d variance = 2/D (rows - mean) d rows
            slope = ((grad * logits).sum(0) + grad_inverse * inverse) * inverse * inverse / -d
            grad_rows = grad_product.t() @ centre(weight, ctx.centred)
            grad_rows.addcmul_(rows, slope.unsqueeze(-1))
            if ctx.centred:
                grad_rows.add_((grad_mean / d - slope * mean).unsqueeze(-1))
        if ctx.needs_input_grad[1]:
            grad_weight = centre(grad_product @ rows, ctx.centred)
        return grad_rows, grad_weight, None, None

    @staticmethod
    def jvp(ctx: Any, t_rows: Tensor, t_weight: Tensor, *_: None) -> tuple[Tensor, Tensor, Tensor]:
        rows, weight, logits, inverse, mean = ctx.saved_tensors
        centred = ctx.centred
        t_variance = ((rows - mean.unsqueeze(-1)) * t_rows).mean(-1) * 2.0
        t_inverse = -0.5 * inverse**3 * t_variance
        t_product = centre(t_weight, centred) @ rows.t() + centre(weight, centred) @ t_rows.t()
        t_mean = t_rows.mean(-1) if centred else torch.zeros_like(mean)
        return t_product * inverse + logits * (t_inverse / inverse), t_inverse, t_mean
