"""How different the rows (units) of each weight matrix are: at 0 all units compute one function.

Units that start equal get equal gradients and stay equal, so a layer of any width is then a layer of one unit.
Rows that start equal but get gradients of their own (state matrices of Mamba, layer scales) part at the first step.

Axis letters: M matrices, R sampled rows, K sampled entries of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.parameters import rows
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.payload import local
from flowscope.sums.statistics import at_least_single, real

ROWS = 64
ENTRIES = 64
"""At most so many evenly spaced rows, and entries of a row, are looked at."""
SMALLEST = 1e-18
"""The root mean square under which fp32 squares would vanish: such a matrix counts as zero."""
NEGLIGIBLE = 1e-5
"""A gradient this far below the largest may be rounding alone: equal classes of a softmax cancel to it."""
UNRELATED = 0.5
"""Rows of a gradient this far apart are on their way to different functions; random biases alone part them by less."""


class WeightSpread(Instrument):
    """The weight matrices of a model, on the slow schedule."""

    name = "weight_spread"
    metrics = (
        Metric(
            "weight_spread",
            "Relative spread between the rows (units) of a matrix. At 0 all units are one. Grey: zeros or frozen.",
            formula="sqrt(mean over columns of the variance over rows / mean square)",
            view="Parameters",
            rows="parameters",
            scale="log",
            ranks="whole",
        ),
    )

    def __init__(self) -> None:
        self._found: list[tuple[list[int], Tensor]] = []

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing of the model is called."""
        self._parameters, self._switch = view.parameters, hooks.switch

    @torch.no_grad()
    def before_update(self, *, updating: bool) -> None:
        """Compare the rows."""
        if not self._switch.slow:
            return
        now = self._parameters.current()
        trained = {i: p for i in self._parameters.matrices if (p := now[i]) is not None and p.requires_grad}
        held = {i: weight for i, p in trained.items() if rows(weight := local(p))}
        gradients = {i: local(p.grad) for i, p in trained.items() if i in held and p.grad is not None}
        self._found = spreads(held, gradients)

    def take(self) -> Taken | None:
        """[M] of matrices that are alike, and which they are."""
        found, self._found = self._found, []
        numbers = [numbers for numbers, _ in found]
        return Taken(self.name, [vector for _, vector in found], partial(self._read, numbers)) if found else None

    def drop(self) -> None:
        """Forget what was compared."""
        self._found = []

    def _read(self, numbers: Sequence[list[int]], out: RecordBuilder, parts: list[Array]) -> None:
        names, matrices = self._parameters.names, self._parameters.matrices
        spread = np.full(len(names), np.nan)
        for where, vector in zip(numbers, parts, strict=True):
            spread[where] = vector
        out.add("weight_spread", spread[matrices], [names[i] for i in matrices])


def spreads(matrices: dict[int, Tensor], gradients: dict[int, Tensor] | None = None) -> list[tuple[list[int], Tensor]]:
    """Return the relative spread between the rows of weights [rows, ...], by number: vectors on the weights' devices.

    sqrt(mean over columns of the variance over rows / mean square) of the sampled entries: 0 where all rows are the
    same, about 1 for independent entries of mean 0, NaN for a matrix of zeros. With a gradient (not sparse, not
    negligible beside the others) of a spread above UNRELATED, the larger of the two.
    """
    alike: dict[tuple[torch.device, torch.dtype, torch.Size, bool], list[tuple[int, Tensor, Tensor]]] = {}
    for number, matrix in matrices.items():
        sample, gradient = sampled(matrix), (gradients or {}).get(number)
        known = gradient is not None and gradient.layout is torch.strided and gradient.shape == matrix.shape
        change = sampled(gradient) if gradient is not None and known else sample
        key = (sample.device, sample.dtype, sample.shape, known and change.device == sample.device)
        alike.setdefault(key, []).append((number, sample, change.to(sample.dtype)))
    found = {key: _spread(torch.stack([weight for _, weight, _ in group])) for key, group in alike.items()}
    changes = {key: torch.stack([change for *_, change in group]) for key, group in alike.items() if key[-1]}
    sizes = {key: change.abs().amax((1, 2)).float() for key, change in changes.items()}
    for key, change in changes.items():
        largest = torch.stack([size.max() for other, size in sizes.items() if other[0] == key[0]]).max()
        parting = torch.where(sizes[key] > NEGLIGIBLE * largest, _spread(change), torch.nan)
        # NaN is never larger, and stays where it was
        found[key] = torch.where(parting > found[key].clamp_min(UNRELATED), parting, found[key])
    return [([number for number, *_ in group], found[key]) for key, group in alike.items()]


def sampled(weight: Tensor) -> Tensor:
    """Return at most [ROWS, ENTRIES] evenly spaced entries of a weight [rows, ...], at least fp32."""
    rows = real(weight.detach()[:: -(-weight.shape[0] // ROWS)])
    rows = rows.reshape(rows.shape[0], -1)
    return at_least_single(rows[:, :: -(-rows.shape[1] // ENTRIES)])


def _spread(x: Tensor) -> Tensor:
    """The spreads [M] of samples [M, R, K]."""
    x = x / x.abs().amax((1, 2), keepdim=True).clamp_min(SMALLEST)
    # from the first row on: what is equal differs by exactly 0
    variance = (x - x[:, :1]).var(1, correction=0).mean(1)
    square = x.square().mean((1, 2))
    return torch.where(square > 0, (variance / square).sqrt(), torch.nan)
