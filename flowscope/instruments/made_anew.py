"""Parameters that a model's forward makes for itself each time: random in every call, and no optimizer's.

What a forward returned knows the leaves it was computed from. Three forwards are asked; a leaf that the first one has
beside the model's own may be a teacher's or another net's, one that the second and the third each have is made anew.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import floating_tensors, is_compiling
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.torch_internals import leaves_below

LOOKS = 3
"""So many steps are looked at."""
NODES = 4096
"""So many operations of a forward, at most."""


class MadeAnew(Instrument):
    """The leaves of the output's graph that are `nn.Parameter`s and were not there in the step before."""

    name = "made_anew"
    metrics = (
        Metric(
            "made_anew",
            "Parameters that each forward makes for itself (a layer built in forward): how many.",
            healthy="none (the metric is left out)",
            view="Parameters",
            unit="count",
            rows="model",
            drawn=False,
        ),
    )

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what the root returns."""
        self._parameters, self._switch = view.parameters, hooks.switch
        self._known: list[weakref.ref[Tensor]] = []
        self._looks, self._looked = 0, False
        self._new: list[tuple[str, ...]] = []
        """The shapes of what each look but the first found."""
        handle = hooks.after(view.model, self.fuse, self._after, hooks.switch)
        self._stop = partial(hooks.remove, handle)

    def begin_step(self) -> None:
        """One forward a step: those of one step are all alive at its end."""
        self._looked = False

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del module, args, kwargs
        if self._looked or self._looks == LOOKS or is_compiling() or self._switch.paused:
            return
        roots = [x.grad_fn for x in floating_tensors(output) if x.grad_fn is not None]
        if not roots:
            return
        self._looked = True
        own = {id(p) for p in (*self._parameters.current(), *(known() for known in self._known))}
        found = [leaf for leaf in leaves_below(roots, NODES) if isinstance(leaf, nn.Parameter) and id(leaf) not in own]
        self._known += map(weakref.ref, found)
        if self._looks:
            self._new.append(tuple(" x ".join(map(str, leaf.shape)) for leaf in found))
        self._looks += 1
        if self._looks == LOOKS:
            self._stop()

    def take(self) -> Taken | None:
        """No tensors."""
        if len(self._new) < LOOKS - 1 or not all(self._new):
            return None
        return Taken(self.name, [], partial(self._read, self._new[-1]))

    @staticmethod
    def _read(shapes: tuple[str, ...], out: RecordBuilder, parts: list[Array]) -> None:
        del parts
        kinds = list(dict.fromkeys(shapes))
        out.add("made_anew", np.array([float(shapes.count(shape)) for shape in kinds]), kinds)
