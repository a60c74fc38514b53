"""How many steps the optimizer's own state has counted: a count that begins anew while the run goes on was lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder


class OptimizerAge(Instrument):
    """The largest step count in the state of the optimizers (Adam and its kin keep one a parameter, or a group)."""

    name = "optimizer_age"
    metrics = (
        Metric(
            "optimizer_steps",
            "Steps that the optimizer's state has counted. Missing where it counts none, or on a device.",
            view="Parameters",
            rows="model",
            drawn=False,
        ),
    )

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing of the model is called."""
        self._hooks = hooks

    def take(self) -> Taken:
        """No tensors: counts that lie on the host."""
        return Taken(self.name, [], partial(self._read, age_of(self._hooks.optimizers())))

    @staticmethod
    def _read(age: float, out: RecordBuilder, parts: list[Array]) -> None:
        del parts
        if np.isfinite(age):
            out.add("optimizer_steps", np.array([age]), ("",))


def age_of(optimizers: Any) -> float:
    """The largest count of the first parameter of each optimizer that has one; NaN where none has.

    A count that lies on a device is not waited for.
    """
    counts = [count for optimizer in optimizers if np.isfinite(count := _count(optimizer))]
    return max(counts, default=float("nan"))


def _count(optimizer: Any) -> float:
    groups = getattr(optimizer, "param_groups", ())
    # some keep one count a group of parameters: apex as "step", schedule-free ones and Prodigy as "k"
    for kept in (*getattr(optimizer, "state", {}).values(), *groups):
        count = kept.get("step", kept.get("k")) if isinstance(kept, dict) else None
        if isinstance(count, (int, float)) or (isinstance(count, Tensor) and count.device.type == "cpu"):
            return float(count)
    return float("nan")
