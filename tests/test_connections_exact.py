"""Connections from papers against their equations, written out in loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ConnectionContext
from flowscope.merging.kronecker import prime_factors
from flowscope.merging.modes import make_connection, parse_options
from flowscope.merging.permutations import permutations

B, T, D = 3, 5, 8


def connection(mode: str, sites: int = 2, **options: Any) -> Connection:
    torch.manual_seed(0)
    made = make_connection(mode, ConnectionContext(D, sites, dtype=torch.float64), parse_options(mode, **options))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.4 * torch.randn_like(parameter)
    return made


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def mean_of_permutations(logits: np.ndarray, n: int) -> np.ndarray:
    """sum_r a_r P_r with P_r[i, perm_r(i)] = 1, permutations in lexicographic order."""
    out = np.zeros((n, n))
    for a, order in zip(softmax(logits), itertools.permutations(range(n)), strict=True):
        for i, j in enumerate(order):
            out[i, j] += a
    return out


def kronecker_of_means(logits: np.ndarray, n: int) -> np.ndarray:
    factors = {4: [2, 2], 6: [2, 3], 8: [2, 2, 2], 3: [3]}[n]
    out = np.ones((1, 1))
    for p in factors:
        count = math.factorial(p)
        out, logits = np.kron(out, mean_of_permutations(logits[:count], p)), logits[count:]
    assert not len(logits)
    return out


MIXINGS = {"mhc-lite": mean_of_permutations, "kromhc": kronecker_of_means}
CASES = [("mhc-lite", 3), ("mhc-lite", 4), ("kromhc", 4), ("kromhc", 6), ("kromhc", 8), ("kromhc", 3)]


@pytest.mark.parametrize(("mode", "n"), CASES)
def test_equals_a_loop_over_positions(mode: str, n: int) -> None:
    made = connection(mode, streams=n)
    x = torch.randn(B, T, D, dtype=torch.float64)
    seen, state = made.begin(x)
    outputs = [torch.randn(B, T, D, dtype=torch.float64) for _ in range(2)]
    streams = x.unsqueeze(-2).expand(B, T, n, D).clone().numpy()
    for site, f in enumerate(outputs):
        part = made.site[site]
        phi, static, scale = (p.detach().numpy() for p in (part.generator, part.static, part.scale))
        for b, t in itertools.product(range(B), range(T)):
            h = streams[b, t]
            v = h.flatten() / np.sqrt((h**2).mean())
            dynamic = phi @ v
            read = 1 / (1 + np.exp(-(static[:n] + scale[0] * dynamic[:n])))
            write = 2 / (1 + np.exp(-(static[n : 2 * n] + scale[1] * dynamic[n : 2 * n])))
            mixing = MIXINGS[mode](static[2 * n :] + scale[2] * dynamic[2 * n :], n)
            np.testing.assert_allclose(seen[b, t].detach().numpy(), read @ h, rtol=1e-9)
            streams[b, t] = mixing @ h + np.outer(write, f[b, t].numpy())
        seen, state = made.at_site(site, state, seen, f)
    made.last = True
    np.testing.assert_allclose(state[0].detach().numpy(), streams, rtol=1e-9)


@pytest.mark.parametrize(("mode", "n"), CASES)
@pytest.mark.parametrize("std", [1.0, 16.0])
def test_rows_and_columns_are_exact_whatever_the_logits(mode: str, n: int, std: float) -> None:
    part = connection(mode, 1, streams=n).float().site[0]
    rows = len(part.static) - 2 * n
    mixing = part.mixing(std * torch.randn(rows, 2000, generator=torch.Generator().manual_seed(0)))
    assert mixing.shape == (n, n, 2000)
    assert (mixing >= 0).all()
    for axis in (0, 1):
        torch.testing.assert_close(mixing.sum(axis), torch.ones(n, 2000), rtol=0, atol=1e-6)


def test_permutations_begin_with_the_identity_and_are_all() -> None:
    matrices = permutations(4)
    assert torch.equal(matrices[0], torch.eye(4))
    assert len({tuple(matrix.flatten().tolist()) for matrix in matrices}) == 24


@pytest.mark.parametrize(("n", "factors"), [(1, []), (2, [2]), (8, [2, 2, 2]), (12, [2, 2, 3]), (35, [5, 7])])
def test_prime_factors(n: int, factors: list[int]) -> None:
    assert prime_factors(n) == factors


@pytest.mark.parametrize(("mode", "streams"), [("mhc-lite", 6), ("kromhc", 7), ("kromhc", 14)])
def test_too_many_permutations_are_refused(mode: str, streams: int) -> None:
    with pytest.raises(FlowscopeError, match="streams"):
        parse_options(mode, streams=streams)


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return out


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + torch.tanh(self.linear(x)))
        return out


def stack(block: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(3)))


def test_rezero_is_the_identity_at_first_and_learns_its_scales_before_its_branches() -> None:
    model, x = stack(PreNorm), torch.randn(B, T, D)
    flowscope.wrap(model, mode="rezero", example_inputs=x)
    assert torch.equal(model(x), x)
    model(x).square().sum().backward()
    assert all(not block.linear.weight.grad.any() for block in model)
    assert all(block.connection.scale[0].grad.abs().item() > 0 for block in model)


def test_rezero_multiplies_the_branch() -> None:
    model, x = stack(PostNorm), torch.randn(B, T, D)
    flowscope.wrap(model, mode="rezero", example_inputs=x, init=0.3)
    expected = x
    for block in model:
        expected = block.norm(expected + 0.3 * torch.tanh(block.linear(expected)))
    torch.testing.assert_close(model(x), expected)


def test_layer_scale_multiplies_each_feature_of_the_branch() -> None:
    model, x = stack(PostNorm), torch.randn(B, T, D)
    flowscope.wrap(model, mode="layer-scale", example_inputs=x)
    scales = torch.rand(3, D) + 0.1
    with torch.no_grad():
        for block, scale in zip(model, scales, strict=True):
            assert (block.connection.scale[0] == 0.1).all()  # CaiT, section 2: up to 18 blocks
            block.connection.scale[0].copy_(scale)
    expected = x
    for block, scale in zip(model, scales, strict=True):
        expected = block.norm(expected + torch.tanh(block.linear(expected)) * scale)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(("depth", "value"), [(18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layer_scale_begins_smaller_in_deeper_models(depth: int, value: float) -> None:
    model, x = nn.Sequential(*(PreNorm() for _ in range(depth))), torch.randn(B, T, D)
    flowscope.wrap(model, mode="layer-scale", example_inputs=x)
    assert torch.equal(model[-1].connection.scale[0].detach(), torch.full((D,), value))


def test_peri_ln_norms_what_each_branch_adds() -> None:
    model, x = stack(PreNorm), torch.randn(B, T, D)
    flowscope.wrap(model, mode="peri-ln", example_inputs=x, init=0.7)
    expected = x
    for block in model:
        f = torch.tanh(block.linear(block.norm(expected)))
        expected = expected + 0.7 * f / f.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(model(x), expected)


class TwoPreNorms(nn.Module):
    """Two pre-norm branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = PreNorm(), PreNorm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.a.linear(self.a.norm(x)))
        return x + torch.tanh(self.b.linear(self.b.norm(x)))


def depth_read(sources: list[Tensor], query: Tensor, weight: Tensor) -> Tensor:
    """Softmax over the sources of w . (g v / rms(v)), position by position."""
    out = torch.zeros_like(sources[0])
    for b in range(B):
        for t in range(T):
            vectors = [v[b, t] for v in sources]
            scores = [float((query * weight * v).sum() / (v.square().mean() + 1e-6).sqrt()) for v in vectors]
            shares = [math.exp(s) for s in scores]
            out[b, t] = sum(s / sum(shares) * v for s, v in zip(shares, vectors, strict=True))
    return out


@pytest.mark.parametrize(
    ("mode", "options", "size"),
    [
        ("attention-residuals", {}, 1),
        ("block-attention-residuals", {"block_size": 2}, 2),
        ("block-attention-residuals", {"block_size": 3}, 3),
        ("block-attention-residuals", {}, 1),  # 6 sub-layers: 8 blocks of one at most
    ],
)
def test_attention_residuals_read_all_that_came_before(mode: str, options: dict[str, Any], size: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(TwoPreNorms() for _ in range(3))), torch.randn(B, T, D)
    flowscope.wrap(model, mode=mode, example_inputs=x, **options)
    with torch.no_grad():
        for _, connection in flowscope.connections(model):
            for parameter in connection.parameters():
                parameter.add_(torch.randn_like(parameter))
    layers = [layer for block in model for layer in (block.a, block.b)]
    reads = [dict(c.read.items()).get(str(k)) for _, c in flowscope.connections(model) for k in range(2)]
    assert [read is None for read in reads] == [True] + [False] * 5  # the first has but one source
    blocks, partial = [x], None
    with torch.no_grad():
        for number, (layer, read) in enumerate(zip(layers, reads, strict=True)):
            sources = blocks if partial is None else [*blocks, partial]
            h = x if read is None else depth_read(sources, read.query, read.norm.weight)
            f = torch.tanh(layer.linear(layer.norm(h)))
            partial = f if partial is None else partial + f
            if (number + 1) % size == 0 or number == 5:
                blocks, partial = [*blocks, partial], None
        last = model[-1].connection.output
        expected = depth_read(blocks, last.query, last.norm.weight)
    assert model[0].connection.streams == len(blocks)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_residuals_are_the_plain_model_behind_a_norm_at_first(size: int) -> None:
    """Each read is the mean of what the plain model sums, and norms do not see the difference but for eps."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(TwoPreNorms() for _ in range(3)), nn.LayerNorm(D, eps=1e-12)), 10 * torch.randn(B, T, D)
    for norm in (layer.norm for block in list(model)[:3] for layer in (block.a, block.b)):
        norm.eps = 1e-12
    expected = model(x)
    flowscope.wrap(model, mode="block-attention-residuals", example_inputs=x, block_size=size)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_attention_residuals_refuse_post_norm_blocks() -> None:
    with pytest.raises(flowscope.FlowscopeError, match="attention-residuals wants a norm before each branch"):
        flowscope.wrap(stack(PostNorm), mode="attention-residuals", example_inputs=torch.randn(B, T, D))


def test_peri_ln_refuses_blocks_without_a_norm_before_the_branch() -> None:
    model, x = stack(PostNorm), torch.randn(B, T, D)
    before = model(x)
    with pytest.raises(FlowscopeError, match="a norm before each branch"):
        flowscope.wrap(model, mode="peri-ln", example_inputs=x)
    assert torch.equal(model(x), before)
