"""The product and the mean square that every generated coefficient starts from, in one pass each way.

Axis letters: R rows (positions, or positions times streams), K outputs, D features of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def project_rows(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight @ rows^T and the mean square of every row: rows [R, D], weight [K, D] -> [K, R], [R].

    A norm is a scale per row: `norm(row) @ w` is the product divided by the root of the mean square, so no normalised
    copy of the rows is made or kept. Differentiable twice and in forward mode. Autograd's own rules would do as well,
    but they make three tensors of the rows' size in backward where one is enough.
    """
    if torch.compiler.is_compiling():  # dynamo traces no Function with a forward-mode rule, and fuses the plain form
        return weight @ rows.t(), (rows * rows).mean(-1)
    product, square = _ProjectRows.apply(rows, weight)  # type: ignore[no-untyped-call]
    return product, square


class _ProjectRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(rows, dim=-1)
        return weight @ rows.t(), norm * norm / rows.shape[-1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_product: Tensor, grad_square: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = grad_product.t() @ weight
            grad_rows.addcmul_(rows, grad_square.unsqueeze(-1), value=2.0 / rows.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = grad_product @ rows
        return grad_rows, grad_weight

    @staticmethod
    def jvp(ctx: Any, tangent_rows: Tensor, tangent_weight: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        product = tangent_weight @ rows.t() + weight @ tangent_rows.t()
        return product, (rows * tangent_rows).sum(-1) * (2.0 / rows.shape[-1])
