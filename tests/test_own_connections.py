"""`check_connection` passes every rule of the package and refuses broken ones; a class from outside is an equal."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
import wrap_models as models
from own_connections import BROKEN, ScaledBranch

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection
from flowscope.merging.modes import MODES, register
from flowscope.testing import check_connection

RULES = [*MODES, ScaledBranch]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_its_promises(rule: Any) -> None:
    check_connection(rule)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (ScaledBranch, {"init": 1.0}),
        ("keel", {"gate": "feature", "share_gate": "block", "preserve": True}),
        ("dhc", {"norm": "layer_affine", "separate_scales": True, "streams": 2}),
        ("shc", {"init": "ramp", "reduce": "sum", "streams": 1}),
    ],
)
def test_with_other_options_too(mode: Any, options: dict[str, Any]) -> None:
    check_connection(mode, **options)


@pytest.mark.parametrize(("rule", "options", "reason"), BROKEN, ids=[rule.__name__ for rule, _, _ in BROKEN])
def test_a_broken_rule_is_refused_and_the_promise_named(rule: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_connection(rule, **options)
    assert re.search(rf"check_connection\({rule.__name__}\).*", str(caught.value)), caught.value
    assert re.search(reason, str(caught.value), re.S), caught.value


def test_a_rule_is_a_class_of_twelve_lines() -> None:
    code = inspect.getsource(ScaledBranch)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_a_class_from_outside_is_wrapped_watched_and_unwrapped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flowscope")
    torch.manual_seed(0)
    plain = models.Stack(models.PostNormBlock, 3)
    x = models.hidden_states()
    model = flowscope.wrap(copy.deepcopy(plain), mode=ScaledBranch, init=0.1, example_inputs=x)
    assert "wrap(mode='scaled-branch'): 6 sites in 3 blocks, 48 parameters added" in caplog.text
    h = plain.stem(x)
    for block in plain.blocks:
        h = block.norm1(h + 0.1 * block.mix(h))
        h = block.norm2(h + 0.1 * torch.tanh(block.mlp(h)))
    torch.testing.assert_close(model(x), plain.head(h))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        model(x).square().mean().backward()
        optimizer.step()
    record = scope.records[0]
    np.testing.assert_allclose(record["scale"], np.full(6, 0.1), rtol=1e-6)
    assert record.specs["scale"].words == "Mean of scale at each site."
    assert record.labels("scale") == [f"blocks.{k}#{site}" for k in range(3) for site in range(2)]
    assert np.isfinite(record["shortcut_product"]).all()  # the norms behind the sites are looked at without being asked
    assert flowscope.warmup_steps(100, ScaledBranch) == 100
    flowscope.unwrap(model)
    assert "unwrap: 3 connections were trained" in caplog.text
    assert type(model.blocks[0]) is models.PostNormBlock


def test_a_registered_class_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowscope.merging.modes.MODES", dict(MODES))
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    with pytest.raises(FlowscopeError, match="expected one of residual"):
        flowscope.wrap(model, "scaled-branch", example_inputs=x)
    assert register(ScaledBranch) is ScaledBranch
    flowscope.wrap(model, "Scaled_Branch", init=0.5, example_inputs=x)
    assert [type(connection) for _, connection in flowscope.connections(model)] == [ScaledBranch] * 2


def test_wrong_classes_are_errors() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()

    class Nameless(ScaledBranch):
        mode = "hc"

    class Second(Connection):
        pass

    for rule, name in ((Nameless, "hc"), (Second, "residual")):
        with pytest.raises(FlowscopeError, match=f"'{name}' is a built-in mode"):
            flowscope.wrap(model, rule, example_inputs=x)
    with pytest.raises(FlowscopeError, match="expected a subclass of"):
        register(torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(FlowscopeError, match=r"unknown option 'int'. Options of scaled-branch: init"):
        flowscope.wrap(model, ScaledBranch, int=1, example_inputs=x)
    with pytest.raises(FlowscopeError, match="got <class 'int'>"):
        flowscope.wrap(model, int, example_inputs=x)  # type: ignore[arg-type]
    assert not flowscope.is_wrapped(model)
