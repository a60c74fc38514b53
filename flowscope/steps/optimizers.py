"""The optimizers of a model, and their steps as events.

An optimizer given to `watch` (or found because it holds the model's parameters) marks the end of a step in its
post-hook; of several, the last listed. What else steps is foreign. Optimizers that step inside backward (one a
parameter, to free the gradients at once) end the step when that backward ends, in whatever order they come.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from flowscope.errors import FlowscopeError
from flowscope.faults import LOGGER
from flowscope.hooks.hooks import ALWAYS, OFF, Hooks
from flowscope.hooks.steps_of_all import Listener
from flowscope.instruments.wiring import held_by
from flowscope.model.zero import optimizer_of
from flowscope.steps.marks import Marks
from flowscope.steps.phase import Action, Actions, Event
from flowscope.torch_internals import (
    at_end_of_backward,
    backward_under_way,
    in_backward,
    in_reentrant_checkpoint,
    steps_on_stack,
)

OTHER_ORDER = (
    "flowscope: the optimizers step in another order than given: a step ends with that of %s, from the second on. "
    "watch(model, [first, ..., last]) gives the order"
)
Tell = Callable[[Event, Optimizer], Actions]


class OwnOptimizers:
    """The optimizers that hold the model's parameters.

    Attributes:
        known: in the order they step.
        given: whether `watch` was given some; else they are found when they first step.
        marks: what ends a step where there are none.
    """

    def __init__(self, model: nn.Module, given: Any, marks: Marks) -> None:
        self.known: list[Optimizer] = _as_list(_held_by_engine(model) if given is None else given)
        self.given = bool(self.known)
        self.marks = marks
        self._model = model
        self._stepped: set[int] = set()
        """Of the optimizer whose step ends the training step, the first parameter of each group that has stepped."""
        self._replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether it is among them."""
        return optimizer in self.known

    def owns(self, optimizer: Optimizer, *, inside: bool) -> bool:
        """Whether it holds parameters of the model; `inside`: it steps inside the step of another one of them."""
        if self.knows(optimizer):
            return True
        held = held_by(optimizer)
        if not self.given:
            return self._holds(optimizer)
        # one made anew for the same parameters; inside a known one's step it is a part of that (SAM, Lookahead)
        return not inside and (any(held & held_by(known) for known in self.known) or self._takes_over(optimizer))

    def take_in(self, optimizer: Optimizer) -> None:
        """Add an optimizer unknown so far; one made anew for the same parameters takes the older one's place.

        Where the older one steps again, both are in use (a GAN with a shared encoder): it is the first of the two.
        """
        if optimizer in self._replaced:
            self.known.insert(0, optimizer)
            return
        held = held_by(optimizer)
        shared = [i for i, known in enumerate(self.known) if held & held_by(known)]
        older = shared or [i for i, known in enumerate(self.known) if not self._holds(known)]
        for i in older:
            self._replaced.add(self.known[i])
        if older and self.given:
            self.known[older[0]] = optimizer
        kept = [known for i, known in enumerate(self.known) if i not in older or known is optimizer]
        self.known = kept if optimizer in kept else [*kept, optimizer]

    def comes_first(self, optimizer: Optimizer) -> None:
        """Of several it is not the one whose step ends the training step, the last one is still."""
        self.known = [optimizer, *(known for known in self.known if known is not optimizer)]

    def comes_last(self, optimizer: Optimizer) -> None:
        """Its step ends the training step."""
        self.known = [*(known for known in self.known if known is not optimizer), optimizer]

    def goes_on(self, optimizer: Optimizer) -> bool:
        """Whether its step is one of groups that its last steps left out (DeepSpeed's ZeRO steps each by itself)."""
        groups = {id(group["params"][0]) for group in optimizer.param_groups if group["params"]}
        further = bool(self._stepped) and self._stepped.isdisjoint(groups)
        self._stepped = self._stepped | groups if further else groups
        return further

    def _holds(self, optimizer: Optimizer) -> bool:
        held = held_by(optimizer)
        return any(id(p) in held for p in self._model.parameters())

    def _takes_over(self, optimizer: Optimizer) -> bool:
        """Whether it holds the model's parameters, which were replaced since: the known ones hold none of them now."""
        return self._holds(optimizer) and not any(self._holds(known) for known in self.known)

    def last(self, optimizer: Optimizer) -> bool:
        """Whether its step ends the training step."""
        return optimizer is self.known[-1]


class OptimizerClock:
    """Listens to every optimizer of the process, and tells of each as an event.

    Args:
        own: the model's optimizers.
        tell: takes the event and its optimizer, and answers with what the step's table asks for.
        missed: called where a step has ended and the event failed.
        hooks: whose hooks these are.
    """

    def __init__(self, own: OwnOptimizers, tell: Tell, missed: Callable[[], object], hooks: Hooks) -> None:
        self._own, self._tell, self._on_missed, self._turns = own, tell, missed, hooks.turns
        self._joining: Optimizer | None = None
        """Its step belongs to the training step that has just ended, and is no event."""
        self._stepping: Optimizer | None = None
        self._nested = 0
        """How many steps of the same optimizer are inside its step: a subclass calls `super().step()`, and torch hooks
        the step of every class of which there was an instance."""
        self._inside: tuple[int, Optimizer] | None = None
        """The backward in which optimizers step, and the latest of them."""
        self._thread = threading.get_ident()
        """In which the model is trained: other threads train models of their own."""
        self._end = hooks.step_hook("optimizer hook", self._backward_ends, self._missed)
        self._pre = hooks.step_hook("optimizer hook", self._before)
        self._post = hooks.step_hook("optimizer hook", self._after, self._missed)
        hooks.keep(Listener(self._pre, self._post))

    def rest(self, instead: Callable[..., None]) -> None:
        """Listen no more until `listen`: `instead` is called after each step."""
        self._pre.switch, self._post.observe = OFF, instead

    def listen(self) -> None:
        """Listen again."""
        self._pre.switch, self._post.observe = ALWAYS, self._after

    def hear(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of a step that was made while nobody listened."""
        if threading.get_ident() == self._thread and optimizer in self._turns.others:
            self._turns.foreign += 1
        else:
            self._before(optimizer, args, kwargs)
            self._after(optimizer, args, kwargs)

    def runs_here(self) -> None:
        """The model runs in this thread."""
        self._thread = threading.get_ident()

    def _missed(self, *args: Any) -> None:
        """A step of an optimizer of ours has ended, and could not be told."""
        if self._own.known and (not args or args[0] is self._own.known[-1]):
            self._on_missed()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._owned(optimizer):
            return
        if new := not self._own.knows(optimizer):
            self._own.take_in(optimizer)
            self._join(optimizer)
        elif self._own.last(optimizer) and self._stepping is None and self._own.goes_on(optimizer):
            self._turns.plain = False
            self._join(optimizer)
        if not self._turns.of(optimizer):
            self._place(optimizer)
        if self._stepping is optimizer:
            if steps_on_stack(optimizer) > 1:
                self._nested, self._turns.plain = self._nested + 1, False
                return
            self._nested = 0  # the call before this one did not end: it raised
            self._tell(Event.FAILED, optimizer)
        self._stepping = optimizer
        self._turns.begins(optimizer, goes_on=optimizer is self._joining and not new)
        if self._inside is not None and self._inside[0] != backward_under_way() and not in_reentrant_checkpoint():
            self._inside = None  # that backward did not end: it raised
            self._tell(Event.FAILED, optimizer)
        if optimizer is not self._joining:
            self._tell(Event.BEFORE_CLOSURE if _has_closure(optimizer, args, kwargs) else Event.BEFORE, optimizer)

    def _join(self, optimizer: Optimizer) -> None:
        """What steps right after the last one, before the model runs again, belongs to the step that just ended.

        A second optimizer (Muon + AdamW), say.
        """
        self._joining = optimizer if Action.JOIN in self._tell(Event.FOUND, optimizer) else None

    def _place(self, optimizer: Optimizer) -> None:
        """An optimizer steps for the first time: its place in the order follows from what has stepped before it.

        Where the one that is to be the last has stepped once before, the two take turns, and this one comes last. Where
        it has stepped several times (a delayed actor), steps go on to end with it.
        """
        *others, last = self._own.known
        if self._joining is not None or not others:
            return
        if last is not optimizer and self._turns.of(last) == 1:
            self._own.comes_last(optimizer)
            LOGGER.info(OTHER_ORDER, type(optimizer).__name__)
        elif last is optimizer and not self._own.given and self._turns.of(others[-1]) > 1:
            self._own.comes_first(optimizer)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._owned(optimizer):
            if threading.get_ident() == self._thread:
                self._turns.of_others(optimizer)
                self._tell(Event.FOREIGN, optimizer)
            return
        if self._stepping is optimizer and self._nested:
            self._nested -= 1
            return
        self._stepping = None
        self._turns.ended(optimizer)
        if optimizer is self._joining:
            self._joining = None
            return
        inside = in_backward()
        self._tell(Event.LAST if self._own.last(optimizer) and not inside else Event.AFTER, optimizer)
        if inside:
            self._wait_for_backward(optimizer)

    def _owned(self, optimizer: Optimizer) -> bool:
        return self._own.owns(optimizer, inside=self._stepping is not None)

    def _wait_for_backward(self, optimizer: Optimizer) -> None:
        """Let the step end with the backward that this optimizer stepped in."""
        task = backward_under_way()
        waiting = self._inside is not None and self._inside[0] == task
        if not waiting and in_reentrant_checkpoint():
            return  # the backward of one reentrant checkpoint, not the whole
        self._inside, self._turns.plain = (task, optimizer), False
        if not waiting:
            at_end_of_backward(self._end)

    def _backward_ends(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            self._tell(Event.LAST, inside[1])


def _has_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [each for each in args if each is not optimizer]  # torch hands the bound call's arguments on
    return callable(given[0] if given else kwargs.get("closure"))


def _held_by_engine(model: nn.Module) -> Optimizer | None:
    optimizer = innermost(optimizer_of(model))
    return optimizer if isinstance(optimizer, Optimizer) else None


def innermost(optimizer: Any) -> Any:
    """What steps inside of what trainers put around optimizers (accelerate, Lightning, DeepSpeed, one in another)."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer) or hasattr(inner, "param_groups"):
        optimizer = inner
    return optimizer


def _as_list(given: Any) -> list[Optimizer]:
    if given is None:
        return []
    found: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
    out = []
    for item in found:
        optimizer = innermost(item)
        if not isinstance(optimizer, Optimizer):
            raise FlowscopeError(
                f"watch(optimizer=...): got {type(item).__name__}, expected a torch.optim.Optimizer or a list of them "
                "in the order they step. Without one, call scope.step() at the end of each step."
            )
        out.append(optimizer)
    return out
