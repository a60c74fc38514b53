"""How what an instrument took adds up over ranks, where it does not make the parts of the all-reduce vector itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flowscope.instruments.instrument import Taken
from flowscope.records import Array
from flowscope.sums.payload import Part, Sharing, flat
from flowscope.sums.statistics import wide


def parts_of(taken: Taken, sharing: Sharing, agreed: Mapping[str, int], sums: dict[str, Array]) -> list[Part]:
    """Return the parts of the all-reduce vector that one instrument's numbers are.

    Args:
        taken: with `adds_up`.
        sharing: this rank's share.
        agreed: names and sizes of the parts that the ranks are known to have in common.
        sums: filled with the sum of a table or a vector by its name, in the shape of its largest tensor.
    """
    if callable(taken.adds_up):
        return taken.adds_up(sharing, agreed)
    if not taken.adds_up or not taken.tensors:
        return []
    # a device that deposited early in the run may hold fewer rows
    whole = max((tensor.shape for tensor in taken.tensors), key=lambda shape: shape[:1])
    size = int(np.prod(whole))

    def gather() -> Tensor:
        if not sharing.states:
            return torch.zeros(size, dtype=wide(sharing.device), device=sharing.device)
        return flat([tensor for tensor in taken.tensors if tensor.shape == whole], sharing.device)

    def scatter(total: Array) -> None:
        sums[taken.name] = total.reshape(whole)

    return [Part(taken.name, size, gather, scatter, fixed=taken.adds_up == "table")] if size else []
