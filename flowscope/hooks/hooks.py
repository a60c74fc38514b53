"""The only file that hooks a model: its hooks survive pickling as no-ops, are guarded (`flowscope.faults`), come off.

A forward hook plus `Tensor.register_hook` inside it is the one mechanism used on activations: module backward hooks
break in-place operations, never fire on dict outputs and switch compilation off. Side effects under `torch.compile`
are in-place additions to preallocated tensors only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.faults import LOGGER, Faults, Hook, Observe, StepHook
from flowscope.hooks import compiled
from flowscope.hooks.canary import Canary
from flowscope.hooks.handles import Handles, ModuleHook, ParameterHook
from flowscope.hooks.turns import Turns
from flowscope.model.hidden_state import hidden_input
from flowscope.torch_internals import (
    accumulates_into,
    at_end_of_backward,
    backward_under_way,
    is_batched,
    is_marked,
    is_view,
    mark,
    no_training_pass,
    run_uncompiled,
)
from flowscope.torch_internals import in_backward as in_backward


class Mask:
    """Hides what one thread runs, and the backward passes it begins, from every scope."""

    def __init__(self) -> None:
        self.on = 0
        """How many threads hide something: asked first, as mostly none does."""
        self._lock = threading.Lock()

    def hides(self) -> bool:
        """Whether what runs now is hidden; in traced code, which has no thread, whether anything is."""
        return self.on > 0 and (torch.compiler.is_compiling() or is_marked())

    def count(self, more: int) -> None:
        """So many threads more hide something."""
        with self._lock:
            self.on += more


MASK = Mask()


@contextlib.contextmanager
def masked() -> Iterator[None]:
    """Hide what runs inside from every attached scope: slow probes and `jacobian_spectrum` run the model so."""
    before = is_marked()
    try:
        MASK.count(1)
        mark(True)
        yield
    finally:
        mark(before)
        MASK.count(-1)


def counts() -> bool:
    """Whether what runs now may be a part of the training."""
    return not MASK.hides() and not no_training_pass()


class Switch:
    """What every hook asks first. Set between steps only, so that a compiled model has two graphs: on and off."""

    def __init__(self, *, sampling: bool = False) -> None:
        self.sampling = sampling
        self.slow = False
        self.seldom = False
        """What costs more than most is looked at. Not asked in compiled code, where it would be a third graph."""
        self.exact = False
        """In eager, hidden states are fingerprinted (`flowscope.instruments.exact_points`)."""
        self.paused = False
        self.in_closure = False
        """The optimizer itself is running the model (LBFGS, Lightning): its weights change before the step ends."""
        self.stale = False
        """A foreign optimizer stepped: what is pending belongs to it unless our own optimizer steps next."""
        self.left_gradients = False
        """A backward of this step has left gradients in `.grad` (known where parameters are watched)."""


ALWAYS = Switch(sampling=True)
"""The switch of hooks that look at every step."""
OFF = Switch()
"""That of hooks that look at none."""


run_uncompiled(Hook.__call__.__code__)


class Hooks:
    """All hooks of one scope, removed together; `close` is idempotent."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.switch = Switch()
        """Of the scope's sampled steps."""
        self.canary = Canary()
        self.on_stale_run: Callable[[], Any] = lambda: None
        """To be called when a flow begins while the switch is stale."""
        self.trained: Callable[[], Iterable[Tensor | None]] = lambda: ()
        """The parameters of the model."""
        self._pass = -1, False
        """The backward pass that was asked about last, and whether it is a part of a forward."""
        self.optimizers: Callable[[], Sequence[Any]] = lambda: ()
        """Those known to hold parameters of the model, in the order they step."""
        self.turns = Turns()
        self.statistics: list[Any] = []
        """`PointStatistic`s: added up at the points of all flows, beside what flowscope itself measures there."""
        self.handles = Handles()
        self._leaves: dict[tuple[int, str, Hashable], Any] = {}
        self._warned: set[str] = set()

    def warn_once(self, sentence: str) -> None:
        """Log a warning, unless this one was logged before."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            LOGGER.warning("flowscope: %s.", sentence)

    def hook(self, fuse: str, observe: Observe, switch: Switch | None = None) -> Hook:
        """A guarded hook, to be registered or called by who asks for it. With a `switch`, only while it is sampling."""
        return Hook(fuse, observe, self.faults, switch or ALWAYS, counts, torch.compiler.is_compiling)

    def step_hook(self, fuse: str, observe: Observe, otherwise: Callable[..., object] = lambda *args: None) -> StepHook:
        """Likewise one that every step needs; where it fails, `otherwise` is called."""
        return StepHook(fuse, observe, self.faults, ALWAYS, counts, torch.compiler.is_compiling, otherwise=otherwise)

    def before_all(self, module: nn.Module, fuse: str, observe: Observe) -> Any:
        """Call `observe(module, args, kwargs)` before all other hooks, in every step; a fault costs that step alone."""
        return self.keep(ModuleHook(module, self.step_hook(fuse, observe), before=True, prepend=True))

    def before(
        self, module: nn.Module, fuse: str, observe: Observe, switch: Switch | None = None, *, first: bool = False
    ) -> Any:
        """Call `observe(module, args, kwargs)` before each forward of `module`; returns the removable handle."""
        return self.keep(ModuleHook(module, self.hook(fuse, observe, switch), before=True, prepend=first))

    def after(
        self, module: nn.Module, fuse: str, observe: Observe, switch: Switch | None = None, *, always: bool = False
    ) -> Any:
        """Call `observe(module, args, kwargs, output)` after each forward of `module`; likewise.

        With `always`, also where the forward raises.
        """
        return self.keep(ModuleHook(module, self.hook(fuse, observe, switch), always=always))

    def change(self, module: nn.Module, change: Callable[[Tensor], Tensor], *, output: bool) -> None:
        """Change the hidden state that goes into a module in training, or comes out: for a run made to show that."""

        def into(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = hidden_input(args, kwargs)
            if x is None or not torch.is_grad_enabled():
                return None
            y = change(x)
            new = {key: y if value is x else value for key, value in kwargs.items()}
            return tuple(y if value is x else value for value in args), new

        def out(module: nn.Module, args: Any, returned: Any) -> Any:
            return change(returned) if isinstance(returned, Tensor) and torch.is_grad_enabled() else None

        if output:
            self.keep(module.register_forward_hook(out, prepend=True))
        else:
            self.keep(module.register_forward_pre_hook(into, with_kwargs=True, prepend=True))

    def before_accumulation(self, parameter: Tensor, fuse: str, observe: Observe, switch: Switch | None = None) -> Any:
        """Call `observe(gradient)` before a backward pass adds the gradient to `parameter.grad`; likewise."""
        hook = self.hook(fuse, observe, switch)
        return self.keep(ParameterHook(hook, parameter, accumulated=False))

    def after_accumulation(self, parameter: Tensor, fuse: str, observe: Observe, switch: Switch | None = None) -> Any:
        """Call `observe(parameter)` after each backward pass that added to `parameter.grad`; likewise."""
        hook = self.hook(fuse, observe, switch)
        return self.keep(ParameterHook(hook, parameter, accumulated=True))

    def after_backward(self, fuse: str, observe: Callable[[], None]) -> None:
        """Call `observe()` once the backward pass under way has ended, and what others do at its end (DDP) is done."""
        self.faults.guard(
            fuse,
            at_end_of_backward,
            lambda: at_end_of_backward(lambda: self.faults.meter.time(self.faults.guard, fuse, observe)),
        )

    def keep(self, handle: Any) -> Any:
        """Take over a removable handle (an optimizer's hook), and return it."""
        self.handles.append(handle)
        return handle

    def on_gradient(self, x: Tensor, fuse: str, deposit: Callable[[Any], None], slot: Hashable) -> None:
        """Call `deposit(gradient)` when the gradient of x arrives (detached, without recording a graph).

        In compiled code of a torch that cannot trace this, `deposit(None)` is called at once.

        A hook dies with the graph, but a leaf (a parameter that is itself a hidden state) outlives it: there each
        `slot` has one hook, the newest, until `release_leaves`.
        """
        compiling = torch.compiler.is_compiling()
        if compiling and not compiled.HOOKED_INTERMEDIATES:
            deposit(None)
            return
        hook = _gradient_hook(fuse, deposit, self.faults, self._inside_a_forward)
        if compiling:
            _register(x, hook)
            return
        handle = _register_on_view(x, hook) if is_view(x) else _register(x, hook)
        if x.is_leaf:
            key = (id(x), fuse, slot)
            if (older := self._leaves.pop(key, None)) is not None:
                older.remove()
            self._leaves[key] = handle

    def _inside_a_forward(self) -> bool:
        """Whether the backward pass under way is itself a part of a loss: a gradient penalty, a physics-informed one.

        It records a graph and asks for no gradient of the model's parameters. What it sends through the points is not
        the gradient of the loss.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        task = backward_under_way()
        if task != self._pass[0]:
            trained = (p for p in self.trained() if p is not None and p.requires_grad and p.is_leaf)
            self._pass = task, not any(map(accumulates_into, trained))
        return self._pass[1]

    def remove(self, *handles: Any) -> None:
        """Remove some hooks before the others."""
        for handle in handles:
            handle.remove()
        removed = {id(handle) for handle in handles}
        self.handles[:] = [kept for kept in self.handles if id(kept) not in removed]

    def park(self, *, every: bool) -> None:
        """Take hooks off until `unpark`: those that look at sampled steps, or `every` one. Never within a forward."""
        self.handles.park(ALWAYS, every=every)

    def unpark(self) -> None:
        """Put them back where they were."""
        self.handles.unpark()

    def release_leaves(self) -> None:
        """Remove the hooks on leaf tensors."""
        while self._leaves:
            self._leaves.popitem()[1].remove()

    def close(self) -> None:
        """Remove every hook, and let go of who registered them."""
        self.on_stale_run, self.optimizers, self.trained = lambda: None, tuple, tuple
        self.faults.attempt("removing a hook", self.release_leaves)
        self.handles.parking.forget()
        self.faults.remove_all(self.handles)


HIDDEN_BASES = ("AddmmBackward0", "MmBackward0", "torch::autograd::CopySlices")


def _register(x: Tensor, hook: Callable[[Tensor], None]) -> Any:
    return x.register_hook(hook)  # type: ignore[no-untyped-call]


def _register_on_view(x: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook for a view so that it also counts where an in-place operation follows.

    Such an operation takes the view's node out of the graph, and hooks on it fall silent. The base gets the same
    gradient, after the view: alone where it is the same values (a Linear of [B, T, D] returns a view of its product),
    else only where the view's own hook did not fire.
    """
    base = x._base
    if base is None or base.grad_fn is None or base.numel() != x.numel():
        return _register(x, hook)
    if base.grad_fn.name() in HIDDEN_BASES:
        return _register(base, hook)
    fired: list[bool] = []

    def first(gradient: Tensor) -> None:
        fired.append(True)
        hook(gradient)

    def second(gradient: Tensor) -> None:
        if not fired:
            hook(gradient)

    _register(base, second)
    return _register(x, first)


def _gradient_hook(
    fuse: str, deposit: Callable[[Tensor], None], faults: Faults, inside_a_forward: Callable[[], bool]
) -> Callable[[Tensor], None]:
    failed = faults.failed

    def arrives(gradient: Tensor) -> None:
        if not (MASK.hides() or inside_a_forward()):
            deposit(gradient.detach())

    def hook(gradient: Tensor | None) -> None:
        # a compiled graph's output that no loss uses gets None
        if gradient is None or fuse in failed:
            return
        try:
            # a stack of gradients that autograd.grad(is_grads_batched=True) sends through at once is no gradient
            if torch.compiler.is_compiling():
                if not MASK.hides():
                    deposit(gradient.detach())
            elif not is_batched(gradient):
                faults.meter.time(arrives, gradient)
        except Exception as error:
            faults.report(fuse, error)

    return hook
