"""Wrapped models that were pickled by 0.1 load, compute what they did, train and are unwrapped.

`python tests/test_pickles.py` writes the files of `data/` with the package it finds; those in the repository were
written at 0.1 and stay.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import wrap_models as models
from torch import nn

import flowscope
from flowscope import _moved

DATA = Path(__file__).parent / "data"
MODES = {
    "residual": models.PostNormBlock,
    "keel": models.PreNormBlock,
    "keel-postln": models.PostNormBlock,
    "highway": models.PreNormBlock,
    "shc": models.PreNormBlock,
    "dhc": models.PreNormBlock,
    "mhc": models.PreNormBlock,
    "deepnorm": models.PostNormBlock,
}


def make(mode: str) -> nn.Module:
    torch.manual_seed(0)
    model = models.Checkpointed(MODES[mode])
    # without inputs the blocks found by structure are checked at the first forward: hooks that are pickled too
    flowscope.wrap(model, mode, **({} if mode == "residual" else {"example_inputs": models.inputs(1)[0]}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("mode", MODES)
def test_a_model_wrapped_and_pickled_by_0_1(mode: str) -> None:
    stored = torch.load(DATA / f"wrapped_{mode}.pt", weights_only=False)
    model, x = stored["model"], models.inputs(1)[0]
    output = model(x)
    torch.testing.assert_close(output, stored["output"])
    output.square().mean().backward()
    fresh = make(mode)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), output)
    assert [path for path, _ in flowscope.connections(model)] == ["blocks.0.connection", "blocks.1.connection"]
    flowscope.unwrap(model)
    assert type(model.blocks[0]) is MODES[mode]
    assert not flowscope.is_wrapped(model)


def test_a_moved_module_answers_with_what_bears_its_names_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_moved.MOVED, "flowscope.gone.away", ("flowscope.errors", "flowscope.config"))
    try:
        away = importlib.import_module("flowscope.gone.away")
        assert (away.FlowscopeError, away.WatchConfig) == (flowscope.FlowscopeError, flowscope.WatchConfig)
        with pytest.raises(AttributeError, match=r"'flowscope.gone.away' has no attribute 'nothing'"):
            _ = away.nothing
    finally:
        for name in ("flowscope.gone.away", "flowscope.gone"):
            sys.modules.pop(name, None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flowscope.nowhere")


def test_modules_that_moved_are_no_more_and_where_they_moved_to_is() -> None:
    for old, homes in _moved.MOVED.items():
        assert isinstance(importlib.util.find_spec(old).loader, _moved.MovedModules), f"{old} is still there"
        assert all(importlib.import_module(home) for home in homes)


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for name in MODES:
        made = make(name)
        output = copy.deepcopy(made)(models.inputs(1)[0]).detach()  # of a copy: the first forward takes hooks off
        torch.save({"model": made, "output": output}, DATA / f"wrapped_{name}.pt")
        sys.stdout.write(f"{name}\n")
