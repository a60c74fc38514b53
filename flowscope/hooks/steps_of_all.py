"""The steps of every optimizer of the process, told to whoever listens through one pair of torch's global hooks.

torch goes through its list of global hooks while they run, and raises in the step of one thread where another thread
adds or removes one meanwhile. So there is one pair of ours for all scopes, and it is taken off with the last of them
only where nobody can be inside that list: in a process of one thread, outside of any step.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flowscope.faults import Hook
from flowscope.torch_internals import steps_alone

_LOCK = threading.RLock()


class Listener:
    """Two hooks that hear of every step, until `remove`; they are not kept alive.

    Args:
        before: called with the optimizer, the arguments of its step and the named ones before each step.
        after: likewise after each step.

    Attributes:
        hooks: the two, while they live.
    """

    def __init__(self, before: Hook, after: Hook) -> None:
        self.hooks = weakref.ref(before), weakref.ref(after, self.remove)
        _change(more=self)

    def remove(self, forgotten: object = None) -> None:
        """Listen no more; called too when the hooks are forgotten."""
        _change(less=self)


_LISTENING: tuple[Listener, ...] = ()
_HANDLES: list[Any] = []


def _change(more: Listener | None = None, less: Listener | None = None) -> None:
    global _LISTENING
    with _LOCK:
        _LISTENING = tuple(one for one in (*_LISTENING, more) if one is not None and one is not less)
        if _LISTENING and not _HANDLES:
            _HANDLES[:] = register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)
        elif not _LISTENING and steps_alone():
            while _HANDLES:
                _HANDLES.pop().remove()


# what torch calls straight: nothing here can fail, the hooks have guards of their own


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _LISTENING:
        if (hook := listener.hooks[0]()) is not None:
            hook(optimizer, args, kwargs)


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _LISTENING:
        if (hook := listener.hooks[1]()) is not None:
            hook(optimizer, args, kwargs)


# what torch.compiler.disable sets: a compiled optimizer.step calls them as plain Python
_before._torchdynamo_disable = _after._torchdynamo_disable = True  # type: ignore[attr-defined]
