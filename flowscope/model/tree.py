"""All modules of a model, walked once, and again only where the model has changed since."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import nn

from flowscope.model.structure import Named, is_scripted


class ModuleTree:
    """The modules of one model as they were when it was last read, without those that torch.jit compiled.

    Attributes:
        modules: (path, module) of the model and all in it, each once, under its first path, in module order.
        by_path: the modules by path; after a change by every path they have.
        reads: how often the modules were read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.reads = 0
        self._read(model.named_modules())

    def _read(self, named: Iterable[Named]) -> None:
        self.by_path = {path: module for path, module in named if not is_scripted(module)}
        first = {id(module): path for path, module in reversed(self.by_path.items())}
        self.modules = tuple((path, module) for path, module in self.by_path.items() if first[id(module)] == path)
        slots = [(module._modules, name) for _, module in self.modules for name in module._modules]
        self._slots = [siblings for siblings, _ in slots], [name for _, name in slots]
        self._children = [siblings[name] for siblings, name in slots]
        self._held = [held for _, module in self.modules for held in (module._modules, module._parameters)]
        self._count = sum(map(len, self._held))
        self.reads += 1

    def follow(self) -> int:
        """Read the modules again where any, or a parameter, was replaced, renamed, added or taken out; `reads`."""
        same = all(map(operator.is_, map(dict.get, *self._slots), self._children))
        if not same or sum(map(len, self._held)) != self._count:
            self._read(self._model.named_modules(remove_duplicate=False))
        return self.reads
