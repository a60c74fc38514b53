"""What every connection promises: it starts right, differentiates in every way, and keeps dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ConnectionContext
from flowscope.merging.manifold import ManifoldConnection
from flowscope.merging.modes import MODES, make_connection, parse_options, rule_of

# torch's own code: forward-mode AD scripts its decompositions on first use, dynamo makes an instance of a Function
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

B, T, D = 3, 5, 8
BLOCKS, SITES = 3, 2
ANYWHERE = [mode for mode in MODES if mode != "deepnorm"]  # which refuses what has no norms behind its adds
STREAMED = [mode for mode, rule in MODES.items() if "residual_mix" in rule.observed]
CASES = [
    *((mode, {}) for mode in ANYWHERE),
    ("keel", {"gate": "feature", "share_gate": "block", "preserve": True}),
    ("highway", {"gate": "token"}),
    ("shc", {"streams": 3}),
    ("dhc", {"norm": "layer_affine", "separate_scales": True}),
    ("dhc", {"norm": "rms", "tanh": False}),
    ("dhc", {"norm": "none", "streams": 1}),
    ("mhc", {"iterations": 5}),
    ("mhc", {"streams": 3}),
    ("mhc", {"streams_init": "distinct"}),
    ("dhc", {"streams_init": "distinct"}),
]
IDS = [f"{mode}-{'-'.join(map(str, options.values()))}".rstrip("-") for mode, options in CASES]


def stack(mode: str, options: dict, dtype: torch.dtype = torch.float32, **place) -> nn.ModuleList:
    settings = parse_options(mode, **options)
    return nn.ModuleList(
        make_connection(
            mode,
            ConnectionContext(
                D,
                SITES,
                block,
                BLOCKS,
                block == 0,
                block == BLOCKS - 1,
                SITES * block,
                behind=SITES * block,
                between=SITES * BLOCKS,
                dtype=dtype,
                **place,
            ),
            settings,
        )
        for block in range(BLOCKS)
    )


def run(connections: nn.ModuleList, branches, x: Tensor) -> Tensor:
    """A flow of pre-norm blocks, as the weaving runs them."""
    branch = iter(branches)
    for connection in connections:
        x, state = connection.begin(x)
        for site in range(connection.sites):
            x, state = connection.at_site(site, state, x, next(branch)(x))
        x = connection.end(x, state)
    return x


def branches(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    count = BLOCKS * SITES
    return nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh()) for _ in range(count)).to(dtype)


def shaken(module: nn.Module, size: float = 0.3) -> nn.Module:
    """Off the initial values, where half of the terms vanish."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * size)
    return module


@pytest.mark.parametrize(("mode", "options"), CASES, ids=IDS)
def test_output_at_the_start_is_the_plain_residual_exactly_where_promised(mode, options):
    fs, x = branches(torch.float64), torch.randn(B, T, D, dtype=torch.float64)
    plain = x
    for f in fs:
        plain = plain + f(plain)
    connections = stack(mode, options, torch.float64)
    gap = (run(connections, fs, x) - plain).abs().max().item()
    if all(connection.keeps_output() for connection in connections):
        # the read of the kinds of mHC sums to 1 only to the rounding of fp32 initial values
        assert gap < (1e-5 if issubclass(MODES[mode], ManifoldConnection) else 1e-13)
    else:
        assert gap > 1e-2


@pytest.mark.parametrize(("mode", "options"), CASES, ids=IDS)
def test_derivatives_of_first_and_second_order_and_forward_mode(mode, options):
    connections = shaken(stack(mode, options, torch.float64)[:1])
    connection = connections[0]
    connection.last = True
    names = [name for name, _ in connection.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in connection.parameters()]

    def call(x: Tensor, f0: Tensor, f1: Tensor, *parameters: Tensor) -> Tensor:
        def body(x):
            x, state = connection.begin(x)
            x, state = connection.merge(0, state, x, f0 * x.cos())
            x, state = connection.merge(1, state, x, f1 * x.sin())
            return connection.end(x, state)

        return torch.func.functional_call(Body(connection, body), dict(zip(names_of, parameters, strict=True)), (x,))

    names_of = [f"connection.{name}" for name in names]
    tensors = [torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True) for _ in range(3)] + values
    assert torch.autograd.gradcheck(call, tensors, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)
    tangents = tuple(torch.randn_like(t) for t in tensors)
    _, along = torch.func.jvp(call, tuple(t.detach() for t in tensors), tangents)
    eps = 1e-6
    up, down = (call(*[t.detach() + s * eps * d for t, d in zip(tensors, tangents, strict=True)]) for s in (1, -1))
    torch.testing.assert_close(along, (up - down) / (2 * eps), rtol=1e-5, atol=1e-7)


class Body(nn.Module):
    def __init__(self, connection: Connection, body) -> None:
        super().__init__()
        self.connection, self.body = connection, body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("mode", ANYWHERE)
def test_compiled_without_a_break_equals_eager(mode):
    options = {"iterations": 3} if mode == "mhc" else {}
    connections, fs, x = shaken(stack(mode, options), 0.05)[1:], branches(), torch.randn(B, T, D, requires_grad=True)
    connections[0].first = True
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(connections, fs, x), fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, lambda x: run(connections, fs, x)):
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *connections.parameters()])))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "options"), CASES, ids=IDS)
def test_autocast_keeps_the_carry_in_the_dtype_of_a_plain_add(mode, options):
    connections, fs, x = stack(mode, options), branches(), torch.randn(B, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        low = run(connections, fs, x)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, run(connections, fs, x), rtol=0.05, atol=0.1)


@pytest.mark.parametrize(("mode", "options"), CASES, ids=IDS)
def test_bf16_parameters_give_bf16_output_near_the_fp32_one(mode, options):
    connections, fs, x = shaken(stack(mode, options), 0.02), branches(), torch.randn(B, T, D)
    expected = run(connections, fs, x)
    got = run(connections.to(torch.bfloat16), fs.to(torch.bfloat16), x.to(torch.bfloat16))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.2)
    got.float().square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in connections.parameters())


@pytest.mark.parametrize("mode", ANYWHERE)
def test_features_on_axis_1_equal_features_last(mode):
    last = shaken(stack(mode, {}, torch.float64), 0.1)
    first = shaken(stack(mode, {}, torch.float64, feature_axis=1), 0.1)
    x = torch.randn(B, 4, 6, D, dtype=torch.float64)  # B, height, width, D
    expected = run(last, itertools.repeat(torch.tanh), x)
    got = run(first, itertools.repeat(torch.tanh), x.movedim(-1, 1).contiguous())
    torch.testing.assert_close(got.movedim(1, -1), expected)


@pytest.mark.parametrize("mode", STREAMED)
def test_post_norm_blocks_keep_their_output_and_change_of_all_streams(mode):
    """What the block's code does to the carry (here its norm) reaches every stream."""
    kinds = {"norm_kinds": ("post", "post")}
    connections, fs = stack(mode, {}, torch.float64, **kinds), branches(torch.float64)
    norms = shaken(nn.ModuleList(nn.LayerNorm(D) for _ in fs)).double()
    x = plain = torch.randn(B, T, D, dtype=torch.float64)
    for f, norm in zip(fs, norms, strict=True):
        plain = norm(plain + f(plain))
    step = iter(zip(fs, norms, strict=True))
    for connection in connections:
        x, state = connection.begin(x)
        for site in range(SITES):
            f, norm = next(step)
            x, state = connection.merge(site, state, x, f(x))
            x = norm(x)
        x = connection.end(x, state)
    torch.testing.assert_close(x, plain, rtol=1e-5, atol=1e-5)


def test_observer_sees_what_each_mode_names():
    expected = {
        "residual": set(),
        "keel": {"gate_logit"},
        "highway": {"gate_logit"},
        "keel-postln": {"norm_input"},
        "rezero": {"branch_scale"},
        "layer-scale": {"branch_scale"},
        "attention-residuals": {"branch_input", "input_share"},
        "block-attention-residuals": {"branch_input", "input_share"},
        "peri-ln": set(),
        **{mode: {"branch_input", "streams", "residual_mix", "write"} for mode in STREAMED},
    }
    for mode in ANYWHERE:
        names = expected[mode]
        connections, seen = stack(mode, {}), {}
        for connection in connections:
            connection.observer = lambda site, name, tensor, _, seen=seen: seen.setdefault(name, []).append(tensor)
        run(connections, branches(), torch.randn(B, T, D))
        assert len(seen.pop(None)) == BLOCKS * SITES  # once a site is done
        assert set(seen) == names
        assert all(names >= set(connection.shown_at(site)) for connection in connections for site in range(SITES))
        count = BLOCKS * SITES - (2 if mode == "keel-postln" else 0)
        assert all(len(tensors) == count for tensors in seen.values())
        if mode in STREAMED:
            assert seen["residual_mix"][0].shape == (1 if mode == "shc" else B * T, 4, 4)


def test_generators_and_static_parameters_split_all_parameters():
    for mode in ANYWHERE:
        dynamic = ("keel", "highway", "dhc", "mhc", "mhc-lite", "kromhc")
        names = {"generator"} if mode in dynamic else set()
        connection = stack(mode, {})[1]
        generators = dict(connection.generator_parameters())
        static = dict(connection.static_parameters())
        assert {name.rsplit(".", 1)[-1] for name in generators} == names
        assert generators.keys().isdisjoint(static)
        assert generators.keys() | static.keys() == dict(connection.named_parameters()).keys()


def test_names_and_aliases():
    assert {rule_of(name).mode for name in ("hyper", "HC", "hyper-connections", "hyper_connections", "dhc")} == {"dhc"}
    assert rule_of("keel_postln").mode == "keel-postln"
    with pytest.raises(FlowscopeError, match="residual, keel, keel-postln, highway, shc, dhc, mhc, deepnorm"):
        rule_of("kel")


def test_options_are_checked():
    assert parse_options("hyper", expansion_rate=2).streams == 2
    assert parse_options("keel").init_bias == "auto"
    with pytest.raises(FlowscopeError, match=r"unknown option 'streams'.*init_bias, gate.*mode shc, dhc, mhc"):
        parse_options("keel", streams=4)
    with pytest.raises(FlowscopeError, match=r"unknown option 'strems'.*streams"):
        parse_options("dhc", strems=4)
    with pytest.raises(FlowscopeError, match="greater than or equal to 1"):
        parse_options("mhc", streams=0)
    with pytest.raises(FlowscopeError, match="give one"):
        parse_options("dhc", streams=4, expansion_rate=4)


@pytest.mark.parametrize("mode", STREAMED)
def test_a_width_that_changes_is_an_error(mode):
    first, middle, _ = stack(mode, {})
    with pytest.raises(FlowscopeError, match="must not change inside a flow"):
        first.begin(torch.randn(B, T, D + 1))
    with pytest.raises(FlowscopeError, match="must not change inside a flow"):
        middle.begin(torch.randn(B, T, D))
    x, state = first.begin(torch.randn(B, T, D))
    with pytest.raises(FlowscopeError, match="must not change inside a flow"):
        first.merge(0, state, x, torch.randn(B, T, D + 1))
