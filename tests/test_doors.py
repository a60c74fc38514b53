"""The entrances from the user's program, each with what guards it: none lets a fault of ours out."""

from __future__ import annotations

import ast
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from watch_models import Block, Stack, data, loss_of, scaled_step, watched

import flowscope
from flowscope import FlowscopeError
from flowscope.faults import CallBefore, Faults, Hook, StepHook
from flowscope.hooks import attention_layers, flow_observer
from flowscope.instruments import attention, raw_gradients
from flowscope.observation import observation
from flowscope.scripts import after_making
from flowscope.steps import driver, optimizers, scaler
from flowscope.steps.driver import StepDriver

PACKAGE = Path(flowscope.__file__).parent


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWSCOPE_STRICT", raising=False)


def broken(*args: Any, **named: Any) -> Any:
    raise RuntimeError("injected")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


# -- methods of the scope ---------------------------------------------------------------------------------------------


class Broken:
    """In the place of what drives the steps."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("injected")


DOORS: dict[str, tuple[Callable[[Any, Path], Any], Any]] = {
    "step": (lambda scope, path: scope.step(loss=1.0), None),
    "pause": (lambda scope, path: scope.pause(), None),
    "resume": (lambda scope, path: scope.resume(), None),
    "records": (lambda scope, path: [r.step for r in scope.records], [0]),
    "alerts": (lambda scope, path: scope.alerts, []),
    "forwards": (lambda scope, path: scope.forwards, 0),
    "losses_of_backward": (lambda scope, path: scope.losses_of_backward(), None),
    "use_scaler": (lambda scope, path: scope.use_scaler(None), None),
    "optimizers": (lambda scope, path: scope.optimizers, []),
    "parameters_at": (lambda scope, path: len(scope.parameters_at("head")), 2),
    "summary": (lambda scope, path: scope.summary().splitlines()[0], "flowscope: 1 records, last at step 0"),
    "report": (lambda scope, path: scope.report(path / "r.html").name, "r.html"),
    "state_dict": (lambda scope, path: sorted(scope.state_dict()), ["detectors", "samples", "step"]),
    "load_state_dict": (lambda scope, path: scope.load_state_dict({"step": 1, "samples": 1, "detectors": {}}), None),
    "run": (lambda scope, path: len(scope.run.records), 1),
    "resumes": (lambda scope, path: scope.resumes(), None),
    "log_dir": (lambda scope, path: scope.log_dir, None),
    "closed": (lambda scope, path: scope.closed, False),
    "close": (lambda scope, path: scope.close(), None),
}
"""Each public name of a scope: a call of it, and what comes of it while what drives the steps is broken."""


def test_the_table_of_the_doors_is_whole() -> None:
    public = {name for name in vars(flowscope.Scope) if not name.startswith("_")}
    assert public == DOORS.keys()
    held = {name: getattr(held, "fget", held) for name, held in vars(flowscope.Scope).items()}
    guarded = {name for name, function in held.items() if hasattr(function, "__wrapped__")}
    assert public - guarded == {"closed"}  # a flag, which nothing can go wrong with


@pytest.mark.parametrize("name", DOORS)
def test_a_fault_behind_a_door_gives_a_value(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    call, expected = DOORS[name]
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = watched(model, optimizer)
    loss_of(model, data()).backward()
    optimizer.step()
    assert len(scope.records) == 1
    whole, scope._driver = scope._driver, Broken()
    assert call(scope, tmp_path) == expected
    assert len(errors(caplog)) == len(scope._faults.failed)
    scope._driver, scope._closed = whole, False
    scope.close()
    assert not model._forward_hooks


@pytest.mark.parametrize("name", ["step", "summary", "close"])
def test_arguments_that_do_not_fit_are_the_users(name: str) -> None:
    with watched(Stack(2)) as scope, pytest.raises(TypeError, match="unexpected"):
        getattr(scope, name)(lost=1.0)


# -- what torch calls -------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.attention = Block(), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        return x + self.attention(x, x, x, need_weights=False)[0]


ENTRANCES: dict[str, tuple[Any, str]] = {
    "before a forward of the model": (observation.Observation, "_root"),
    "after a forward of a block": (flow_observer.FlowObserver, "_after"),
    "the gradient of a hidden state": (flow_observer.FlowObserver, "_deposit"),
    "the gradient of a parameter": (raw_gradients.RawGradients, "_arrived"),
    "the end of a backward": (raw_gradients.RawGradients, "_read"),
    "before an optimizer's step": (optimizers.OptimizerClock, "_before"),
    "after an optimizer's step": (optimizers.OptimizerClock, "_after"),
    "an update of the GradScaler": (scaler.ScalerWatch, "_updates"),
    "a torch function in an attention layer": (attention.Attention, "saw"),
}
"""What torch calls of ours while a model trains, each with a function that it goes through at once."""


def trained(watch: bool) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(3)
    model = Stack(2, Attending)
    optimizer, grad_scaler = torch.optim.AdamW(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    scope = watched(model, optimizer, scaler=grad_scaler) if watch else None
    losses = [
        scaled_step(model, data(k), grad_scaler, optimizer, overflow="head" if k == 1 else None).detach()
        for k in range(3)
    ]
    if scope is not None:
        scope.close()
    return [*losses, *model.state_dict().values(), *(p.grad for p in model.parameters())], scope


@pytest.mark.parametrize("name", ENTRANCES)
def test_a_fault_behind_an_entrance_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare, _ = trained(watch=False)
    monkeypatch.setattr(*ENTRANCES[name], broken)
    seen, scope = trained(watch=True)
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
    assert len(errors(caplog)) == 1
    assert "injected" in errors(caplog)[0]
    steps = [record.step for record in scope.records]
    assert steps == ([0, 1] if name == "an update of the GradScaler" else [0, 1, 2])  # it tells of the step left out


@pytest.mark.parametrize("name", ["_leave", "_leave_model"])
def test_no_function_mode_outlives_a_scope_that_could_not_take_it_off(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_layers.AttentionLayers, name, broken)
    bare, _ = trained(watch=False)
    seen, _ = trained(watch=True)
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
    assert torch._C._len_torch_function_stack() == 0


def test_hooks_are_registered_in_three_places_only() -> None:
    """A hook of torch elsewhere than in flowscope/hooks would go past the guard; a bench's own runs are no training."""
    bench = ("trials", "comparing", "testing", "jacobian", "merging", "model", "extras", "integrations")
    found = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        names = {getattr(func, "attr", getattr(func, "id", "")) for func in calls}
        if place.parts[0] not in bench and any(n.startswith("register_") and "hook" in n for n in names):
            found.add(str(place))
    assert found == {"hooks/handles.py", "hooks/hooks.py", "hooks/steps_of_all.py", "torch_internals.py"}


# -- attaching --------------------------------------------------------------------------------------------------------


class Hostile(nn.Module):
    """Raises where somebody asks for an attribute that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise KeyError(name) from None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


@pytest.mark.parametrize("inner", ["hostile", "none", "scripted"])
def test_an_odd_model_is_watched_as_far_as_it_can_be(inner: str) -> None:
    model = Stack(2, Hostile if inner == "hostile" else Block)
    if inner == "none":
        model.further = nn.ModuleList([None])  # type: ignore[list-item]
    elif inner == "scripted":
        model.further = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        for k in range(2):
            loss_of(model, data(k)).backward()
            optimizer.step()
    assert [record.step for record in scope.records] == [0, 1]
    assert "param_norm" in scope.records[-1]


@pytest.mark.parametrize(
    ("holder", "name"), [(driver, "OptimizerClock"), (StepDriver, "begin"), (observation, "Passes")]
)
def test_an_attach_that_fails_leaves_nothing(
    holder: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, broken)
        scope = watched(model, optimizer, log_dir=tmp_path)
    assert len(errors(caplog)) == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    loss_of(model, data()).backward()
    optimizer.step()
    scope.step(loss=1.0)
    assert scope.records == []
    assert "injected" in scope.summary()
    with watched(model, optimizer) as second:  # nothing stands in the way of another try
        loss_of(model, data()).backward()
        optimizer.step()
    assert len(second.records) == 1
    with pytest.raises(FlowscopeError, match="positive int"):
        watched(model, optimizer, every=0)


def test_close_takes_off_every_hook_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck:
        remove = staticmethod(broken)

    model = Stack(2)
    scope = watched(model, torch.optim.SGD(model.parameters(), 0.1))
    handles = scope._driver.observation.hooks.handles
    handles.insert(len(handles) // 2, Stuck())
    scope.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(errors(caplog)) == 1


def test_forgotten_scopes_leave_no_hook_of_all_optimizers() -> None:
    gc.collect()  # scopes that other tests forgot
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    for _ in range(5):
        model = Stack(1)
        watched(model, torch.optim.SGD(model.parameters(), 0.1))
        assert len(torch_optimizer._global_optimizer_pre_hooks) == max(before, 1)  # one pair for all scopes
        del model
    gc.collect()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


# -- the guards themselves --------------------------------------------------------------------------------------------


class Interrupted:
    """A descriptor whose naming is interrupted: Python 3.11 makes an error of that."""

    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def makes_a_class() -> None:
    type("Made", (), {"one": Interrupted()})


@pytest.mark.parametrize("guard", ["guard", "attempt", "enter"])
def test_an_interrupt_that_was_made_an_error_is_an_interrupt(guard: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        getattr(Faults(), guard)("sink", makes_a_class)


def test_an_interrupt_reaches_a_script_whose_optimizer_is_looked_at() -> None:
    class Made:
        pass

    after_making(Made, lambda made: makes_a_class())
    with pytest.raises(KeyboardInterrupt):
        Made()


def test_a_blown_fuse_stays_off_and_a_step_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    faults, calls = Faults(), []

    def fails() -> None:
        calls.append(1)
        broken()

    for _ in range(3):
        assert faults.guard("one", fails) is None
    assert len(calls) == 1
    for _ in range(3):
        assert faults.attempt("two", fails, otherwise=7) == 7
    assert len(calls) == 4
    assert [line.split(" failed")[0] for line in errors(caplog)] == ["flowscope: one", "flowscope: two"]
    assert faults.failed == dict.fromkeys(("one", "two"), "RuntimeError: injected")


def test_an_exception_that_cannot_say_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class MuteError(Exception):
        __str__ = broken

    def fails() -> None:
        raise MuteError

    faults = Faults()
    faults.guard("one", fails)
    assert faults.failed == {"one": "MuteError"}


def test_a_hook_is_off_after_a_fault_and_a_step_hook_is_not() -> None:
    class On:
        sampling = True

    faults, told = Faults(), []
    hook = Hook("one", broken, faults, On(), lambda: True)
    steps = StepHook("two", broken, faults, On(), lambda: True, otherwise=lambda *args: told.append(args))
    for k in range(2):
        hook(k)
        steps(k)
    assert told == [(0,), (1,)]
    assert "one" in hook.off


def test_a_call_before_another_gives_the_method_back() -> None:
    class Theirs:
        def update(self, by: int) -> int:
            return by + 1

    theirs, told = Theirs(), []
    before = CallBefore(theirs, "update", lambda: told.append(1), Faults())
    assert theirs.update(2) == 3
    before.remove()
    assert theirs.update(2) == 3
    assert told == [1]
    assert "update" not in vars(theirs)


def test_the_process_ends_with_every_step_on_disk(tmp_path: Path) -> None:
    """What `atexit` calls."""
    from flowscope import scope as module
    from flowscope.sinks import read_run

    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scope = watched(model, optimizer, log_dir=tmp_path)
    loss_of(model, data()).backward()
    optimizer.step()
    assert read_run(tmp_path).records == []  # its loss may still come
    module._at_exit()
    assert [r.step for r in read_run(tmp_path).records] == [0]
    scope.close()
