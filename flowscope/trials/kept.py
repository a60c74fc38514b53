"""Everything a trial may change is kept and put back bitwise: weights, buffers, plain attributes, gradients, state.

Tensors are put back into their own storage, so what else refers to them (an optimizer, a tied weight, DDP's buckets)
goes on referring to the same memory. What did not change is not written to.
"""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.sums.statistics import as_integers

Undo = Callable[[], None]
DEEP = 1
"""Objects in attributes of modules are looked into, objects in those are not: a module may hold its whole trainer."""
_OPAQUE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, torch.dtype)


@contextlib.contextmanager
def put_back(model: nn.Module, optimizer: Any = None, held: Any = None) -> Iterator[None]:
    """Let anything be done to a model and what trains it; afterwards all is as it was, bitwise.

    Args:
        model: its parameters, buffers, gradients, modes, submodules, and what its modules hold in plain attributes:
            tensors, arrays, numbers, generators, containers and objects of them, modules in lists.
        optimizer: one, or a list of them: state, groups and attributes.
        held: further values, nested (the batches).
    """
    kept = _Kept()
    for value in (model, optimizer, held):
        kept.keep(value, DEEP)
    chance = _chance()
    try:
        yield
    finally:
        for back in kept.undo:
            back()
        chance()


def _chance() -> Undo:
    """The state of the generators that all share: torch's on each device, Python's, numpy's."""
    cpu, python, numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()
    started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if started else []

    def back() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(numbers)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return back


class _Kept:
    """What was kept so far, each object once, and how it goes back: outer containers before what they hold."""

    def __init__(self) -> None:
        self.undo: list[Undo] = []
        self._seen: dict[int, Any] = {}  # objects, so that no number is given twice

    def keep(self, value: Any, objects: int) -> None:
        """Keep a value in place.

        Args:
            value: whatever may stand in an attribute.
            objects: so many objects within each other are looked into.
        """
        if value is None or isinstance(value, (bool, int, float, str, bytes, *_OPAQUE)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, (nn.Module, torch.optim.Optimizer)):
            self._keep_items(vars(value), DEEP)
        elif isinstance(value, (dict, list, set, deque)):
            self._keep_items(value, objects)
        elif isinstance(value, tuple):
            for item in value:
                self.keep(item, objects)
        elif isinstance(value, np.ndarray):
            self._keep_array(value)
        elif isinstance(value, (torch.Generator, np.random.Generator, random.Random)):
            self.undo.append(_generator(value))
        elif objects and isinstance(getattr(value, "__dict__", None), dict):
            self._keep_items(vars(value), objects - 1)

    def _keep_items(self, value: Any, objects: int) -> None:
        before = copy.copy(value) if isinstance(value, (set, deque)) else type(value).copy(value)

        def back() -> None:
            if not _same_items(value, before):
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(before)

        self.undo.append(back)
        for item in before.values() if isinstance(before, dict) else before:
            self.keep(item, objects)

    def _keep_array(self, array: np.ndarray[Any, Any]) -> None:
        before = array.copy()

        def back() -> None:
            if array.flags.writeable:
                array[...] = before

        self.undo.append(back)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided or nn.parameter.is_lazy(tensor):
            return
        leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
        gradient = tensor.grad if leaf else None
        with torch.no_grad():
            storage = tensor.detach()
            values = storage.clone()

        def back() -> None:
            with torch.no_grad():
                if leaf and not tensor.is_leaf:
                    tensor.detach_()
                moved = tensor.dtype != storage.dtype or tensor.data_ptr() != storage.data_ptr()
                if leaf and (moved or tensor.shape != storage.shape):
                    tensor.grad = None
                    tensor.data = storage
                # only where it changed: a write raises the version that a live graph compares
                if not _same(storage, values):
                    storage.copy_(values)
                if leaf:
                    tensor.requires_grad_(requires_grad)
                    tensor.grad = gradient

        self.undo.append(back)
        if gradient is not None:
            self.keep(gradient, 0)


def _generator(value: Any) -> Undo:
    if isinstance(value, torch.Generator):
        state = value.get_state()

        def back() -> None:
            value.set_state(state)

    elif isinstance(value, random.Random):
        drawn = value.getstate()

        def back() -> None:
            value.setstate(drawn)

    else:
        bits = copy.deepcopy(value.bit_generator.state)

        def back() -> None:
            value.bit_generator.state = bits

    return back


def _same_items(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if len(a) != len(b):
        return False
    pairs = zip(a.items(), b.items(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
    if isinstance(a, dict):
        return all(key is other and value is held for (key, value), (other, held) in pairs)
    return all(x is y for x, y in pairs)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN is equal to itself, 0 is not -0."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        a, b = as_integers(a), as_integers(b)
    return torch.equal(a, b)
