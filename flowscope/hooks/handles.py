"""Handles of our hooks that can be taken off for the steps in which nobody looks, and put back in their place.

A module without any hook is called by a shorter way than one whose hooks return at once, and a forward that trains
nothing (acting, evaluation) then costs what it costs unwatched. A hook that is missing while torch.compile traces a
module never fires, so that nothing is taken off once anything was compiled, and all is put back before the first trace.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from flowscope.faults import Hook, Samples
from flowscope.torch_internals import before_compiling, frames_compiled


class ModuleHook:
    """A hook on a module, and its handle.

    Args:
        module: on which it is put.
        hook: what is called.
        before: whether it is called before the forward, else after it.
        prepend: before all other hooks that are there.
        always: also where the forward raises.

    Attributes:
        hook: what is called.
        held: the module's hooks of this kind, by number.
        number: of this one.
    """

    def __init__(
        self, module: nn.Module, hook: Hook, *, before: bool = False, prepend: bool = False, always: bool = False
    ) -> None:
        self.hook = hook
        if before:
            self._handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)
        else:
            self._handle = module.register_forward_hook(hook, with_kwargs=True, always_call=always)
        self.held: dict[int, Any] = module._forward_pre_hooks if before else module._forward_hooks
        self.number: int = self._handle.id
        self.removed = False

    def remove(self) -> None:
        """Take it off for good."""
        self.removed = True
        self._handle.remove()


class ParameterHook:
    """A hook on a parameter, and its handle. The parameter does not keep it alive: Python could not free the cycle.

    Args:
        hook: what is called.
        parameter: on which it is put.
        accumulated: whether it is called once `.grad` has changed, else with the gradient before that.

    Attributes:
        hook: what is called.
    """

    def __init__(self, hook: Hook, parameter: Tensor, *, accumulated: bool) -> None:
        self.hook, self._accumulated = hook, accumulated
        self._parameter = weakref.ref(parameter)
        self._handle: Any = None
        self.put_on()

    def put_on(self) -> None:
        """Put it on, again."""
        parameter, reference = self._parameter(), weakref.ref(self.hook)
        if parameter is None or not parameter.requires_grad:
            return

        def call(*args: Any) -> None:
            if (live := reference()) is not None:
                live(*args)

        # a parameter that is handed to another process leaves the hook behind, without a warning
        call.__torch_unserializable__ = True  # type: ignore[attr-defined]
        register: Any = parameter.register_post_accumulate_grad_hook if self._accumulated else parameter.register_hook
        self._handle = register(call)

    def take_off(self) -> bool:
        """Take it off; whether it was on. A dict that this leaves empty would still be asked in every backward."""
        handle, self._handle, parameter = self._handle, None, self._parameter()
        if handle is None:
            return False
        handle.remove()
        kind = "_post_accumulate_grad_hooks" if self._accumulated else "_backward_hooks"
        if parameter is not None and getattr(parameter, kind) is not None and not getattr(parameter, kind):
            with contextlib.suppress(RuntimeError, TypeError):
                setattr(parameter, kind, None)
        return True

    def remove(self) -> None:
        """Take it off for good."""
        self.take_off()
        self._parameter = lambda: None  # type: ignore[assignment]


class Handles(list[Any]):
    """The handles of one scope's hooks, in the order they were put on; some of them may be off for a while.

    Attributes:
        parking: those that are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parking = Parking()
        self._off = False, 0
        """Whether all are off, and how many there were then: asked after every step."""

    def park(self, always: Samples, *, every: bool) -> None:
        """Take hooks off until `unpark`: those that do not look at each step, or all. Never within a forward.

        Args:
            always: the switch of those that look at each step.
            every: take these off too.
        """
        if self._off == (every, len(self)):
            return
        if self._off[0]:
            self.unpark()
        hooks = (one for one in self if isinstance(one, ModuleHook | ParameterHook))
        self.parking.park([one for one in hooks if every or one.hook.switch is not always])
        self._off = every, len(self)

    def unpark(self) -> None:
        """Put them back where they were."""
        self._off = False, 0
        self.parking.unpark()


class Parking:
    """Hooks that are off for a while, and where they were."""

    def __init__(self) -> None:
        self._compiled = frames_compiled()
        self._modules: dict[int, tuple[dict[int, Any], list[tuple[int, Any]]]] = {}
        """For each dict of a module that hooks were taken out of: all that it held, in order."""
        self._hooks: dict[int, ModuleHook] = {}
        self._parameters: list[ParameterHook] = []

    def park(self, hooks: Sequence[ModuleHook | ParameterHook]) -> None:
        """Take these off, unless something was compiled since the model is watched."""
        if frames_compiled() != self._compiled or not before_compiling(self, "unpark"):
            return
        for hook in hooks:
            if isinstance(hook, ParameterHook):
                if hook.take_off():
                    self._parameters.append(hook)
            elif hook.number in hook.held:
                _, all_held = self._modules.setdefault(id(hook.held), (hook.held, []))
                known = {number for number, _ in all_held}
                all_held += [item for item in hook.held.items() if item[0] not in known]
                self._hooks[hook.number] = hook
                del hook.held[hook.number]

    def unpark(self) -> None:
        """Put all back: among the hooks of others each has the place that it had."""
        modules, hooks, parameters = self._modules, self._hooks, self._parameters
        self.forget()
        for held, before in modules.values():
            now = dict(held)
            ours = {number for number, _ in before if number in hooks and not hooks[number].removed}
            held.clear()
            held.update((number, hook) for number, hook in before if number in now or number in ours)
            held.update(now)
        for parameter in parameters:
            parameter.put_on()

    def forget(self) -> None:
        """They stay off."""
        self._modules, self._hooks, self._parameters = {}, {}, []
