"""The only file that registers hooks: module hooks that survive pickling as no-ops, guard faults, and all come off.

A forward hook plus `Tensor.register_hook` inside it is the one mechanism used on activations: module backward hooks
break in-place operations, never fire on dict outputs and switch compilation off. Side effects under `torch.compile`
are in-place additions to preallocated tensors only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.faults import Faults


class Mask:
    """While `on`, no hook counts: slow probes and `jacobian_spectrum` run the model without being observed."""

    def __init__(self) -> None:
        self.on = False


MASK = Mask()


@contextlib.contextmanager
def masked() -> Iterator[None]:
    """Hide what runs inside from every attached scope."""
    before, MASK.on = MASK.on, True
    try:
        yield
    finally:
        MASK.on = before


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass (a checkpointed block is recomputed). Eager only."""
    return torch._C._current_graph_task_id() != -1


class Hook:
    """A module hook: guarded, and replaced by an inert standard-library method in any copy or pickle of the model."""

    def __init__(self, part: str, observe: Callable[..., None], faults: Faults) -> None:
        self.part, self.observe, self.faults = part, observe, faults
        self.failed = faults.failed
        self.on = True

    def __call__(self, *args: Any) -> None:
        """Observe; never returns a value, so the module's output stays what it was."""
        if not self.on or MASK.on or self.part in self.failed:
            return
        try:
            self.observe(*args)
        except Exception as error:
            self.faults.report(self.part, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or saved model keeps `nullcontext().__exit__`, which takes any arguments and returns None."""
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See `__reduce__`."""
        return contextlib.nullcontext().__exit__


class Hooks:
    """All hooks of one scope, removed together; `close` is idempotent."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._handles: list[Any] = []

    def before(self, module: nn.Module, part: str, observe: Callable[..., None], *, first: bool = False) -> Hook:
        """Call `observe(module, args, kwargs)` before each forward of `module`."""
        hook = Hook(part, observe, self.faults)
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first))
        return hook

    def after(self, module: nn.Module, part: str, observe: Callable[..., None]) -> Hook:
        """Call `observe(module, args, kwargs, output)` after each forward of `module`."""
        hook = Hook(part, observe, self.faults)
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        return hook

    def keep(self, handle: Any) -> None:
        """Take over another removable handle (an optimizer's hook)."""
        self._handles.append(handle)

    def close(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles.pop().remove()


def on_gradient(x: Tensor, part: str, deposit: Callable[[Tensor], None], faults: Faults) -> None:
    """Call `deposit(gradient)` when the gradient of x arrives (detached, without recording a graph)."""
    failed = faults.failed

    def hook(gradient: Tensor) -> None:
        if MASK.on or part in failed:
            return
        try:
            with torch.no_grad():
                deposit(gradient.detach())
        except Exception as error:
            faults.report(part, error)

    x.register_hook(hook)
