"""Which attention layer runs: the module a call of attention belongs to, in eager and in compiled code.

Outside of compiled code that is the innermost module under way. What is traced may write nothing but tensors that
exist: there a mark on the device says which layer runs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowscope.hooks.attention_calls import Looking
from flowscope.hooks.hooks import Hooks
from flowscope.model.hidden_state import is_compiling
from flowscope.model.plan import display_path
from flowscope.torch_internals import HOOKED_INTERMEDIATES, in_backward, in_compiled_call, is_compiled

NOWHERE = -1
"""The mark where no layer runs."""


class Layer:
    """One module inside which attention may run.

    Args:
        path: of the module.
        module: likewise.
        number: among all of them.
        within: whether another one is around it.
    """

    def __init__(self, path: str, module: nn.Module, number: int, *, within: bool) -> None:
        self.module = module
        self.label, self.number, self.within = display_path(path), number, within
        self._chain = re.sub(r"\d+", "", path)
        self.has_run = False
        """Whether it ran outside of compiled code."""
        self.entered = False
        """Whether a pass with gradient of the forward under way was seen."""
        self.marks: dict[torch.device, Tensor] = {}
        """[1] its number, on each device."""

    def follows(self, other: Layer) -> bool:
        """Whether it is further down the same chain of layers."""
        return self.number > other.number and self._chain == other._chain

    def is_first_pass(self, *, recomputing: bool) -> bool:
        """Whether no earlier pass of a call waits for its gradient: a checkpoint's recomputation mostly is none."""
        if recomputing:
            return not self.entered
        self.entered = True
        return True


@dataclass(slots=True)
class Call:
    """A call of a layer that is under way.

    Attributes:
        layer: which one.
        pushed: whether it put the mode on the stack.
        products: the last two axes of the products made in it.
    """

    layer: Layer
    pushed: bool
    products: set[tuple[int, ...]] = field(default_factory=set)


class Forward(Protocol):
    """A forward of the model."""

    def end(self) -> None:
        """It has ended."""


class AttentionLayers:
    """The layers of a model; while one runs, torch functions that may be part of attention are shown.

    Args:
        held: paths and modules.
        saw: told of each function: its kind, what it returned, its arguments.
        begin: told where a forward of the model begins outside of compiled code; what it returns is `forward()` until
            it ends.
    """

    def __init__(
        self,
        held: Sequence[tuple[str, nn.Module]],
        saw: Callable[[str, Any, Any, Any], None],
        begin: Callable[[], Forward],
    ) -> None:
        paths = [path for path, _ in held]
        around = [
            [other for other in paths if other != path and path.startswith(f"{other}." if other else "")]
            for path in paths
        ]
        self.all = [
            Layer(path, module, at, within=bool(found))
            for at, ((path, module), found) in enumerate(zip(held, around, strict=True))
        ]
        self.marks: dict[torch.device, Tensor] = {}
        """[1] the number of the layer that runs, on each device; kept where a part of the model is compiled."""
        self.unseen = False
        """Whether compiled code ran on a torch in which attention cannot be seen there."""
        self.has_turn = True
        """Whether this sampled step is one in which layers outside of compiled code are looked at."""
        self._begin = begin
        self._under_way = threading.local()
        self._inside, self._around = Looking(saw), Looking(saw)
        """Pushed while one layer runs, and while the whole model does, where parts of it are compiled."""
        self._whole = False

    def attach(self, modules: Sequence[nn.Module], devices: set[torch.device], hooks: Hooks, fuse: str) -> None:
        """Look while they run.

        Args:
            modules: all of the model, itself first.
            devices: of its parameters.
            hooks: of the scope.
            fuse: what a fault switches off.
        """
        self._hooks, self._modules, self._fuse = hooks, modules, fuse
        for looking in (self._inside, self._around):
            looking.faults, looking.fuse = hooks.faults, fuse
            hooks.keep(looking)  # where the end of a forward failed
        self.marks = {device: torch.full((1,), NOWHERE, device=device) for device in devices}
        for layer in self.all:
            layer.marks = {device: torch.full((1,), layer.number, device=device) for device in devices}
        hooks.before(modules[0], fuse, self._enter_model, hooks.switch)
        # a fuse of its own: it takes off what the end of a layer failed to
        hooks.after(modules[0], f"{fuse} ends with the model", self._leave_model, always=True)
        for layer in self.all:
            hooks.before(layer.module, fuse, partial(self._enter, layer), hooks.switch)
            hooks.after(layer.module, fuse, partial(self._leave_traced, layer), hooks.switch)

    @property
    def _ends(self) -> str:
        return f"{self._fuse} ends"

    def start_forward(self) -> None:
        """A training forward of the model begins."""
        for layer in self.all:
            layer.entered = False

    def calls(self) -> list[Call]:
        """The layers under way in this thread outside of compiled code, the innermost last."""
        calls: list[Call] = self._under_way.__dict__.setdefault("calls", [])
        return calls

    def forward(self) -> Any:
        """What `begin` returned for the forward of the model under way in this thread, None outside of one."""
        return getattr(self._under_way, "forward", None)

    def _looks(self, module: nn.Module) -> bool:
        if self._hooks.switch.paused or not torch.is_grad_enabled():
            return False
        # multi-head attention in evaluation has a kernel of its own, which it leaves where somebody looks
        return module.training or not isinstance(module, nn.MultiheadAttention)

    def _has_turn(self, module: nn.Module) -> bool:
        """Whether it is looked at outside of compiled code, which shows itself in every sampled step."""
        return (self.has_turn or self._whole) and self._looks(module)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        compiles = is_compiling() or in_compiled_call() or any(map(is_compiled, self._modules))
        self._whole = HOOKED_INTERMEDIATES and self._looks(module) and compiles
        self.unseen = self.unseen or (compiles and not HOOKED_INTERMEDIATES)
        if self._whole:
            self._around.start()
        if not is_compiling() and self._has_turn(module):
            self._under_way.forward = self._begin()

    def _leave_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # first, so that no fault leaves them on: that of a layer whose end failed is still there
        for looking in (self._inside, self._around) if not is_compiling() else (self._around,):
            looking.remove()
        forward = None if is_compiling() else self.forward()
        if forward is not None:
            self._under_way.forward = None
            forward.end()

    def _enter(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling():
            self._mark(layer)
            if self._whole and not self._around.is_on_top() and not layer.within:
                self._inside.start()  # inside of a checkpoint, which runs with the mode around it taken off
        elif self._has_turn(module) and layer.is_first_pass(recomputing=in_backward()):
            if not layer.has_run:
                # even where the forward raises: no mode may outlive it. Not before, because the hook's number would be
                # a constant of what is traced, and each of many equal blocks a graph of its own
                self._hooks.after(module, self._ends, partial(self._leave, layer), always=True)
                layer.has_run = True
            self._mark(layer)
            calls = self.calls()
            pushes = not (calls or self._around.is_on_top())
            calls.append(Call(layer, pushes))
            if pushes:
                self._inside.start()

    def _leave_traced(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling():
            for mark in self.marks.values():
                mark.fill_(NOWHERE)
            if self._inside.is_on_top() and not layer.within:
                self._inside.stop()

    def _leave(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls = self.calls() if not is_compiling() else []
        if calls and calls[-1].layer is layer and calls.pop().pushed and self._inside.is_on_top():
            self._inside.stop()

    def _mark(self, layer: Layer) -> None:
        traced = is_compiling()
        for device, mark in self.marks.items():
            if device.type == "cpu" and not traced:
                mark.numpy()[0] = layer.number  # a copy would cost ten times as much
            else:
                mark.copy_(layer.marks[device])  # a tensor, as a number would be a constant of what is traced
