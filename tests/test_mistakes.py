"""What people do by mistake: each message says what was wrong, why it matters, and what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from watch_models import Stack

import flowscope
from flowscope import FlowscopeError, actions
from flowscope.arguments import HABITS
from flowscope.config import BESIDE
from flowscope.detectors import Limit
from flowscope.integrations.trainer import TrainerWatch
from flowscope.sinks import MemorySink


class Loud(Limit):
    kind, metric, above, advice = "loud", "grad_norm", 1e9, "turn it down"


def model() -> Stack:
    return Stack(2)


def trained(steps: int = 1) -> flowscope.Scope:
    """A closed scope of a model that was trained for some steps."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with flowscope.watch(net, optimizer, config={"console": "off"}) as scope:
        for _ in range(steps):
            net(torch.randn(4, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return scope


def step_after_close() -> None:
    trained().step(loss=1.0)


def twice_wrapped() -> None:
    flowscope.wrap(flowscope.wrap(Stack(2), mode="keel"), mode="dhc")


PLAIN = nn.Sequential(nn.Linear(8, 4))
MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a function": (lambda: flowscope.watch(lambda x: x), ("got function", "torch.nn.Module", "the model itself")),
    "a state_dict": (lambda: flowscope.watch(model().state_dict()), ("OrderedDict", "neither", "state_dict")),
    "arguments swapped": (
        lambda: flowscope.watch(torch.optim.SGD(PLAIN.parameters(), 0.1), PLAIN),
        ("got SGD", "expected", "watch(model, optimizer)"),
    ),
    "optimizer class": (
        lambda: flowscope.watch(model(), torch.optim.SGD),
        ("got type", "expected a torch.optim.Optimizer", "scope.step()"),
    ),
    "every as text": (lambda: flowscope.watch(model(), every="10"), ("got '10'", "positive int", "every=1")),
    "setting misspelled": (
        lambda: flowscope.watch(model(), config={"evry": 5}),
        ("no setting evry", "got 5", "Did you mean 'every'?", "WatchConfig()"),
    ),
    "setting near another": (
        lambda: flowscope.watch(model(), config={"vanishing_produkt": 5}),
        ("no setting vanishing_produkt", "Did you mean 'vanishing_product'"),
    ),
    "argument as setting": (
        lambda: flowscope.watch(model(), config={"every": 5}),
        ("no setting every", "is an argument", "watch(every=5)"),
    ),
    "setting as argument": (
        lambda: flowscope.watch(model(), positions=5),
        ("watch(positions=...)", "It is a setting", "config={'positions': ...}"),
    ),
    "value of a setting": (
        lambda: flowscope.watch(model(), config={"vanishing_product": "small"}),
        ("vanishing_product", "got 'small'", "It is: least gradient product"),
    ),
    "family of metrics": (
        lambda: flowscope.watch(model(), config={"metrics": ("flows",)}),
        ("metrics.0", "'flow', 'depth' or 'parameters'", "got 'flows'"),
    ),
    "unwritable log_dir": (
        lambda: flowscope.watch(model(), log_dir="/proc/x/y"),
        ("'/proc/x/y'", "no folder can be made in /proc", "expected a folder", "Pass another one"),
    ),
    "log_dir is a file": (
        lambda: flowscope.watch(model(), log_dir=__file__),
        ("is a file, not a folder", "expected a folder", "Pass another one"),
    ),
    "flow that is not there": (
        lambda: flowscope.watch(model(), flows=["encoder.layers"]),
        ("'encoder.layers' is no module", "find_flows(model)"),
    ),
    "parameter that is not there": (
        lambda: flowscope.watch(model(), parameters=["blocks.0.lin.wieght"]),
        ("matches no parameter of Stack", "Did you mean", "named_parameters()"),
    ),
    "sink as text": (lambda: flowscope.watch(model(), sinks=["tensorboard"]), ("a str", "write(event) and close()")),
    "sink as a class": (
        lambda: flowscope.watch(model(), sinks=[MemorySink]),
        ("the class MemorySink", "expected an object", "Make one: MemorySink(...)"),
    ),
    "callback as text": (lambda: flowscope.watch(model(), on_alert="print"), ("'print'", "callable", "on_alert=print")),
    "action on an unknown kind": (
        lambda: flowscope.watch(model(), on_alert=actions.Stop("vanishing")),
        ("Stop(on=vanishing)", "nothing would ever happen", "Did you mean 'vanishing_gradient'"),
    ),
    "stop_on an unknown kind": (
        lambda: TrainerWatch(stop_on=["vanishing"]),
        ("stop_on=['vanishing']", "nothing would ever happen", "Did you mean 'vanishing_gradient'"),
    ),
    "argument misspelled": (
        lambda: flowscope.watch(model(), logdir="x"),
        ("watch(logdir=...)", "no such argument", "Did you mean 'log_dir'"),
    ),
    "argument of a callback misspelled": (
        lambda: TrainerWatch(flow=["blocks"]),
        ("watch(flow=...)", "no such argument", "Did you mean 'flows'"),
    ),
    "wandb's log": (lambda: flowscope.watch(model(), log="all"), ("wandb.watch's", "parameters=[...]")),
    "wandb's log_freq": (lambda: flowscope.watch(model(), log_freq=10), ("wandb.watch's", "every=10")),
    "closed scope": (step_after_close, ("scope.step() after scope.close()", "expected an open one", "watch again")),
    "metric misspelled": (
        lambda: trained().records[-1]["gradient_products"],
        ("no metric 'gradient_products'", "Did you mean 'gradient_product'"),
    ),
    "run that is not there": (
        lambda: flowscope.read_run("runs/nothing"),
        ("there is no file", "expected flowscope.jsonl", "log_dir"),
    ),
    "mode misspelled": (
        lambda: flowscope.wrap(model(), mode="kel"),
        ("got 'kel'", "expected one of", "Did you mean 'keel'"),
    ),
    "option misspelled": (
        lambda: flowscope.wrap(model(), mode="dhc", n_stream=4),
        ("unknown option 'n_stream'", "Options of dhc", "Did you mean 'streams'"),
    ),
    "option of another mode": (
        lambda: flowscope.wrap(model(), mode="keel", streams=4),
        ("unknown option 'streams'", "Options of keel", "is an option of mode"),
    ),
    "nothing to wrap": (
        lambda: flowscope.wrap(PLAIN, mode="keel", example_inputs=torch.randn(2, 8)),
        ("nothing was changed", "x + f(x)", "flowscope.watch(model) works without"),
    ),
    "wrong example inputs": (
        lambda: flowscope.wrap(model(), mode="keel", example_inputs=torch.randn(4, 9)),
        ("could not be run", "[4, 9]", "Pass what its forward takes"),
    ),
    "wrapped twice": (twice_wrapped, ("wrapped already", "flowscope.unwrap(model) first")),
    "unwrapped twice": (lambda: flowscope.unwrap(model()), ("is not wrapped", "expected", "is_wrapped(model) tells")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_why_and_what_to_do(name: str) -> None:
    mistake, parts = MISTAKES[name]
    with pytest.raises(FlowscopeError) as caught:
        mistake()
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert len(message) < 700  # a list of everything is no answer


def test_a_misspelled_name_of_the_package_is_told_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Watch'.*Did you mean 'watch'"):
        flowscope.Watch  # noqa: B018


def test_kinds_of_detectors_from_outside_may_be_waited_for() -> None:
    TrainerWatch(stop_on=["loud", "error"], detectors=[Loud])
    flowscope.watch(model(), on_alert=actions.Stop("loud"), detectors=Loud()).close()
    with pytest.raises(FlowscopeError, match="loud"):
        TrainerWatch(stop_on="loud")


def test_habits_and_neighbours_are_no_inventions() -> None:
    arguments = inspect.signature(flowscope.watch).parameters
    assert {*BESIDE} <= {*arguments}
    assert not {*HABITS} & {*arguments}


def test_tab_completion_finds_what_the_readme_uses() -> None:
    assert {"plot", "actions", "sinks", "integrations", "read_run"} <= {*dir(flowscope)}
    for name in dir(flowscope):
        assert getattr(flowscope, name) is not None


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_a_loss_of_several_numbers_is_averaged_and_said_once(
    kind: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with flowscope.watch(net, optimizer, config={"console": "off"}) as scope:
        for given in ([1.0, 2.0, 6.0], [4.0, 0.5]):
            net(torch.randn(4, 4)).mean().backward()
            optimizer.step()
            scope.step(loss=kind(given))
    assert [record.loss for record in scope.records] == [3.0, 2.25]
    (told,) = [line for line in caplog.messages if "loss=" in line]
    for part in ("several numbers, expected one", "their mean", "a sum or weights", "scope.step(loss=loss.mean())"):
        assert part in told


@pytest.mark.parametrize("loss", [torch.tensor(2.0), torch.tensor([2.0]), np.float32(2.0), 2.0, 2])
def test_a_loss_of_one_number_needs_no_word(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    with flowscope.watch(model(), config={"console": "off"}) as scope:
        scope.step(loss=loss)
    assert not [line for line in caplog.messages if "loss=" in line]


def test_some_parameters_are_watched_and_others_left_out() -> None:
    for given, wanted in (
        ("blocks.0.*", lambda name: name.startswith("blocks.0.")),
        (["!*.bias"], lambda name: not name.endswith(".bias")),
        (["blocks.*", "!blocks.1.*"], lambda name: name.startswith("blocks.") and not name.startswith("blocks.1.")),
    ):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        with flowscope.watch(net, optimizer, parameters=given, config={"console": "off"}) as scope:
            net(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
        record = scope.records[0]
        assert set(record.labels("param_grad_norm")) == {name for name in before if wanted(name)}
        norms = dict(zip(record.labels("param_grad_norm"), record["param_grad_norm"], strict=True))
        for name, parameter in net.named_parameters():
            assert not torch.equal(before[name], parameter)  # the others are trained all the same
            if wanted(name):
                assert parameter.grad is not None
                assert norms[name] == pytest.approx(float(parameter.grad.norm()), rel=1e-5)
