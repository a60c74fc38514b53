"""Whether what an optimizer changed is still there when the next step begins: the first pairs of steps in a row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.payload import local

PAIRS = 12
"""So many pairs of steps are looked at: what writes the weights back does so from the start."""
PARAMETERS, ENTRIES = 8, 64
"""So many entries of so many parameters are looked at, evenly spaced."""


class KeptUpdates(Instrument):
    """A few entries of the weights before a step, after it, and before the next one."""

    name = "kept_updates"
    metrics = (
        Metric(
            "update_kept",
            "How much of a step's update is left when the next step begins. At 0 the weights were written back.",
            formula="‖w before the next step - w before it‖ / ‖w after it - w before it‖",
            healthy="1",
            view="Parameters",
            rows="model",
            drawn=False,
        ),
    )

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing of the model is called."""
        self._parameters, self._hooks = view.parameters, hooks
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._made, self._pairs = -1, 0
        self._lengths: Tensor | None = None
        """Of the way from before one step to before the next, and of the step."""

    def begin_step(self) -> None:
        """What was read counts only where no step lies between."""
        if self._steps() != self._made:
            self._before = self._after = None

    def _steps(self) -> int:
        """How many steps all the model's optimizers have made."""
        return sum(map(self._hooks.turns.of, self._hooks.optimizers()))

    @torch.no_grad()
    def before_update(self, *, updating: bool) -> None:
        """Read the weights, and compare them with those around the step before."""
        before, after, self._before, self._after = self._before, self._after, None, None
        if not updating or self._pairs >= PAIRS:
            return
        self._before = now = self._entries()
        if before is None or after is None or not len(before) or before.shape != now.shape:
            return
        self._pairs += 1
        self._lengths = torch.linalg.vector_norm(torch.stack([now - before, after - before]), dim=1)

    @torch.no_grad()
    def after_update(self) -> None:
        """Read them again."""
        if self._before is not None:
            self._after, self._made = self._entries(), self._steps()

    def _entries(self) -> Tensor:
        held = [local(p.detach()) for p in self._parameters.some(PARAMETERS).values() if p is not None]
        held = [p for p in held if not p.is_complex() and p.device == held[0].device]
        rows = [p.flatten()[:: max(1, p.numel() // ENTRIES)][:ENTRIES].float() for p in held]
        return torch.cat(rows) if rows else torch.empty(0)

    def take(self) -> Taken | None:
        """Both lengths, still on their device."""
        lengths, self._lengths = self._lengths, None
        return None if lengths is None else Taken(self.name, [lengths], self._read, "vector")

    def update_failed(self) -> None:
        """The step begins anew."""
        self._before = self._after = self._lengths = None

    def drop(self) -> None:
        """Forget a step that did not happen; one that has ended waits for the next."""
        self._lengths = None
        if self._after is None:
            self._before = None

    @staticmethod
    def _read(out: RecordBuilder, parts: list[Array]) -> None:
        moved, updated = parts[0]
        if updated > 0:
            out.add("update_kept", np.array([moved / updated]), ("",))
