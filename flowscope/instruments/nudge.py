"""A run whose first hidden state is moved by one ulp: what it differs in from the same run unmoved is rounding.

The only instrument that changes the training, and only where `WatchConfig.nudge` asks for such a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Instrument
from flowscope.model.view import ModelView
from flowscope.sums.statistics import as_integers


class Nudge(Instrument):
    """Moves x_0 of the first flow, or the first point where it has no entry, in every forward in training."""

    name = "nudge"
    families = ()

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """None unless it is asked for."""
        return [cls()] if config.nudge and len(view.flows) else []

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """The hook that moves it."""
        flow = next(iter(view.flows))
        path = flow.entry if flow.entry is not None else flow.outputs[0]
        hooks.change(view.model.get_submodule(path), moved, output=flow.entry is None)


def moved(x: Tensor) -> Tensor:
    """Return x with every entry moved to the next number above or below it, by one of its own bits; gradients pass."""
    with torch.no_grad():
        # neighbours differ by one as whole numbers do; torch.nextafter does not know every dtype
        bits = as_integers(x)
        away = ((bits & 2) > 0) | (x == 0)
        change = torch.where(away, bits + 1, bits - 1).view(x.dtype) - x
    return x + change
