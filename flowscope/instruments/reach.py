"""Whether gradients reach the parameters that optimizers hold, and where they do not, what is known of the cause.

On every step the optimizer's own hook asks the parameters that never had a gradient whether they have one now: a look
at `.grad`, no number is read. Where each has had one (most models, after their first step) nothing is asked any more.
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.instruments.wiring import held_by
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.torch_internals import in_backward, is_compiled, next_backward

_parameter = partial(Metric, view="Parameters", rows="parameters", drawn=False)
_model = partial(Metric, view="Parameters", rows="model", drawn=False)

CAUSES = ("left", "backwards", "leaf_loss", "foreign_steps")
"""Rows of `gradient_facts`: 1 where a backward left gradients; how many backward passes the process ran since the last
look; 1 where the loss was a leaf; steps of optimizers that hold none of the model's parameters."""

BY_HAND = "weights change without an optimizer of torch: learning rates, and the gradients that are used, are not seen"


class Reach(Instrument):
    """What the optimizers found in the parameters they hold."""

    name = "reach"
    metrics = (
        _model("steps_made", "Steps of each of the model's optimizers since it is watched.", unit="count"),
        _model("optimizer_turns", "Steps of each optimizer in this training step.", unit="count"),
        _parameter("param_optimizer", "Which of the optimizers holds the parameter, by its number."),
        _parameter(
            "param_waiting",
            "Steps of its optimizer that found no gradient in the parameter, which never had one. 0: it has had one.",
            unit="count",
        ),
        _parameter(
            "param_cleared",
            "1 where backward gave a gradient to a parameter in which the optimizer never found one: the loop takes it "
            "away.",
        ),
        _parameter("param_called", "1 where the module of a parameter that waits for its first gradient has run."),
        _model("gradient_facts", "What is known where no parameter has a gradient, or no optimizer has stepped."),
    )

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Listen to the steps of the optimizers."""
        self._parameters, self._hooks, self._tree = view.parameters, hooks, view.tree
        self._known = 0
        self._waiting: Counter[int] = Counter()
        """By number, the parameters without gradient so far: how many steps found none."""
        self._of: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        """Those that an optimizer holds."""
        self._called: dict[int, Asked] = {}
        self._given: dict[int, Asked] = {}
        """Those that waited for a step: whether backward has given them a gradient."""
        self._eager = self._left = self._found = False
        self._backwards = (-1, np.nan)
        """The number of the last backward pass looked at, and how many there were since the look before."""
        self._follow()
        hooks.turns.heard = partial(hooks.faults.guard, self.fuse, self._heard)

    def _follow(self) -> None:
        count = len(self._parameters.names)
        self._waiting.update(dict.fromkeys(range(self._known, count), 0))
        if count > self._known:
            self._of.clear()
        self._known = count

    def begin_step(self) -> None:
        """Parameters may have been added."""
        self._eager = self._left = self._found = False
        self._follow()

    def start_forward(self) -> None:
        """The model runs outside of compiled code."""
        self._eager = True

    def _heard(self, optimizer: Any, begins: bool) -> None:
        """An optimizer begins a step, or has ended one."""
        if not self._waiting:
            return
        held = self._of.get(optimizer)
        if held is None or self._hooks.switch.sampling:
            ids, at = held_by(optimizer), self._parameters.at
            held = self._of[optimizer] = [i for i in self._waiting if id(at(i)) in ids]
        for i in held:
            parameter = self._parameters.at(i)
            # FSDP1 gives no gradient to what lies on other ranks
            if parameter is None or not parameter.requires_grad or not parameter.numel() or i not in self._waiting:
                continue
            if parameter.grad is not None:
                del self._waiting[i]
            elif begins:
                self._waiting[i] += 1
                self._ask_backward(i, parameter)
            self._release(self._given, i)

    def _ask_backward(self, i: int, parameter: Tensor) -> None:
        """Let backward tell when it gives a gradient to a parameter in which the optimizer found none."""
        if i not in self._given and parameter.is_leaf:
            self._given[i] = asked = Asked()
            asked.handle = self._hooks.after_accumulation(parameter, self.fuse, asked.came)

    def _release(self, all_asked: dict[int, Asked], i: int) -> None:
        """Who has told is asked no more."""
        asked = all_asked.get(i)
        if asked is not None and asked.handle is not None and asked.ran:
            self._hooks.remove(asked.handle)
            asked.handle = None

    def rests(self) -> bool:
        """Where no parameter that an optimizer could train waits for its first gradient."""
        held = {i for numbers in self._of.values() for i in numbers if i in self._waiting}
        return not any(p is not None and p.requires_grad and p.numel() for p in map(self._parameters.at, held))

    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """Where no parameter has a gradient, count the backward passes since the last look."""
        del only, scale
        self._left = self._left or self._hooks.switch.left_gradients
        self._found = self._found or any(p is not None and p.grad is not None for p in self._parameters.current())
        if not self._found and not in_backward():
            last, number = self._backwards[0], next_backward()
            self._backwards = number, np.nan if last < 0 else number - last - 1

    def take(self) -> Taken:
        """No tensors."""
        optimizers, turns = self._hooks.optimizers(), self._hooks.turns
        found: dict[str, tuple[Array, list[str]]] = {}
        self._look(found)
        if not self._found or not optimizers:
            facts = [float(self._left), self._backwards[1], float(turns.leaf_loss), float(turns.foreign)]
            found["gradient_facts"] = np.array(facts), list(CAUSES)
        if any(self._waiting.values()):
            self._ask_modules()
            names = [*self._parameters.names[: self._known]]
            waiting, cleared, called = np.zeros(self._known), np.zeros(self._known), np.full(self._known, np.nan)
            for i, steps in self._waiting.items():
                waiting[i], cleared[i] = steps, i in self._given and self._given[i].ran
                called[i] = self._ran(i)
            columns = {"param_waiting": waiting, "param_cleared": cleared, "param_called": called}
            found |= {name: (values, names) for name, values in columns.items()}
        return Taken(self.name, [], partial(self._read, found), joined=partial(self._look, found))

    def _ran(self, i: int) -> float:
        """Whether the module of a parameter has run, NaN where that is not known: in compiled code no new hook fires.

        But a backward pass of compiled code comes to all that it was given, with no gradient where there is none.
        """
        asked, given = self._called.get(i), self._given.get(i)
        if (asked is not None and asked.ran) or (given is not None and given.empty):
            return 1.0
        return 0.0 if asked is not None and self._eager else np.nan

    def _look(self, found: dict[str, tuple[Array, list[str]]], joined: Any = None) -> None:
        """What the known optimizers hold, one that `joined` after the step among them."""
        optimizers, turns = self._hooks.optimizers(), self._hooks.turns
        if not optimizers:
            return
        kinds = [type(optimizer).__name__ for optimizer in optimizers]
        labels = kinds if len(kinds) == 1 else [f"{kind} {number}" for number, kind in enumerate(kinds)]
        found["steps_made"] = np.array([float(turns.of(o)) for o in optimizers]), labels
        if len(optimizers) > 1:
            made = [float(turns.now[id(o)] + (o is joined)) for o in optimizers]
            holder = {i: float(number) for number, o in enumerate(optimizers) for i in held_by(o)}
            current = self._parameters.current()
            found["optimizer_turns"] = np.array(made), labels
            held = [np.nan if p is None else holder.get(id(p), np.nan) for p in current]
            found["param_optimizer"] = np.array(held), [*self._parameters.names]

    def _ask_modules(self) -> None:
        """Let the modules of parameters that wait tell when they run; those that have told are asked no more."""
        for i in self._called:
            self._release(self._called, i)
        compiled = [path for path, module in self._tree.modules if is_compiled(module)]
        for i, steps in self._waiting.items():
            path = self._parameters.path(i)
            if steps and i not in self._called and not any(f"{path}.".startswith(f"{c}.") or not c for c in compiled):
                self._called[i] = asked = Asked()
                asked.handle = self._hooks.before(self._parameters.holder(i), self.fuse, asked.told)

    def _read(self, found: dict[str, tuple[Array, list[str]]], out: RecordBuilder, parts: list[Array]) -> None:
        del parts
        for name, (values, labels) in found.items():
            out.add(name, values, labels)
        if "steps_made" not in found and bool((out.entries("update_ratio")[1] > 0).any()):
            out.note(BY_HAND)

    def close(self) -> None:
        """Listen no more."""
        self._hooks.turns.heard = lambda optimizer, begins: None


class Asked:
    """Whether a module has run, or a gradient has come, since it was asked to tell."""

    def __init__(self) -> None:
        self.ran = self.empty = False
        self.handle = None

    def told(self, *args: Any) -> None:
        """It did. In compiled code a hook that came later may be traced, and does nothing there."""
        if not is_compiling():
            self.ran = True

    def came(self, parameter: Tensor) -> None:
        """A backward pass has come to a parameter."""
        self.ran, self.empty = parameter.grad is not None, parameter.grad is None
