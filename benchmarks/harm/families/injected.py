"""A fault in any function of flowscope changes no number of the training, and the other records keep coming.

One function at a time is made to raise, from its first or third call on, in one phase of a run: while `watch` attaches,
while the loop trains, while records are read, while the scope closes. Left out are the guard itself, the public calls
and the checks of their arguments, and what only the commands, the views and other integrations run.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import flowscope
from benchmarks.harm.attack import Outcome, Plan
from benchmarks.harm.programs import QUIET, Mixed, Stack, hooks_of, left_behind, listening, loss_of, same

CASES = 2000
STEPS = 4
PHASES = "watch", "train", "read", "close"

EQUAL = "injected: the training is bitwise that of the bare run"
HELD = {
    "watch": "injected in watch: the script goes on",
    "train": "injected in training: nothing escapes",
    "read": "injected in records, alerts, summary, state_dict: nothing escapes",
    "close": "injected in close: nothing escapes",
}
COMING, ONCE, NOTHING_LEFT = (
    "injected in training: later records keep coming",
    "injected: said, in one line a fuse",
    "injected: no hook is left",
)
FIRST = {
    EQUAL: (2007, 2007),
    HELD["watch"]: (217, 25),
    HELD["train"]: (2060, 2007),
    HELD["read"]: (42, 1),
    HELD["close"]: (66, 58),
    COMING: (2007, 1631),
}
LEFT_OUT = (
    "flowscope.faults", "flowscope.errors", "flowscope.arguments", "flowscope.schedule", "flowscope.config",
    "flowscope.cli", "flowscope.launch", "flowscope.live", "flowscope.trials", "flowscope.testing", "flowscope.views",
    "flowscope.integrations", "flowscope.extras", "flowscope.plot", "flowscope.merging", "flowscope.jacobian",
    "flowscope.__main__",
)  # fmt: skip
ENTRANCES = (
    "flowscope.scope.watch", "flowscope.scope.Scope.", "flowscope.hooks.attention_calls.Looking.__torch",
    "flowscope.hooks.steps_of_all._before", "flowscope.hooks.steps_of_all._after", "flowscope.meter.Meter.__init__",
)  # fmt: skip
"""What the user's program or torch calls straight, and what the guard is made of; their insides are tried."""
NEEDED = {
    COMING: (
        "flowscope.records.Record.__init__", "flowscope.steps.losses.StepLoss.__init__",
        "flowscope.steps.ended.EndedStep.__init__",
    ),
    NOTHING_LEFT: (
        "flowscope.hooks.hooks.Hooks.keep", "flowscope.hooks.handles.ParameterHook.remove",
        "flowscope.hooks.handles.ModuleHook.remove",
    ),
}  # fmt: skip
"""What cannot hold without them: no record where none can be made, no hook taken off by what raises. The rest holds."""
SPECIAL = (
    "__init_subclass__",
    "__class_getitem__",
    "__reduce__",
    "__hash__",
    "__eq__",
    "__repr__",
    "__del__",
    "__new__",
)


class InjectedError(RuntimeError):
    """The fault."""


# -- the programs -----------------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """One way to train.

    Attributes:
        model: makes it.
        scaled: whether a GradScaler scales the loss.
        closure: whether the optimizer runs the model itself.
        told: whether `watch` is given the optimizer.
        wrapped: whether the residual merges are replaced.
    """

    model: Callable[[], nn.Module] = Stack
    scaled: bool = False
    closure: bool = False
    told: bool = True
    wrapped: bool = False


LOOPS = {
    "mixed": Loop(Mixed),
    "plain": Loop(),
    "scaler": Loop(scaled=True),
    "no optimizer given": Loop(told=False),
    "closure": Loop(closure=True),
    "wrapped": Loop(wrapped=True),
}


@dataclass
class Fault:
    """Which function raises, and when.

    Attributes:
        code: of the function.
        phase: the one in which it does.
        at: from its so-manieth call on.
        now: the phase under way.
        calls: how often it was called in its phase.
    """

    code: CodeType | None = None
    phase: str = ""
    at: int = 1
    now: str = ""
    calls: int = 0

    def strike(self) -> None:
        """The function was called."""
        if self.now == self.phase:
            self.calls += 1
            if self.calls >= self.at:
                raise InjectedError("injected")


@dataclass
class Seen:
    """What a run left: of the training, and of the scope."""

    state: list[Tensor] = field(default_factory=list)
    escaped: str = ""
    records: int = 0
    hooks: int = 0
    errors: list[str] = field(default_factory=list)


class Sink:
    """Counts what it is given."""

    def write(self, event: object) -> None:
        """Count it."""

    def close(self) -> None:
        """Nothing to do."""


def run(loop: Loop, fault: Fault | None) -> Seen:
    """Train; watched, with a fault in it, unless None."""
    seen, folder = Seen(), tempfile.mkdtemp()
    torch.manual_seed(3)
    np.random.seed(3)
    model = loop.model()
    if loop.wrapped:
        flowscope.wrap(model, mode="keel", example_inputs=torch.zeros(1, 5, 6))
    kind = functools.partial(torch.optim.LBFGS, max_iter=2) if loop.closure else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    before = hooks_of(model, optimizer)
    losses: list[Tensor] = []
    with listening() as said:
        try:
            _run(loop, model, optimizer, fault, folder, losses, seen)
        except Exception as error:
            seen.escaped = f"{fault.now if fault else ''}: {type(error).__name__}: {error}"
        seen.errors = said.errors
    seen.hooks = hooks_of(model, optimizer) - before
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()  # one that a fault left on would see the next case
    seen.state = left_behind(model, optimizer, losses)
    shutil.rmtree(folder, ignore_errors=True)
    return seen


def _run(
    loop: Loop, model: nn.Module, optimizer: Any, fault: Fault | None, folder: str, losses: list[Tensor], seen: Seen
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if loop.scaled else None
    scope = None
    if fault is not None:
        fault.now = "watch"
        scope = flowscope.watch(
            model, optimizer if loop.told else None, log_dir=folder, every=1, sinks=[Sink()], scaler=scaler,
            on_alert=lambda alert: None, config=QUIET,
        )  # fmt: skip
        fault.now = "train"
    try:
        for step in range(STEPS):
            loss = _step(loop, model, optimizer, scaler, step)
            losses.append(loss.detach())
            if scope is not None:
                scope.step(loss=loss)
    finally:
        if scope is not None and fault is not None:
            _read_and_close(scope, fault, seen)


def _step(loop: Loop, model: nn.Module, optimizer: Any, scaler: Any, step: int) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step) * (float("nan") if step == STEPS - 1 else 1.0)
        (scaler.scale(loss) if scaler else loss).backward()
        return loss

    if loop.closure:
        return optimizer.step(closure)
    loss = closure()
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    return loss


def _read_and_close(scope: flowscope.Scope, fault: Fault, seen: Seen) -> None:
    fault.now = "read"
    try:
        scope.records, scope.alerts, scope.summary(), scope.state_dict()
        fault.now = "close"
        scope.close()
    finally:
        fault.now = "end"
        with suppress(Exception):
            seen.records = len(scope.records)
        scope.close()


# -- the functions ----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a function is held: the class or the modules, and its name there."""

    name: str
    holders: list[Any]
    attribute: str
    held: Any


def modules() -> list[ModuleType]:
    """The modules of flowscope in which faults are made."""
    for found in pkgutil.walk_packages(flowscope.__path__, "flowscope."):
        if not found.name.startswith(LEFT_OUT):
            importlib.import_module(found.name)
    names = [name for name in sys.modules if name.startswith("flowscope.") and not name.startswith(LEFT_OUT)]
    return [sys.modules[name] for name in sorted(names)]


def places() -> dict[CodeType, Place]:
    """Every function and method, by its code."""
    found: dict[CodeType, Place] = {}
    every = modules()
    for module in every:
        for name, held in list(vars(module).items()):
            if isinstance(held, FunctionType) and held.__module__ == module.__name__:
                holders = [other for other in every if vars(other).get(name) is held]
                found[held.__code__] = Place(f"{module.__name__}.{name}", holders, name, held)
            elif isinstance(held, type) and held.__module__ == module.__name__:
                found |= _methods(f"{module.__name__}.{name}", held)
    return {code: place for code, place in found.items() if not place.name.startswith(ENTRANCES)}


def _methods(path: str, kind: type) -> dict[CodeType, Place]:
    found = {}
    for name, held in list(vars(kind).items()):
        inner = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
        inner = getattr(inner, "func", inner)  # cached_property
        if isinstance(inner, FunctionType) and name not in SPECIAL and inner.__module__ == kind.__module__:
            found[inner.__code__] = Place(f"{path}.{name}", [kind], name, held)
    return found


@contextmanager
def broken(place: Place, fault: Fault) -> Iterator[None]:
    """The function strikes first."""
    with ExitStack() as stack:
        for holder in place.holders:
            stack.enter_context(mock.patch.object(holder, place.attribute, _striking(place.held, fault)))
        yield


def _striking(held: Any, fault: Fault) -> Any:
    if isinstance(held, property):
        return property(_striking(held.fget, fault), held.fset)
    if isinstance(held, functools.cached_property):
        return held  # what is kept raises where it is made: its own function is in another place
    if isinstance(held, (staticmethod, classmethod)):
        return type(held)(_striking(held.__func__, fault))

    @functools.wraps(held)
    def striking(*args: Any, **named: Any) -> Any:
        fault.strike()
        return held(*args, **named)

    return striking


def called(loop: Loop, known: dict[CodeType, Place]) -> list[tuple[str, CodeType]]:
    """Which functions run in which phase of a watched training."""
    seen: dict[tuple[str, CodeType], None] = {}
    fault = Fault()

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in known:
            seen.setdefault((fault.now, frame.f_code))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run(loop, fault)
    finally:
        sys.setprofile(before)
    return [key for key in seen if key[0] in PHASES]


# -- the attacks ------------------------------------------------------------------------------------------------------


def attacks(plan: Plan) -> Iterator[Outcome]:
    """Draw a loop, a phase and a function that it calls there."""
    known = places()
    names = (
        list(LOOPS) if plan.share > 0.1 else plan.some(list(LOOPS))
    )  # each loop costs a second before the first fault
    bare = {name: run(LOOPS[name], None) for name in names}
    good = {name: run(LOOPS[name], Fault()) for name in names}
    for name in names:
        yield Outcome(EQUAL, f"{name}, no fault", same(bare[name].state, good[name].state), good[name].escaped)
    drawn = [(name, *key) for name in names for key in called(LOOPS[name], known)]
    for name, phase, code in plan.random.sample(drawn, min(len(drawn), plan.count(CASES))):
        fault = Fault(code, phase, plan.random.choice((1, 3)) if phase == "train" else 1)
        with broken(known[code], fault):
            seen = run(LOOPS[name], fault)
        if fault.calls >= fault.at:
            case = f"{name}: {known[code].name} in {phase}, call {fault.at}"
            judged = _judged(case, phase, seen, bare[name], good[name])
            yield from (outcome for outcome in judged if known[code].name not in NEEDED.get(outcome.row, ()))


def _judged(case: str, phase: str, seen: Seen, bare: Seen, good: Seen) -> Iterator[Outcome]:
    yield Outcome(HELD[phase], case, not seen.escaped, seen.escaped)
    if not seen.escaped:
        yield Outcome(EQUAL, case, same(bare.state, seen.state))
    yield Outcome(NOTHING_LEFT, case, seen.hooks == 0, f"{seen.hooks} hooks")
    yield Outcome(
        ONCE, case, len(seen.errors) == len({error.split(" failed")[0] for error in seen.errors}), str(seen.errors)
    )
    if phase == "train":
        yield Outcome(
            COMING, case, seen.records >= good.records, f"{seen.records} of {good.records}; {seen.errors[:1]}"
        )
    elif phase == "watch" and not seen.escaped:
        yield Outcome(ONCE, case, bool(seen.errors) or seen.records == good.records, f"silent, {seen.records} records")
