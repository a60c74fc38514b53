"""Everything a trial may change is kept and put back bitwise: weights, buffers, plain attributes, gradients, state.

Tensors are put back into their own storage, so what else refers to them (an optimizer, a tied weight, DDP's buckets)
goes on referring to the same memory. What did not change is not written to.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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


def referred_to(function: Any) -> list[Any]:
    """The modules, optimizers and tensors that a function may change beside what it is given: a critic, a queue.

    They are looked for in its closure, its defaults, the object it is bound to, what a `partial` holds, and the globals
    that it names; in containers of these, and in the functions of the same file that it names.
    """
    found: list[Any] = []
    waiting: list[tuple[Any, Any]] = [(function, None)]
    seen: dict[int, Any] = {}
    while waiting:
        value, home = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        inner: Iterable[Any] = ()
        if isinstance(value, (nn.Module, torch.optim.Optimizer, Tensor)):
            found.append(value)
        elif isinstance(value, functools.partial):
            inner = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            inner = (value.__func__, value.__self__, *_attributes(value.__self__))
        elif isinstance(value, types.FunctionType) and home in (None, id(value.__globals__)):
            inner, home = _named(value), id(value.__globals__)
        elif isinstance(value, (list, tuple, set, deque)):
            inner = value
        elif isinstance(value, dict):
            inner = value.values()
        elif value is function:
            inner = (vars(type(value)).get("__call__"), *_attributes(value))
        waiting += [(item, home) for item in inner]
    return found


def _attributes(value: Any) -> Iterable[Any]:
    """What an object holds; a module is found as it is."""
    return (
        () if isinstance(value, (nn.Module, *_OPAQUE)) else vars(value).values() if hasattr(value, "__dict__") else ()
    )


def _named(function: types.FunctionType) -> Iterator[Any]:
    """What a function has of its own, and the globals that it, or a function within it, names."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    codes = [function.__code__]
    for code in codes:  # grows while it is walked
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


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
