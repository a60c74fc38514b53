"""The read of a dynamic hyper-connection in one pass each way: norm, generator, coefficients, both mixtures.

Axis letters: M positions, S streams (n), K = n + 2 rows of coefficients (read, n of the residual, write), D features,
R = M*S.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from flowscope.merging.projection import centre
from flowscope.sums.statistics import full_precision

Mixed = tuple[Tensor, Tensor, Tensor, Tensor]
EPS = 1e-5  # added to the variance


def read_and_mix(h: Tensor, weight: Tensor, static: Tensor, scale: Tensor, centred: bool, tanh: bool) -> Mixed:
    """Return read h [M, 1, D], residual h [M, S, D], both mixing matrices [M, 1 + S, S], write [M, S, 1].

    coefficients = static + scale * tanh(weight norm(h)), norm = LayerNorm (`centred`) or RMSNorm without affine part.
    Differentiable twice and in forward mode; not for torch.compile, which fuses the plain form better than this.
    Autograd's own rules take 60 nodes and go over the streams twice as often: every pass counts where a branch is
    small.

    Args:
        h: the streams, [M, S, D].
        weight: generator, [K, D].
        static: [K, S].
        scale: of the read, the residual and the write, [3], or of the first two together and the write, [2].
        centred: LayerNorm, else RMSNorm.
        tanh: else the logits themselves.
    """
    outputs: tuple[Tensor, ...] = _ReadAndMix.apply(h, weight, static, scale, centred, tanh)  # type: ignore[no-untyped-call]
    return outputs[0], outputs[1], outputs[2], outputs[3]


def _of_rows(scale: Tensor, n: int) -> Tensor:
    """Return the scale of the first n + 1 rows of coefficients, to be multiplied with [n + 1, ...]."""
    return scale[0] if scale.shape[0] == 2 else torch.cat([scale[:1], scale[1:2].expand(n)]).view(n + 1, 1, 1)


def _present(grad: Tensor | None, like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    return like.new_zeros(like.shape if shape is None else shape) if grad is None else grad


def _grad_scale(grad: Tensor, scale: Tensor) -> Tensor:
    """Return the sums of [n + 2, ...] over the rows that share a scale."""
    n = grad.shape[0] - 2
    sizes = [n + 1, 1] if scale.shape[0] == 2 else [1, n, 1]
    return torch.stack([part.sum() for part in torch.split_with_sizes(grad, sizes)])


def _backward(ctx: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of h, weight, static and scale, from those of all outputs of `_ReadAndMix`."""
    h, weight, scale, mix, logits, values, inverse, mean = saved
    grad_read, grad_residual, grad_mix, grad_write, grad_logits, grad_values, grad_inverse, grad_mean = grads
    m, n, d = h.shape
    grad_read = _present(grad_read, h, (m, 1, d))
    grad_residual = _present(grad_residual, h)
    both = torch.cat([grad_read, grad_residual], 1)
    matrices = torch.bmm(both, h.transpose(1, 2))
    if grad_mix is not None:
        matrices = matrices + grad_mix
    every = torch.cat([matrices.transpose(0, 1), _present(grad_write, h, (m, n, 1)).view(1, m, n)])

    # the coefficients: static + scale * values, values = tanh(logits)
    grad_static = every.sum(1) if ctx.needs_input_grad[2] else None
    grad_scale = _grad_scale(every * values.view(n + 2, m, n), scale) if ctx.needs_input_grad[3] else None
    grad = torch.cat([every[: n + 1] * _of_rows(scale, n), every[n + 1 :] * scale[-1]]).view(n + 2, m * n)
    if grad_values is not None:
        grad = grad + grad_values
    if ctx.tanh:
        grad = torch.ops.aten.tanh_backward(grad, values)
    if grad_logits is not None:
        grad = grad + grad_logits
    grad_product = grad * inverse

    # d inverse = -inverse^3/2 d variance, d variance = 2/D (rows - mean) d rows
    slope = (grad_product * logits).sum(0)
    if grad_inverse is not None:
        slope = slope + grad_inverse * inverse * inverse
    slope = slope * inverse * (-1.0 / d)
    rows = h.reshape(m * n, d)
    grad_weight = centre(grad_product @ rows, ctx.centred) if ctx.needs_input_grad[1] else None
    if not ctx.needs_input_grad[0]:
        return None, grad_weight, grad_static, grad_scale, None, None
    # In place only on what depends on every gradient: vmap allows no other.
    grad_h = torch.bmm(mix.transpose(1, 2), both)
    grad_rows = grad_h.view(m * n, d)
    grad_rows.addmm_(grad_product.t(), centre(weight, ctx.centred))
    grad_rows.addcmul_(rows, slope.unsqueeze(-1))
    if ctx.centred:
        shift = slope * mean
        grad_rows.sub_((shift if grad_mean is None else shift - grad_mean / d).unsqueeze(-1))
    return grad_h, grad_weight, grad_static, grad_scale, None, None


class _ReadAndMix(torch.autograd.Function):
    """Further outputs, for the second derivatives: logits [K, R], values [K, R] (tanh), 1/std [R], mean [R]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        h: Tensor, weight: Tensor, static: Tensor, scale: Tensor, centred: bool, tanh: bool
    ) -> tuple[Tensor, ...]:
        m, n, d = h.shape
        rows = h.reshape(m * n, d)
        norm = torch.linalg.vector_norm(rows, dim=-1)
        mean = rows.mean(-1) if centred else torch.zeros_like(norm)
        minus_variance = torch.addcmul(mean * mean, norm, norm, value=-1.0 / d).clamp_max_(0.0)
        inverse = (EPS - minus_variance).rsqrt_()
        logits = (centre(weight, centred) @ rows.t()).mul_(inverse)
        values = torch.tanh(logits) if tanh else logits.clone()
        each = values.view(n + 2, m, n)
        mix = torch.addcmul(static[: n + 1].unsqueeze(1), each[: n + 1], _of_rows(scale, n))
        # Positions outermost and in memory order: bmm falls back to one matrix at a time on other strides.
        mix = mix.transpose(0, 1).contiguous()
        write = torch.addcmul(static[n + 1], each[n + 1], scale[-1]).view(m, n, 1)
        return torch.bmm(mix[:, :1], h), torch.bmm(mix[:, 1:], h), mix, write, logits, values, inverse, mean

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        h, weight, _, scale, ctx.centred, ctx.tanh = inputs
        kept = (h, weight, scale, output[2], *output[4:])
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpoints unpack a tensor only once
        with full_precision(saved[0]):  # a loop may call backward inside of autocast
            return _backward(ctx, saved, grads)

    @staticmethod
    def jvp(
        ctx: Any, t_h: Tensor | None, t_weight: Tensor | None, t_static: Tensor | None, t_scale: Tensor | None, *_: None
    ) -> tuple[Tensor, ...]:
        h, weight, scale, mix, logits, values, inverse, mean = ctx.saved_tensors
        m, n, d = h.shape
        t_h, t_weight, t_scale = (_present(t, x) for t, x in ((t_h, h), (t_weight, weight), (t_scale, scale)))
        t_static = _present(t_static, h, (n + 2, n))
        rows, t_rows = h.reshape(m * n, d), t_h.reshape(m * n, d)
        t_mean = t_rows.mean(-1) if ctx.centred else torch.zeros_like(mean)
        t_inverse = -(inverse**3) * ((rows - mean.unsqueeze(-1)) * t_rows).mean(-1)
        t_product = centre(t_weight, ctx.centred) @ rows.t() + centre(weight, ctx.centred) @ t_rows.t()
        t_logits = t_product * inverse + logits * (t_inverse / inverse)
        t_values = t_logits * (1.0 - values * values) if ctx.tanh else t_logits.clone()
        value, t_value = values.view(n + 2, m, n), t_values.view(n + 2, m, n)
        t_mix = t_value[: n + 1] * _of_rows(scale, n) + value[: n + 1] * _of_rows(t_scale, n)
        t_mix = (t_mix + t_static[: n + 1].unsqueeze(1)).transpose(0, 1).contiguous()
        t_write = t_value[n + 1] * scale[-1] + value[n + 1] * t_scale[-1] + t_static[n + 1]
        t_read = torch.bmm(t_mix[:, :1], h) + torch.bmm(mix[:, :1], t_h)
        t_residual = torch.bmm(t_mix[:, 1:], h) + torch.bmm(mix[:, 1:], t_h)
        return t_read, t_residual, t_mix, t_write.unsqueeze(-1), t_logits, t_values, t_inverse, t_mean


# `apply` asks for the signature at every call, which takes as long as some of the products here.
_ReadAndMix.forward.__signature__ = inspect.signature(_ReadAndMix.forward)  # type: ignore[attr-defined]
