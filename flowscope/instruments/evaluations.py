"""How often the optimizer itself runs the model in one step: one that looks where it steps (LBFGS) does so."""

from __future__ import annotations

from functools import partial

import numpy as np

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder


class Evaluations(Instrument):
    """Training forwards inside the optimizer's step."""

    name = "evaluations"
    metrics = (
        Metric(
            "step_evaluations",
            "How often the optimizer itself ran the model in this step (LBFGS). Missing where not, or once.",
            unit="count",
            view="Parameters",
            rows="model",
            drawn=False,
        ),
    )

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing of the model is called."""
        self._hooks, self._count = hooks, 0

    def begin_step(self) -> None:
        """None so far."""
        self._count = 0

    def start_forward(self) -> None:
        """The model runs."""
        self._count += self._hooks.switch.in_closure

    def take(self) -> Taken:
        """No tensors."""
        return Taken(self.name, [], partial(self._read, self._count))

    @staticmethod
    def _read(count: int, out: RecordBuilder, parts: list[Array]) -> None:
        del parts
        if count > 1:
            out.add("step_evaluations", np.array([float(count)]), ("",))
