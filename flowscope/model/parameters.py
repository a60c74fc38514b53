"""The parameters of a model as they are now, found again where modules or parameters were replaced or added."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.model.plan import display_path
from flowscope.model.structure import is_norm
from flowscope.model.tree import ModuleTree

LAZY = -1
"""In place of the number of a reading: some parameters have no shape yet, so that it is soon out of date."""
GONE = nn.Module()
"""Stands for a module that is no longer in the model: its parameters are not seen."""


class ParameterList:
    """All floating-point parameters of a model, tied ones once, under their first name.

    A parameter keeps its number: those that come later stand behind the others.

    Args:
        tree: the modules of the model.
        patterns: of the names of those to list, "!" before those to leave out; none for all.

    Attributes:
        names: by number, of all that were ever there.
        added: the names of those that came after attaching.
        is_norm: 1 for those of a normalisation.
        matrices: the numbers of those with rows to compare.
    """

    def __init__(self, tree: ModuleTree, patterns: Sequence[str] = ()) -> None:
        self._tree, self._patterns = tree, patterns
        self._places: list[tuple[nn.Module, str]] = []
        self._ties: list[tuple[dict[str, Any], str, int]] = []
        """Further places of parameters: what holds one, under which key, and the parameter's number."""
        self._paths: list[tuple[str, str]] = []
        self._now: list[Tensor | None] | None = None
        self.added: list[str] = []
        self._find()

    def current(self) -> list[Tensor | None]:
        """By number; None where one is gone."""
        if self._now is not None:
            return self._now
        return list(map(dict.get, *self._slots))

    def at(self, number: int) -> Tensor | None:
        """One of them."""
        return self._slots[0][number].get(self._slots[1][number])

    def holder(self, number: int) -> nn.Module:
        """The module that owns one of them."""
        return self._places[number][0]

    def path(self, number: int) -> str:
        """That module's path."""
        return self._paths[number][0]

    def follow(self) -> list[Tensor | None]:
        """The same, found again where modules were replaced, or a tied parameter is a tensor of its own by now."""
        if self._tree.follow() != self._reads or self._untied():
            self._find_again()
        return self.current()

    def hold(self, *, fixed: bool = True) -> None:
        """Find them now; they stay what they are until `let_go` where they are `fixed`, for one optimizer step."""
        self._now = None
        now = self.follow()
        self._now = now if fixed else None

    def let_go(self) -> None:
        """Look them up anew from here on, and keep none alive."""
        self._now = None

    def some(self, count: int) -> dict[int, Tensor | None]:
        """At most `count` evenly spaced ones, by number."""
        chosen = range(0, len(self._places), -(-len(self._places) // count) or 1)
        return {i: self.at(i) for i in chosen}

    def _untied(self) -> bool:
        return any(held.get(key) is not self.at(number) for held, key, number in self._ties)

    def _find_again(self) -> None:
        self._now = None
        modules = self._tree.by_path
        paths = {id(module): path for path, module in reversed(modules.items())}
        for i, ((path, key), (held, _)) in enumerate(zip(self._paths, self._places, strict=True)):
            if path not in modules:
                path = paths.get(id(held), path)
            self._paths[i], self._places[i] = (path, key), (modules.get(path, GONE), key)
        known, lazy = len(self._paths), self._reads == LAZY
        self._find()
        self.added += [] if lazy else self.names[known:]

    def _find(self) -> None:
        """Add what the model holds and is not known yet, behind what is known: numbers stay what they are."""
        self._index()
        seen = {id(parameter): i for i, parameter in enumerate(self.current()) if parameter is not None}
        lazy, self._ties = False, []
        for path, module in self._tree.modules:
            for key, parameter in module._parameters.items():
                lazy = lazy or isinstance(parameter, nn.parameter.UninitializedParameter)
                if parameter is None or not _floating(parameter) or not self._wants(path, key):
                    continue
                if id(parameter) not in seen:
                    seen[id(parameter)] = len(self._places)
                    self._places.append((module, key))
                    self._paths.append((path, key))
                elif self._places[number := seen[id(parameter)]] != (module, key):
                    self._ties.append((module._parameters, key, number))
        self.names: Sequence[str] = tuple(display_path(f"{path}.{key}" if path else key) for path, key in self._paths)
        self._index()
        self.is_norm = np.array([float(is_norm(module)) for module, _ in self._places])
        self.matrices = [i for i, p in enumerate(self.current()) if p is not None and not self.is_norm[i] and rows(p)]
        self._reads = LAZY if lazy else self._tree.reads

    def _wants(self, path: str, key: str) -> bool:
        name = display_path(f"{path}.{key}" if path else key)
        out = [pattern[1:] for pattern in self._patterns if pattern.startswith("!")]
        into = [pattern for pattern in self._patterns if not pattern.startswith("!")]
        matches = functools.partial(fnmatchcase, name)
        return (not into or any(map(matches, into))) and not any(map(matches, out))

    def _index(self) -> None:
        self._slots = [module._parameters for module, _ in self._places], [key for _, key in self._places]


def rows(weight: Tensor) -> bool:
    """Whether a parameter is a matrix with rows to compare."""
    return weight.dim() >= 2 and weight.shape[0] >= 2 and weight.numel() > 0


def _floating(parameter: Tensor) -> bool:
    return (
        (parameter.is_floating_point() or parameter.is_complex())
        and not isinstance(parameter, nn.parameter.UninitializedParameter)
        and parameter.layout == torch.strided
    )
