"""Whether what earlier passes of a step deposited still counts: it shows in the gradients that are held.

Backward may have deposited for nothing: an exception ended a step halfway, SAM runs the model twice, an attack or a
meta-learner runs it inside a step.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from flowscope.hooks.hooks import Switch
from flowscope.instruments.raw_gradients import spread
from flowscope.model.parameters import ParameterList
from flowscope.model.zero import steps_as_copy


class Passes:
    """The forwards of the step under way, and whether the gradients of earlier passes are still held.

    Args:
        parameters: of the user's model.
        switch: of the scope's hooks.
        exact_steps: so many sampled steps, the first, are told to the bit.

    Attributes:
        forwards: training forwards of the root since it was attached.
        fills_grad: whether this loop leaves gradients in `.grad` at all (`torch.autograd.grad` does not); None until a
            step has shown it.
    """

    def __init__(self, parameters: ParameterList, switch: Switch, exact_steps: int) -> None:
        self._parameters, self._switch, self._exact_left = parameters, switch, exact_steps
        self.forwards = self._at_begin = 0
        self.fills_grad: bool | None = None
        self._threads: set[int] = set()
        """In which forwards of the root are under way."""
        self._used = False
        """An optimizer found gradients in this step (one that steps inside backward lets go of them)."""
        self._some: list[tuple[int, Tensor]] = []
        """A few of the parameters as the step began, with their numbers."""

    def begins_in_thread(self) -> bool:
        """A forward of the root begins in this thread; whether another one is under way in another thread."""
        self._threads.add(threading.get_ident())
        return len(self._threads) > 1

    def ends_in_thread(self) -> None:
        """It has ended, or raised."""
        self._threads.discard(threading.get_ident())

    def review(self) -> str:
        """What a further forward of a sampled step says of the passes before it: what instruments do with them.

        "discard" where their gradients were thrown away, "set_aside" where they left none and no step has shown yet
        whether this loop fills `.grad`, "" where they count.
        """
        if self._gradients_were_dropped():
            return "discard"
        return "set_aside" if self.fills_grad is None and self._holds_no_gradient() else ""

    def of_step(self) -> int:
        """How often the root ran with gradient in the step under way (0: it runs inside compiled code)."""
        return self.forwards - self._at_begin

    def begin_step(self, *, sampling: bool) -> None:
        """The next step begins."""
        self._used = False
        self._at_begin = self.forwards
        self._switch.exact = sampling and self._exact_left > 0
        if sampling:
            at = self._parameters.at
            if not self._some or not all(p is at(i) and p.requires_grad for i, p in self._some):
                now = enumerate(self._parameters.current())
                trainable = [(i, p) for i, p in now if p is not None and p.requires_grad]
                self._some = [*trainable[:1], *spread(trainable)]

    def gradients_used(self) -> None:
        """An optimizer is about to use the gradients."""
        self._used = self._used or self._holds_any()

    def step_ended(self) -> None:
        """A sampled step has ended: it shows whether this loop fills `.grad`, and is one told to the bit less."""
        self.fills_grad = self._used or self._holds_any()
        self._exact_left -= self._switch.exact

    def _holds_any(self) -> bool:
        # modules that were replaced are only looked for where none is seen
        looked = (look() for look in (self._parameters.current, self._parameters.follow))
        return any(p is not None and p.grad is not None for now in looked for p in now)

    def _gradients_were_dropped(self) -> bool:
        """Whether no parameter holds a gradient: what backward left since the step began was thrown away.

        So it is where an exception ended a step halfway and the loop went on with the next batch, and between the two
        passes of SAM. Gradients set to zero instead of None are only looked at on the host, the small ones first.
        """
        return (self.fills_grad or self._switch.left_gradients) and self._holds_no_gradient()

    def _holds_no_gradient(self) -> bool:
        held_now = [p for p in self._parameters.follow() if p is not None]
        if not all(p.is_leaf for p in held_now):
            # weights that torch.func.functional_call has put in place for this forward
            held_now = [p for _, p in self._some]
        trainable = [p for p in held_now if p.requires_grad and p.is_leaf]
        if not trainable or hasattr(trainable[0], "to_local") or steps_as_copy(trainable[0]):
            return False  # FSDP keeps unreduced gradients elsewhere, and so does ZeRO
        held = [(i, p.grad) for i, p in enumerate(trainable) if p.grad is not None]
        if held and not all(gradient.is_cpu and gradient.layout == torch.strided for _, gradient in held):
            return False
        return not any(bool(gradient.any()) for _, gradient in [*spread(held), *held])
