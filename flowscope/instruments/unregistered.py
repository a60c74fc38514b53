"""Trainable tensors that modules keep in plain lists, dicts or attributes, where only their own code finds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.instruments.wiring import held_by
from flowscope.metrics import Metric
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.torch_internals import is_leaf

DEEPEST = 3
"""A list in a dict in an attribute."""
LONGEST = 1024
"""Longer containers hold data."""
WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._")
"""Modules of torch that keep books on others."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Unregistered(Instrument):
    """Tensors that ask for a gradient, and modules with such, that are no part of the model by torch's rules."""

    name = "unregistered"
    metrics = (
        Metric(
            "unregistered",
            "Trainable tensors in plain lists, dicts or attributes of modules: 1 with a gradient and in no optimizer.",
            healthy="none (the metric is left out)",
            view="Parameters",
            bounds=(0.0, 1.0),
            rows="model",
            drawn=False,
        ),
    )

    def __init__(self, found: dict[str, Tensor]) -> None:
        self._found = found
        self._grown: set[str] = set()

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One where there are any."""
        found = unregistered(view.tree.modules)
        return [cls(found)] if found else []

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing of the model is called."""
        self._hooks = hooks

    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """Note which of them have a gradient."""
        del only, scale
        self._grown |= {path for path, tensor in self._found.items() if tensor.grad is not None}

    def take(self) -> Taken:
        """No tensors."""
        held = set[int]().union(*map(held_by, (*self._hooks.optimizers(), *self._hooks.turns.others)))
        missed = [float(path in self._grown and id(tensor) not in held) for path, tensor in self._found.items()]
        self._grown = set()
        return Taken(self.name, [], partial(self._read, np.array(missed)))

    def _read(self, missed: Array, out: RecordBuilder, parts: list[Array]) -> None:
        del parts
        out.add(self.name, missed, [*self._found])


def unregistered(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """The trainable leaf tensors that attributes of modules hold and no module has registered, by path.

    Args:
        modules: (path, module) of all modules of the model.
    """
    held = list(modules)
    seen = {id(module) for _, module in held}
    for _, module in held:
        seen |= {id(p) for p in (*module._parameters.values(), *module._buffers.values())}
    found: dict[str, Tensor] = {}
    for path, module in held:
        if type(module).__module__.startswith(WRAPPERS):
            continue
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                place = f"{path}.{name}" if path else name
                found |= {display_path(where): tensor for where, tensor in _inside(value, place, seen, DEEPEST)}
    return found


def _inside(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor | nn.Module):
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.requires_grad and is_leaf(value):
                yield path, value
            return
        for name, parameter in value.named_parameters():
            yield from _inside(parameter, f"{path}.{name}", seen, depth)
    elif isinstance(value, list | tuple | set | frozenset | dict) and depth and len(value) <= LONGEST:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from _inside(entry, f"{path}[{key}]", seen, depth - 1)
