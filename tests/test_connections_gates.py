"""`keel` and `highway` against their formulas, written out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from flowscope.merging.connection import ConnectionContext
from flowscope.merging.modes import make_connection, parse_options

B, T, D = 3, 5, 8


def connection(mode: str, kinds=("pre", "post", "none"), **options):
    context = ConnectionContext(D, len(kinds), norm_kinds=kinds, dtype=torch.float64)
    return make_connection(mode, context, parse_options(mode, **options))


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(2)]


def test_automatic_bias_goes_by_the_norm_and_a_number_is_obeyed():
    x, f = tensors()
    auto, fixed = connection("keel"), connection("keel", init_bias=0.5)
    for site, bias in enumerate((2.0, -2.0, -2.0)):
        torch.testing.assert_close(auto.merge(site, None, x, f)[0], x + f / (1 + math.exp(-bias)))
        torch.testing.assert_close(fixed.merge(site, None, x, f)[0], x + f / (1 + math.exp(-0.5)))


@pytest.mark.parametrize("merges", [1, 4, 5, 48, 70, 71, 128, 512, 2048])
def test_automatic_bias_behind_norms_falls_with_depth(merges):
    context = ConnectionContext(D, 2, blocks=merges, total_sites=merges, norm_kinds=("post", "pre"))
    shut, held_open = make_connection("keel", context, parse_options("keel")).init_biases
    assert held_open == 2.0
    if merges <= 70:
        assert shut == -2.0
    else:
        assert 1 / (1 + math.exp(-shut)) == pytest.approx(merges**-0.5)


@pytest.mark.parametrize("mode", ["keel", "highway"])
@pytest.mark.parametrize("gate", ["token", "feature"])
def test_gate_position_by_position(mode, gate):
    x, f = tensors()
    c = connection(mode, gate=gate)
    weight, bias = torch.randn(2, D if gate == "feature" else 1, D, dtype=torch.float64).unbind()
    with torch.no_grad():
        c.gates[1].generator.copy_(weight)
        c.gates[1].bias.copy_(bias[:, 0])
    y, _ = c.merge(1, None, x, f)
    for b in range(B):
        for t in range(T):
            for d in range(D):
                row = d if gate == "feature" else 0
                logit = sum(weight[row, i].item() * x[b, t, i].item() for i in range(D)) + bias[row, 0].item()
                g, xi, fi = 1 / (1 + math.exp(-logit)), x[b, t, d].item(), f[b, t, d].item()
                expected = g * (xi + fi) + (1 - g) * xi if mode == "keel" else g * fi + (1 - g) * xi
                assert y[b, t, d].item() == pytest.approx(expected, abs=1e-12)


def test_highway_starts_at_a_bias_of_minus_two():
    x, f = tensors()
    t = 0.11920292202211755  # sigmoid(-2)
    torch.testing.assert_close(connection("highway").merge(2, None, x, f)[0], t * f + (1 - t) * x)


def test_preserve_starts_as_the_plain_residual_and_still_learns():
    x, f = tensors()
    c = connection("keel", preserve=True)
    y, _ = c.merge(1, None, x, f)
    torch.testing.assert_close(y, x + f)
    y.square().sum().backward()
    assert c.gates[1].generator.grad.abs().max() > 0


def test_a_shared_gate_is_one_gate_seen_from_every_site():
    shared, own = connection("keel", share_gate="block"), connection("keel")
    assert sum(p.numel() for p in shared.parameters()) == D + 1
    assert sum(p.numel() for p in own.parameters()) == 3 * (D + 1)
    x, f = tensors()
    for site in (0, 1, 2):  # the first site's norm decides
        torch.testing.assert_close(shared.merge(site, None, x, f)[0], x + f * 0.8807970779778823)


def test_gate_value_is_kept_only_on_request():
    x, f = tensors()
    c = connection("keel")
    c.merge(0, None, x, f)
    assert c.gate_value is None
    c.keep_gates = True
    c.merge(1, None, x, f)
    assert c.gate_value[1].shape == (B, T, 1)
    assert not c.gate_value[1].requires_grad
