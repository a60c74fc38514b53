"""How different the rows (units) of each weight matrix are: at 0 all units compute one function.

Units that start equal get equal gradients and stay equal, so a layer of any width is then a layer of one unit.

Axis letters: M matrices, R sampled rows, K sampled entries of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64
ENTRIES = 64
"""At most so many evenly spaced rows, and entries of a row, are looked at."""
SMALLEST = 1e-18
"""The root mean square under which fp32 squares would vanish: such a matrix counts as zero."""


def spreads(matrices: dict[int, Tensor]) -> list[tuple[list[int], Tensor]]:
    """Return the relative spread between the rows of weights [rows, ...], by number: vectors on the weights' devices.

    sqrt(mean over columns of the variance over rows / mean square) of the sampled entries: 0 where all rows are the
    same, about 1 for independent entries of mean 0, NaN for a matrix of zeros.
    """
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[tuple[int, Tensor]]] = {}
    for number, matrix in matrices.items():
        sample = sampled(matrix)
        alike.setdefault((sample.device, sample.dtype, sample.shape), []).append((number, sample))
    return [([i for i, _ in group], _spread(torch.stack([x for _, x in group]))) for group in alike.values()]


def sampled(weight: Tensor) -> Tensor:
    """Return at most [ROWS, ENTRIES] evenly spaced entries of a weight [rows, ...], at least fp32."""
    rows = weight.detach()[:: -(-weight.shape[0] // ROWS)]
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    rows = rows.reshape(rows.shape[0], -1)
    rows = rows[:, :: -(-rows.shape[1] // ENTRIES)]
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _spread(x: Tensor) -> Tensor:
    """The spreads [M] of samples [M, R, K]."""
    x = x / x.abs().amax((1, 2), keepdim=True).clamp_min(SMALLEST)
    # from the first row on: what is equal differs by exactly 0
    variance = (x - x[:, :1]).var(1, correction=0).mean(1)
    square = x.square().mean((1, 2))
    return torch.where(square > 0, (variance / square).sqrt(), torch.nan)
