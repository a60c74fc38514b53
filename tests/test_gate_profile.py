"""`gate_profile` and `keep_gates` against gates computed by hand from the connections' own weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import wrap_models as models
from torch import Tensor, nn
from wrap_models import B, D, T, inputs

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.merging.profile import GateProfile, gate_profile, keep_gates


class Keyed(nn.Module):
    """Takes its input by name, beside an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = models.Stack(models.PreNormBlock, 3)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.stack(x + shift)


def wrapped(mode: str = "keel", model: nn.Module | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = models.Stack(models.PreNormBlock, 3) if model is None else model
    flowscope.wrap(model, mode, example_inputs=models.hidden_states(), **options)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "gates" in path:
                parameter += 0.5 * torch.randn_like(parameter)
    return model


def by_hand(model: models.Stack, x: Tensor, mode: str) -> list[Tensor]:
    """The gates [..., 1 or D] of every site, from an explicit loop over the blocks."""
    gates, h = [], model.stem(x)
    for block in model.blocks:
        for site, gate in enumerate(block.connection.gates):
            t = torch.sigmoid(h @ gate.generator.T + gate.bias)
            f = block.branches(h, site)
            h = h + t * f if mode == "keel" else t * f + (1 - t) * h
            gates.append(t)
    return gates


@pytest.mark.parametrize(("mode", "options"), [("keel", {}), ("keel", {"gate": "feature"}), ("highway", {})])
def test_means_are_those_of_the_gates(mode: str, options: dict[str, Any]) -> None:
    model, data = wrapped(mode, **options).eval(), inputs()
    profile = gate_profile(model, data)
    expected = [[t.mean().item() for t in by_hand(model, x, mode)] for x in data]
    assert profile.labels == [f"blocks.{block}#{site}" for block in range(3) for site in range(2)]
    assert profile.means.shape == (4, 6)
    np.testing.assert_allclose(profile.means, expected, rtol=1e-5)
    np.testing.assert_allclose(profile.by_site(), np.mean(expected, axis=0), rtol=1e-5)


def test_batches_are_tensors_tuples_or_dicts_and_steps_limit_them() -> None:
    model, data = wrapped(model=Keyed()), inputs()
    expected = gate_profile(model, data).means
    forms = [data[0], (data[1], 0.0), {"x": data[2], "shift": 0.0}, [data[3]]]
    np.testing.assert_array_equal(gate_profile(model, forms).means, expected)
    endless = (data[k % 4] for k in iter(int, 1))
    np.testing.assert_array_equal(gate_profile(model, endless, steps=2).means, np.stack([expected[0]] * 2))
    shifted = gate_profile(model, [{"x": data[0], "shift": 0.5}]).means
    assert not np.allclose(shifted[0], expected[0])


def test_a_first_gate_is_the_sigmoid_of_its_bias() -> None:
    torch.manual_seed(0)
    model = flowscope.wrap(models.Stack(models.PostNormBlock, 2), "keel", example_inputs=models.hidden_states())
    np.testing.assert_allclose(gate_profile(model, inputs(2)).means, np.full((2, 4), 1 / (1 + math.exp(2))), rtol=1e-6)


def test_states_are_restored() -> None:
    model = wrapped().train()
    model.blocks[1].eval()
    for block in model.blocks:
        block.drop.p = 0.5  # a forward in train mode would draw random numbers
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    generator = torch.get_rng_state()
    first, second = gate_profile(model, inputs(2)), gate_profile(model, inputs(2))
    np.testing.assert_array_equal(first.means, second.means)
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError):
        gate_profile(model, [torch.zeros(B, T, D + 1)])
    assert [module.training for module in model.modules()] == modes
    assert not any(block.connection.keep_gates for block in model.blocks)


def test_keep_gates_only_inside() -> None:
    model, x = wrapped(gate="feature").eval(), inputs(1)[0]
    model(x)
    assert model.blocks[0].connection.gate_value is None
    with keep_gates(model):
        model(x).sum().backward()
        with keep_gates(model):
            pass
        model(x)
    held = [t for block in model.blocks for t in block.connection.gate_value.values()]
    for value, expected in zip(held, by_hand(model, x, "keel"), strict=True):
        torch.testing.assert_close(value, expected.detach())
        assert not value.requires_grad
    model(2 * x)
    assert held[0] is model.blocks[0].connection.gate_value[0]


def test_shared_gates_and_sites_that_do_not_run() -> None:
    model = wrapped(share_gate="block").eval()
    profile = gate_profile(model, inputs(2))
    assert profile.means.shape == (2, 6)
    kept = model.blocks[1]
    model.blocks[1] = nn.Identity()
    model.blocks.append(kept)
    model.blocks[3].forward = lambda x: x
    means = gate_profile(model, inputs(2))
    assert means.labels[2:] == ["blocks.2#0", "blocks.2#1", "blocks.3#0", "blocks.3#1"]
    assert np.isnan(means.means[:, 4:]).all()
    assert np.isfinite(means.means[:, :4]).all()
    assert means.summary().count("not seen") == 2


def test_summary_and_plot() -> None:
    means = [[0.1, 0.3, 0.5, 0.5, 0.9, 0.7], [0.3, 0.3, 0.5, 0.5, 0.5, 0.5]]
    profile = GateProfile([f"h.{k}#0" for k in range(6)], np.array(means))
    lines = profile.summary().splitlines()
    assert lines[0] == "mean gate t of 6 sites over 2 batches (t weighs the branch)"
    assert lines[1].split() == ["h.0#0", "0.200", "#" * 6]
    assert [line.split(": ")[1] for line in lines[-3:]] == ["0.250", "0.500", "0.650"]
    axes = profile.plot()
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.2, 0.3, 0.5, 0.5, 0.7, 0.6])
    assert profile.plot(axes) is axes


def test_compiled_models_are_profiled_eagerly() -> None:
    model, data = wrapped().eval(), inputs(2)
    expected = gate_profile(model, data)
    compiled = torch.compile(model, backend="eager")
    compiled(data[0])
    profile = gate_profile(compiled, data)
    np.testing.assert_array_equal(profile.means, expected.means)
    assert profile.labels == expected.labels
    model.compile(backend="eager")
    np.testing.assert_array_equal(gate_profile(model, data).means, expected.means)


def test_bad_input() -> None:
    model = wrapped()
    with pytest.raises(FlowscopeError, match=r"has no gates.*mode='keel'"):
        gate_profile(models.Stack(models.PreNormBlock, 2), inputs())
    with pytest.raises(FlowscopeError, match="has no gates"), keep_gates(wrapped("dhc")):
        pass
    with pytest.raises(FlowscopeError, match="got 0"):
        gate_profile(model, inputs(), steps=0)
    with pytest.raises(FlowscopeError, match="got no batch"):
        gate_profile(model, [])
    with pytest.raises(FlowscopeError, match="got str"):
        gate_profile(model, ["text"])
