"""`keel-postln` and `deepnorm`: equations on pre-norm, post-norm and norm-free blocks, constants, initial weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.merging.connection import ConnectionContext
from flowscope.merging.modes import make_connection, parse_options
from flowscope.merging.postln import deepnorm_constants, deepnorm_init_, deepnorm_weights

B, T, D, BLOCKS = 3, 5, 8, 3
L = 2 * BLOCKS


def rms(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def stack(kind, outer=None, **options):
    def make(block):
        norms = () if outer is None else tuple(outer[2 * block : 2 * block + 2])
        place = (D, 2, block, BLOCKS, block == 0, block == BLOCKS - 1, 2 * block)
        context = ConnectionContext(*place, norm_kinds=(kind,) * 2, outer_norms=norms, dtype=torch.float64)
        return make_connection("keel-postln", context, parse_options("keel-postln", **options))

    return nn.ModuleList(make(block) for block in range(BLOCKS))


def shaken(module):
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return module.double()


def setting():
    torch.manual_seed(0)
    branches = shaken(nn.ModuleList(nn.Linear(D, D) for _ in range(L)))
    norms = shaken(nn.ModuleList(nn.LayerNorm(D) for _ in range(L)))
    return branches, norms, torch.randn(B, T, D, dtype=torch.float64)


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_pre_norm_blocks_keep_their_norm_inside_and_get_an_outer_one(alpha):
    branches, norms, x = setting()
    connections = shaken(stack("pre", alpha=alpha))
    assert sum(p.numel() for p in connections.parameters()) == (L - 2) * D
    y = x
    for block, c in enumerate(connections):
        y, state = c.begin(y)
        for k in (0, 1):
            y, state = c.merge(k, state, y, branches[2 * block + k](norms[2 * block + k](y)))
        y = c.end(y, state)
    for k in range(L):  # the definition
        f = branches[k](norms[k](x))
        x = x + f if k < 2 else rms((alpha or L) * x + f, connections[k // 2].outer[str(k % 2)])
    torch.testing.assert_close(y, x)


def test_post_norm_blocks_use_their_norm_outside_and_get_an_inner_one():
    branches, norms, x = setting()
    connections = shaken(stack("post", list(norms)))
    assert sum(p.numel() for p in connections.parameters()) == L * D
    assert all(c.bypass_outer == (True, True) for c in connections)
    y = x
    for block, c in enumerate(connections):
        y, state = c.begin(y)
        for k in (0, 1):
            y, state = c.merge(k, state, y, branches[2 * block + k](y))  # the weaving skips the block's norm
        y = c.end(y, state)
    for k in range(L):
        f = branches[k](rms(x, connections[k // 2].inner[str(k % 2)]))
        x = x + f if k < 2 else norms[k](L * x + f)
    torch.testing.assert_close(y, x)


def test_blocks_without_norms_get_both():
    branches, _, x = setting()
    connections = shaken(stack("none"))
    assert sum(p.numel() for p in connections.parameters()) == (L + L - 2) * D
    y = x
    for block, c in enumerate(connections):
        y, state = c.begin(y)
        for k in (0, 1):
            y, state = c.merge(k, state, y, branches[2 * block + k](y))
        y = c.end(y, state)
    for k in range(L):
        c = connections[k // 2]
        f = branches[k](rms(x, c.inner[str(k % 2)]))
        x = x + f if k < 2 else rms(L * x + f, c.outer[str(k % 2)])
    torch.testing.assert_close(y, x)


def test_outer_logic_equals_x_mlps_pytorch():
    oracle = (
        pytest.importorskip("x_mlps_pytorch")
        .ResidualNormedMLP(D, depth=2 * L, residual_every=2, keel_post_ln=True)
        .double()
    )
    x = torch.randn(B, D, dtype=torch.float64)
    outer = [None, *oracle.post_norms]  # its first block has no outer norm, ours first two: shift by one
    y = x
    for k in range(L):
        context = ConnectionContext(
            D,
            1,
            offset=k + 1,
            total_sites=L,
            norm_kinds=("post",),
            outer_norms=(outer[k] or nn.Identity(),),
            dtype=torch.float64,
        )
        c = make_connection("keel-postln", context)
        c.inner["0"] = nn.Identity()  # the oracle has no inner norm
        y, state = c.begin(y)
        y, state = c.merge(0, state, y, oracle.layers[k](y))
        y = c.end(y, state)
    torch.testing.assert_close(y, oracle(x), rtol=0, atol=1e-6)


def test_the_blocks_norm_is_a_reference_and_follows_a_deep_copy():
    _, norms, _ = setting()
    block = nn.Module()
    block.norms, block.connection = norms, stack("post", list(norms))[1]
    assert not any("existing" in name for name, _ in block.connection.named_parameters())
    twin = copy.deepcopy(block)
    assert twin.connection.norm_after(0) is twin.norms[2]


def test_post_norm_without_its_module_is_refused():
    with pytest.raises(FlowscopeError, match="cannot become the outer norm"):
        stack("post")


def test_deepnorm_scales_the_carry_by_the_depth():
    context = ConnectionContext(D, 2, 1, 8, norm_kinds=("post", "post"), role="encoder")
    c = make_connection("deepnorm", context)
    x, f = torch.randn(2, B, T, D).unbind()
    assert c.alpha == (2.0, 2.0)  # (2 * 8)^(1/4)
    assert c.beta == pytest.approx(0.3535533905932738)  # 64^(-1/4)
    torch.testing.assert_close(c.merge(1, None, x, f)[0], 2 * x + f)
    with pytest.raises(FlowscopeError, match="keel-postln"):
        make_connection("deepnorm", ConnectionContext(D, 2))


def test_deepnorm_constants():
    """The expressions of torchscale 0.3.0 as numbers; its encoder beta (1.15) is the paper's .87 inverted."""
    assert deepnorm_constants(18, 0).encoder == pytest.approx((36**0.25, 144**-0.25))
    assert deepnorm_constants(0, 18).decoder == pytest.approx((36**0.25, 144**-0.25))
    assert deepnorm_constants(18, 0).decoder is None
    both = deepnorm_constants(6, 12)
    # 6^4 * 12 = 15552, its sixteenth root 1.8280...
    assert both.encoder == pytest.approx((0.81 * 15552**0.0625, 0.87 / 15552**0.0625))
    assert both.decoder == pytest.approx((36**0.25, 144**-0.25))
    with pytest.raises(FlowscopeError, match="at least one block"):
        deepnorm_constants(0, 0)


def test_deepnorm_init_scales_values_and_feed_forward_but_not_queries_and_keys():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(128, 4, 256)
    scaled = deepnorm_init_(block, 0.25, torch.Generator().manual_seed(3))
    assert scaled == ["self_attn.in_proj_weight[v]", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    for name, weight, branch in deepnorm_weights(block):
        fan = sum(weight.shape)
        expected = (0.25 if branch else 1.0) * (2 / fan) ** 0.5  # Xavier
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name


def test_deepnorm_finds_the_weights_of_separate_and_packed_projections():
    block = nn.ModuleDict({n: nn.Linear(6, 6) for n in ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")})
    block["qkv"] = nn.Linear(6, 18)
    branch = {name: branch for name, _, branch in deepnorm_weights(block)}
    assert branch == {
        **{f"{n}.weight": n not in ("q_proj", "k_proj") for n in block if n != "qkv"},
        "qkv.weight[q]": False,
        "qkv.weight[k]": False,
        "qkv.weight[v]": True,
    }


def test_norms_that_are_skipped_are_frozen_until_unwrap() -> None:
    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.fc(x).tanh())

    model = nn.Sequential(*(Post() for _ in range(4)))
    model[1].norm.bias.requires_grad_(False)  # the user's own choice stays
    flowscope.wrap(model, mode="keel-postln", example_inputs=torch.randn(3, 5, 8))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["0.norm.weight", "0.norm.bias", "1.norm.weight", "1.norm.bias"]
    model(torch.randn(3, 5, 8)).sum().backward()
    # what trains gets a gradient, so that DDP waits for nothing that never comes
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    flowscope.unwrap(model)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["1.norm.bias"]


def test_keel_postln_is_refused_where_every_flow_has_two_sub_layers_at_most() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layer(self.norm(x))

    short, x = nn.Sequential(Block(), Block()), torch.randn(3, 5, 8)
    with pytest.raises(FlowscopeError, match="nothing would change at 2 of 2 blocks"):
        flowscope.wrap(short, mode="keel-postln", example_inputs=x)
    assert not flowscope.is_wrapped(short)
    flowscope.wrap(nn.Sequential(Block(), Block(), Block()), mode="keel-postln", example_inputs=x)
