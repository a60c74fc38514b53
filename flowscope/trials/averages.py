"""Averages of a model's weights that the script keeps, and vectors of length 1 that do not bear averaging."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

SHORT = 1e-3
"""A vector shorter than 1 by more is none of the model's: fp32 is off by 1e-6 ..."""
MEAN = 0.5
"""... and one shorter than this no mean: a sum that begins at 0, or another number of the same name."""
_ENDINGS = ("_u", "_v")
"""Names of the two vectors of a spectral norm end so, weight_u or parametrizations.weight.0._u."""


class Shortened(NamedTuple):
    """A vector of length 1 in the model, by the name of its buffer, and its length in a copy of the state."""

    name: str
    length: float


def shortened(model: nn.Module) -> Shortened | None:
    """The first vector of a spectral norm, [M], that a copy of the model's state holds with another length than 1.

    A mean of several vectors of length 1 is shorter than 1. In evaluation the weight is divided by u' W v, so it
    becomes too large by the lengths of both.
    """
    vectors = {name: b for name, b in model.named_buffers() if name.endswith(_ENDINGS) and _is_unit(b)}
    for copy in _copies(model, vectors) if vectors else ():
        for name, vector in vectors.items():
            length = _length(copy[name])
            if copy[name].data_ptr() != vector.data_ptr() and MEAN < length < 1 - SHORT:
                return Shortened(name, length)
    return None


def _copies(model: nn.Module, vectors: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """What is alive and holds tensors of these names and shapes: states, and modules that are not the model's."""
    own = {id(module) for module in model.modules()}
    for found in gc.get_objects():
        held: Mapping[str, Tensor] | None = None
        if type(found) in (dict, OrderedDict) and vectors.keys() <= found.keys():
            held = found
        # type() instead of isinstance: lazy proxies answer the latter by importing or raising
        elif issubclass(type(found), nn.Module) and id(found) not in own and "_buffers" in vars(found):
            held = dict(found.named_buffers())
        if held is not None and held is not vectors and all(_fits(held.get(n), v) for n, v in vectors.items()):
            yield held


def _fits(value: object, vector: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == vector.shape and value.is_floating_point()


def _is_unit(x: Tensor) -> bool:
    return x.dim() == 1 and x.is_floating_point() and abs(_length(x) - 1) <= SHORT


def _length(x: Tensor) -> float:
    return float(x.detach().double().norm())
