"""When a step begins and ends: the optimizers' own step hooks, or `scope.step` where there is none.

An optimizer given to `watch` (or found because it holds the model's parameters) marks the end of a step in its
post-hook; of several, the last listed. What else steps is foreign. Optimizers that step inside backward (one a
parameter, to free the gradients at once) end the step when that backward ends, in whatever order they come.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flowscope.errors import FlowscopeError
from flowscope.instruments.wiring import held_by
from flowscope.probes.hooks import Hook, Hooks, in_backward


class StepListener(Protocol):
    """What the clock tells of."""

    def before_optimizer(self, optimizer: Optimizer, *, last: bool, closure: bool) -> None:
        """An optimizer of this model is about to step; with a closure, gradients come only during the step."""

    def after_optimizer(self, optimizer: Optimizer, *, last: bool, closure: bool) -> None:
        """It has stepped; `last`: this ends the step."""

    def step_failed(self) -> None:
        """The step that began has raised; its optimizer steps again."""

    def foreign_step(self) -> None:
        """An optimizer that owns none of this model's parameters stepped."""

    def just_ended(self) -> bool:
        """Whether a step has ended and the model has not run since."""

    def joins(self, optimizer: Optimizer) -> None:
        """An optimizer unknown so far steps right after the step's end: it belongs to that step."""


class OptimizerClock:
    """Listens to every optimizer of the process through torch's global hooks, and tells the scope about its own."""

    def __init__(self, model: nn.Module, given: Any, listener: StepListener, hooks: Hooks) -> None:
        self._model, self._listener = model, listener
        self.optimizers: list[Optimizer] = _as_list(given)
        self.given = bool(self.optimizers)
        self._joining: Optimizer | None = None
        self._stepping: Optimizer | None = None
        self._nested = 0
        """How many steps of the same optimizer are inside its step: a subclass calls `super().step()`, and torch hooks
        the step of every class of which there was an instance."""
        self._inside: tuple[int, Optimizer] | None = None
        """The backward in which optimizers step, and the latest of them."""
        self._replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._end = Hook("optimizer hook", self._backward_ends, hooks.faults)
        self._pre = Hook("optimizer hook", self._before, hooks.faults)
        self._post = Hook("optimizer hook", self._after, hooks.faults)
        hooks.keep(register_optimizer_step_pre_hook(_weakly(self._pre)))
        hooks.keep(register_optimizer_step_post_hook(_weakly(self._post)))

    def _owns(self, optimizer: Optimizer) -> bool:
        if any(optimizer is known for known in self.optimizers):
            return True
        held = held_by(optimizer)
        if self.given:
            # one made anew for the same parameters; inside a known one's step it is a part of that (SAM, Lookahead)
            return self._stepping is None and any(held & held_by(known) for known in self.optimizers)
        return any(id(p) in held for p in self._model.parameters())

    def _take_in(self, optimizer: Optimizer) -> None:
        """Add an optimizer unknown so far; one made anew for the same parameters takes the older one's place.

        Where the older one steps again, both are in use (a GAN with a shared encoder): it is the first of the two.
        """
        if optimizer in self._replaced:
            self.optimizers.insert(0, optimizer)
            return
        held = held_by(optimizer)
        older = [i for i, known in enumerate(self.optimizers) if held & held_by(known)]
        for i in older:
            self._replaced.add(self.optimizers[i])
        if older and self.given:
            self.optimizers[older[0]] = optimizer
        kept = [known for i, known in enumerate(self.optimizers) if i not in older or known is optimizer]
        self.optimizers = kept if optimizer in kept else [*kept, optimizer]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._owns(optimizer):
            return
        if all(optimizer is not known for known in self.optimizers):
            self._take_in(optimizer)
            # a second optimizer right after the first (Muon + AdamW) belongs to the step that just ended
            self._joining = optimizer if self._listener.just_ended() else None
            if self._joining is not None:
                self._listener.joins(optimizer)
        if self._stepping is optimizer:
            if _calls_under_way(optimizer) > 1:
                self._nested += 1
                return
            self._nested = 0  # the call before this one did not end: it raised
            self._listener.step_failed()
        self._stepping = optimizer
        if self._inside is not None and self._inside[0] != _backward_under_way() and not _is_recomputed():
            self._inside = None  # that backward did not end: it raised
            self._listener.step_failed()
        if optimizer is not self._joining:
            self._listener.before_optimizer(optimizer, last=self._last(optimizer), closure=_has_closure(args, kwargs))

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._owns(optimizer):
            self._listener.foreign_step()
            return
        if self._stepping is optimizer and self._nested:
            self._nested -= 1
            return
        self._stepping = None
        if optimizer is self._joining:
            self._joining = None
            return
        closure, inside = _has_closure(args, kwargs), in_backward()
        self._listener.after_optimizer(optimizer, last=self._last(optimizer) and not inside, closure=closure)
        if inside:
            self._wait_for_backward(optimizer)

    def _wait_for_backward(self, optimizer: Optimizer) -> None:
        """Let the step end with the backward that this optimizer stepped in."""
        task = _backward_under_way()
        waiting = self._inside is not None and self._inside[0] == task
        if not waiting and _is_recomputed():
            return  # the backward of one reentrant checkpoint, not the whole
        self._inside = task, optimizer
        if not waiting:
            Variable._execution_engine.queue_callback(self._end)

    def _backward_ends(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            self._listener.after_optimizer(inside[1], last=True, closure=False)

    def _last(self, optimizer: Optimizer) -> bool:
        return optimizer is self.optimizers[-1]


def _calls_under_way(optimizer: Optimizer) -> int:
    """How many calls of this optimizer's hooked step are on the stack."""
    frame, count = inspect.currentframe(), 0
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count


def _backward_under_way() -> int:
    return torch._C._current_graph_task_id()


def _is_recomputed() -> bool:
    """Whether a reentrant checkpoint runs its own backward on the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            return True
        frame = frame.f_back
    return False


def _weakly(hook: Hook) -> Callable[..., None]:
    """A global hook that does not keep a forgotten scope and its model alive."""
    reference = weakref.ref(hook)

    def call(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (live := reference()) is not None:
            # torch hands the bound call's arguments on: args[0] is the optimizer itself
            live(optimizer, args[1:] if args and args[0] is optimizer else args, kwargs)

    # what torch.compiler.disable sets: a compiled optimizer.step calls it as plain Python
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(args[0] if args else kwargs.get("closure"))


def _as_list(given: Any) -> list[Optimizer]:
    if given is None:
        return []
    found: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
    out = []
    for item in found:
        # trainers wrap optimizers (accelerate, Lightning): the inner one is what steps
        inner = getattr(item, "optimizer", None)
        optimizer = inner if isinstance(inner, Optimizer) else item
        if not isinstance(optimizer, Optimizer):
            raise FlowscopeError(
                f"watch(optimizer=...): got {type(item).__name__}, expected a torch.optim.Optimizer or a list of them "
                "in the order they step. Without one, call scope.step() at the end of each step."
            )
        out.append(optimizer)
    return out
