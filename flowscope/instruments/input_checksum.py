"""Which batch a step was given: a checksum of the numbers that the model's forwards were called with."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.checksums import ordered_checksum
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.model.nested import nested_tensors
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder

TENSORS = 4
"""So many tensors of a call: the first may be a mask or a grid that is the same in every batch."""


class InputChecksum(Instrument):
    """The inputs of the root's training forwards in a step, in their order; computed where they are."""

    name = "input_checksum"
    metrics = (
        Metric(
            "input_checksum",
            "What the step's batch was, as two numbers: equal ones mean the same inputs, to the last bit.",
            formula="sum over entries of bits x (an odd number per place), mod 2^64, in halves of 32 bits",
            view="Other",
            rows="model",
            drawn=False,
        ),
    )

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what the root is given."""
        self._switch = hooks.switch
        hooks.before(view.model, self.fuse, self._before, hooks.switch)

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        del module
        if self._switch.paused or is_compiling() or not torch.is_grad_enabled():
            return
        for x in islice(filter(_is_plain, nested_tensors((args, kwargs))), TENSORS):
            total = ordered_checksum(x.detach())
            self._sum = total if self._sum is None or self._sum.device != total.device else 3 * self._sum + total

    def take(self) -> Taken | None:
        """The checksum as two halves, which fp64 holds exactly."""
        total, self._sum = self._sum, None
        if total is None:
            return None
        halves = torch.stack([(total >> 32) & 0xFFFFFFFF, total & 0xFFFFFFFF]).double()
        return Taken(self.name, [halves], self._read, "vector")

    def discard(self) -> None:
        """Keep it: a step may drop what one backward left, its inputs stay what they are."""

    def drop(self) -> None:
        """Forget what was seen."""
        self._sum = None

    @staticmethod
    def _read(out: RecordBuilder, parts: list[Array]) -> None:
        out.add("input_checksum", np.asarray(parts[0]), ("upper", "lower"))


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is neither a number nor of a kind (jagged, sharded, sparse) that has no entries in a row."""
    return type(x) is Tensor and x.layout is torch.strided and not x.is_nested and not x.is_meta and x.numel() > 1
