"""Bad input: a FlowscopeError that says what, where, got, expected and the fix; the model is untouched."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from watch_models import Stack, data, loss_of, watched

import flowscope
from flowscope import FlowscopeError, WatchConfig

MODEL = Stack(2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)


class NoClose:
    def write(self, event: Any) -> None: ...


def hooks(model: nn.Module) -> int:
    mine = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return mine + len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


CALLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no module": ({"model": [1, 2]}, ("watch(model)", "list", "torch.nn.Module")),
    "no parameters": ({"model": nn.ReLU()}, ("watch(model)", "ReLU", "no parameters", "after its layers")),
    "every zero": ({"every": 0}, ("every", "0", "positive int", "pause")),
    "every negative": ({"every": -3}, ("every", "-3", "positive int")),
    "every float": ({"every": 2.5}, ("every", "2.5", "positive int", "function")),
    "every bool": ({"every": True}, ("every", "True", "positive int")),
    "config key": ({"config": {"everyy": 1}}, ("config", "everyy", "Did you mean", "'every'", "WatchConfig()")),
    "config value": ({"config": {"positions": 1}}, ("config", "positions", "2", "got 1")),
    "config type": ({"config": 3}, ("config", "int", "dict or WatchConfig")),
    "config metric": ({"config": {"metrics": ("flows",)}}, ("metrics", "flow", "got 'flows'")),
    "flow path": ({"flows": ["block"]}, ("flows=", "'block'", "blocks", "find_flows")),
    "flow pattern": ({"flows": ["layers.*"]}, ("flows=", "'layers.*'", "find_flows")),
    "flow type": ({"flows": [3]}, ("flows=", "3", "paths")),
    "flow without parameters": ({"flows": ["blocks.0.act"]}, ("flows=", "blocks.0.act", "Tanh")),
    "flows no list": ({"flows": 3}, ("flows=", "int", "3", "paths")),
    "callback": ({"on_alert": "print"}, ("on_alert", "'print'", "callable", "on_alert=print")),
    "one callback of two": ({"on_alert": [print, 3]}, ("on_alert", "int", "callable")),
    "one callback of several, made on the way": ({"on_alert": iter([print, 3])}, ("on_alert", "int", "callable")),
    "callback of another kind": ({"on_alert": 3}, ("on_alert", "int", "callable", "on_alert=print")),
    "optimizer": ({"optimizer": "sgd"}, ("optimizer", "str", "torch.optim.Optimizer", "scope.step()")),
    "optimizer class": ({"optimizer": torch.optim.SGD}, ("optimizer", "torch.optim.Optimizer")),
    "one optimizer of two": ({"optimizer": [OPTIMIZER, 3]}, ("optimizer", "int", "list of them")),
    "parameters as optimizer": ({"optimizer": MODEL.parameters()}, ("optimizer", "generator", "Optimizer")),
    "sink": ({"sinks": [print]}, ("sinks", "entry 0", "builtin_function", "write(event)", "close()")),
    "sink without close": ({"sinks": [NoClose()]}, ("sinks", "NoClose", "write(event)", "close()")),
    "sinks no list": ({"sinks": NoClose()}, ("sinks", "NoClose", "list")),
    "gates": ({"gates": 3}, ("gates", "int", "3", "patterns")),
    "one gate of two": ({"gates": ["blocks.*", 3]}, ("gates", "list", "3", "patterns")),
    "scaler": ({"scaler": 3}, ("scaler", "int", "GradScaler")),
    "log_dir": ({"log_dir": 3}, ("log_dir", "int", "path")),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_is_named_with_what_was_got_and_what_is_expected(name: str) -> None:
    arguments, parts = CALLS[name]
    before = hooks(MODEL)
    with pytest.raises(FlowscopeError) as caught:
        flowscope.watch(**{"model": MODEL, **arguments})
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert hooks(MODEL) == before
    watched(MODEL, OPTIMIZER).close()  # nothing stands in the way of the right call


@pytest.mark.parametrize("name", ["optimizer", "scaler", "flow path", "config key"])
def test_a_refused_call_leaves_no_open_file(name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    arguments: dict[str, Any] = {
        "optimizer": {"optimizer": "sgd"},
        "scaler": {"scaler": 3},
        "flow path": {"flows": ["nowhere"]},
        "config key": {"config": {"nothing": 1}},
    }[name]
    with pytest.raises(FlowscopeError):
        flowscope.watch(MODEL, log_dir=tmp_path / "run", **arguments)
    gc.collect()
    assert not [w for w in recwarn if issubclass(w.category, ResourceWarning)]
    flowscope.watch(MODEL, log_dir=tmp_path / "run").close()


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_an_unwritable_log_dir_leaves_the_model_untouched(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    target = tmp_path / "file" if kind == "a file" else tmp_path / "file" / "run"
    before = hooks(MODEL)
    with pytest.raises(FlowscopeError) as caught:
        flowscope.watch(MODEL, OPTIMIZER, log_dir=target)
    assert str(target) in str(caught.value)
    assert "log_dir" in str(caught.value)
    assert hooks(MODEL) == before
    with watched(MODEL, OPTIMIZER) as scope:
        assert scope.records == []


def test_watching_the_same_model_twice_replaces_the_first_scope(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(2)
    first = watched(model)
    before = hooks(model)
    second = watched(model)
    assert first.closed
    assert not second.closed
    assert "Stack was watched already; the earlier scope is closed" in caplog.text
    assert hooks(model) == before
    second.close()
    assert hooks(model) < before


@pytest.mark.parametrize("call", ["step", "pause", "resume"])
def test_calls_on_a_closed_scope(call: str) -> None:
    scope = watched(Stack(2))
    scope.close()
    with pytest.raises(FlowscopeError, match=rf"scope\.{call}\(\).*closed.*flowscope\.watch"):
        getattr(scope, call)()


def test_loading_into_a_closed_scope() -> None:
    scope = watched(Stack(2))
    state = scope.state_dict()
    scope.close()
    with pytest.raises(FlowscopeError, match="closed"):
        scope.load_state_dict(state)
    assert scope.state_dict() == state


@pytest.mark.parametrize("state", [{}, {"step": 3}, [1], {"step": "x", "samples": 0, "detectors": {}}])
def test_a_state_that_is_none(state: Any) -> None:
    with watched(Stack(2)) as scope, pytest.raises(FlowscopeError, match=r"load_state_dict.*state_dict\(\)"):
        scope.load_state_dict(state)


@pytest.mark.parametrize("loss", ["1.0", [1.0], {"loss": 1.0}, object()])
def test_a_loss_of_the_wrong_kind(loss: Any) -> None:
    with watched(Stack(2)) as scope:
        with pytest.raises(FlowscopeError, match=rf"loss.*{type(loss).__name__}.*scalar tensor or a number"):
            scope.step(loss=loss)
        scope.step(loss=1.0)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True])
def test_a_step_number_of_the_wrong_kind(step: Any) -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, data()).backward()
        optimizer.step()
        with pytest.raises(FlowscopeError, match=r"step.*got.*step number"):
            scope.step(step=step)
        scope.step(loss=2.0, step=7)
    assert [(r.step, r.loss) for r in scope.records] == [(7, 2.0)]


def test_an_unknown_metric_or_flow_of_a_record_lists_what_there_is() -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, data()).backward()
        optimizer.step()
    record = scope.records[0]
    with pytest.raises(FlowscopeError, match=r"no metric 'gains'.*gain"):
        record["gains"]
    with pytest.raises(FlowscopeError, match=r"no flow 'decoder'.*blocks"):
        record["gain", "decoder"]


def test_a_config_object_is_taken_as_it_is_and_cannot_be_changed() -> None:
    config = WatchConfig(console="off", positions=7)
    with watched(Stack(2)) as scope:
        assert scope.config.positions == 256
    with flowscope.watch(Stack(2), config=config) as scope:
        assert scope.config is config
        with pytest.raises(ValueError, match="frozen"):
            scope.config.positions = 3  # type: ignore[misc]


def test_a_config_built_by_hand_says_the_same() -> None:
    with pytest.raises(FlowscopeError, match=r"everyy.*Did you mean 'every'"):
        WatchConfig(everyy=1)  # type: ignore[call-arg]
    with pytest.raises(FlowscopeError, match=r"positions.*got 1"):
        WatchConfig(positions=1)
