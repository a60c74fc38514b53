"""`shc` and `dhc`: naive per-stream loops, the paper's special cases and counts, the hyper-connections package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowscope.merging.connection import ConnectionContext
from flowscope.merging.hyper import DynamicSite, StaticSite
from flowscope.merging.modes import make_connection, parse_options
from flowscope.merging.streams import StreamConnection

B, T, D, N = 3, 5, 8, 4


def connection(mode, sites=2, block=0, blocks=1, dtype=torch.float64, features=D, **options):
    context = ConnectionContext(
        features, sites, block, blocks, block == 0, block == blocks - 1, sites * block, dtype=dtype
    )
    return make_connection(mode, context, parse_options(mode, **options))


def shaken(module, size=0.4):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * size)
    return module


def run(c, branches, x):
    x, state = c.begin(x)
    for k, f in enumerate(branches):
        x, state = c.merge(k, state, x, f(x))
    return c.end(x, state)


def linears(count, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(count)).double()


def naive(site, streams, f, norm, tanh=True):
    """Equations 2-5 and 10-13 for one position, stream by stream: streams are a list of [D] vectors."""
    n = len(streams)
    static = site.static  # rows: A_m, A_r transposed, B
    read, residual, write = [], [[0.0] * n for _ in range(n)], []
    for j, h in enumerate(streams):
        dynamic = [0.0] * (n + 2)
        if isinstance(site, DynamicSite):
            s_alpha, s_beta = site.scale[0], site.scale[-1]
            s_residual = site.scale[1] if len(site.scale) == 3 else s_alpha
            for row, w in enumerate(site.generator):
                logit = (norm(h) * w).sum()
                scale = s_alpha if row == 0 else s_beta if row == n + 1 else s_residual
                dynamic[row] = scale * (torch.tanh(logit) if tanh else logit)
        read.append(static[0, j] + dynamic[0])
        write.append(static[n + 1, j] + dynamic[n + 1])
        for i in range(n):
            residual[j][i] = static[1 + i, j] + dynamic[1 + i]  # A_r[j, i]: from j to i
    h0 = sum(a * h for a, h in zip(read, streams, strict=True))
    out = f(h0)
    return [sum(residual[j][i] * streams[j] for j in range(n)) + write[i] * out for i in range(n)]


def layer(h):
    return (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()


def rms(h):
    return h / (h.square().mean() + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("mode", "options", "norm"),
    [
        ("shc", {"streams": 3, "reduce": "sum"}, None),
        ("dhc", {}, layer),
        ("dhc", {"streams": 2, "norm": "rms", "tanh": False, "separate_scales": True}, rms),
        ("dhc", {"streams": 3, "norm": "none"}, lambda h: h),
        ("dhc", {"norm": "layer_affine"}, "affine"),
    ],
)
def test_equals_a_loop_over_positions_and_streams(mode, options, norm):
    c, branches = shaken(connection(mode, **options)), linears(2)
    x = torch.randn(B, T, D, dtype=torch.float64)
    y = run(c, branches, x)
    for b in range(B):
        for t in range(T):
            streams = [x[b, t]] * c.streams
            for site, f in zip(c.site, branches, strict=True):
                rule = norm
                if norm == "affine":

                    def rule(h, site=site):
                        return layer(h) * site.norm_weight + site.norm_bias

                streams = naive(site, streams, f, rule, options.get("tanh", True))
            total = sum(streams)
            expected = total if options.get("reduce") == "sum" else total / c.streams
            torch.testing.assert_close(y[b, t], expected)


@pytest.mark.parametrize("paper_norm", [True, False])
@pytest.mark.parametrize("tanh", [True, False])
def test_equals_the_hyper_connections_package(paper_norm, tanh):
    package = pytest.importorskip("hyper_connections")
    init, expand, reduce = package.get_init_and_expand_reduce_stream_functions(N)
    branches, sites = linears(3), []
    ours = shaken(connection("dhc", sites=3, reduce="sum", tanh=tanh, norm="layer" if paper_norm else "rms"))
    x = torch.randn(B, T, D, dtype=torch.float64)
    y = expand(x)
    for k, (site, f) in enumerate(zip(ours.site, branches, strict=True)):
        oracle = init(dim=D, branch=f, layer_index=k, tanh=tanh).double()
        sites.append(oracle)
        if paper_norm:
            oracle.norm = nn.LayerNorm(D, elementwise_affine=False)
        else:  # without the epsilon that its own has not
            oracle.norm = nn.RMSNorm(D, eps=1e-5, elementwise_affine=False)
        with torch.no_grad():
            oracle.static_alpha.copy_(site.static[: N + 1].t())
            oracle.static_beta.copy_(site.static[N + 1])
            oracle.dynamic_alpha_fn.copy_(site.generator[: N + 1].t())
            oracle.dynamic_beta_fn.copy_(site.generator[N + 1])
            oracle.dynamic_alpha_scale.copy_(site.scale[0])
            oracle.dynamic_beta_scale.copy_(site.scale[1])
        y = oracle(y)
    torch.testing.assert_close(run(ours, branches, x), reduce(y), rtol=0, atol=1e-6)


def test_static_equals_the_package_without_generators():
    package = pytest.importorskip("hyper_connections")
    init, expand, reduce = package.get_init_and_expand_reduce_stream_functions(N)
    branches, ours = linears(2), shaken(connection("shc", reduce="sum"))
    x = torch.randn(B, T, D, dtype=torch.float64)
    y = expand(x)
    for k, (site, f) in enumerate(zip(ours.site, branches, strict=True)):
        oracle = init(dim=D, branch=f, layer_index=k).double()  # its generators start at 0
        with torch.no_grad():
            oracle.static_alpha.copy_(site.static[: N + 1].t())
            oracle.static_beta.copy_(site.static[N + 1])
        y = oracle(y)
    torch.testing.assert_close(run(ours, branches, x), reduce(y), rtol=0, atol=1e-6)


def test_starts_as_the_package_does():
    package = pytest.importorskip("hyper_connections")
    init, _, _ = package.get_init_and_expand_reduce_stream_functions(N)
    for k, site in enumerate(connection("dhc", sites=6).site):
        oracle = init(dim=D, branch=nn.Identity(), layer_index=k)
        torch.testing.assert_close(site.static[: N + 1].t().float(), oracle.static_alpha.data)
        torch.testing.assert_close(site.static[N + 1].float(), oracle.static_beta.data)
        assert site.scale.tolist() == pytest.approx([0.01, 0.01])
        assert not site.generator.any()


def test_one_stream_is_pre_norm():
    branches, x = linears(2), torch.randn(B, T, D, dtype=torch.float64)
    c = connection("shc", streams=1)
    assert c.site[0].static.tolist() == [[1.0], [1.0], [1.0]]  # [[0, 1], [1, 1]]: B, A_m, A_r
    expected = x + branches[0](x)
    torch.testing.assert_close(run(c, branches, x), expected + branches[1](expected))


def test_the_papers_sequential_matrix_reads_what_was_written():
    """Equation 17, n = 2: [[0, 1, 1], [1, 1, 0], [0, 0, 1]] makes layers sequential, as one residual."""
    c, branches = connection("shc", streams=2), linears(2)
    hc = torch.tensor([[0.0, 1, 1], [1, 1, 0], [0, 0, 1]])
    with torch.no_grad():
        for site in c.site:
            site.static.copy_(torch.cat([hc[1:, :1].t(), hc[1:, 1:].t(), hc[:1, 1:]]))
    x = torch.randn(B, T, D, dtype=torch.float64)
    y = x + branches[0](x)
    torch.testing.assert_close(run(c, branches, x), y + branches[1](y))


def test_streams_travel_between_blocks():
    branches, x = linears(4), torch.randn(B, T, D, dtype=torch.float64)
    whole = shaken(connection("dhc", sites=4))
    first, last = (connection("dhc", block=block, blocks=2) for block in (0, 1))
    for k, site in enumerate((*first.site, *last.site)):
        site.load_state_dict(whole.site[k].state_dict())
    between = run(first, branches[:2], x)
    assert between.shape == (B, T, N, D)
    torch.testing.assert_close(run(last, branches[2:], between), run(whole, branches, x))


def test_parameter_counts_of_the_paper():
    def count(**options):
        with torch.device("meta"):
            site = DynamicSite(ConnectionContext(2048, 2), parse_options("dhc", **options), 0)
        return sum(p.numel() for p in site.parameters())

    assert 32 * count() == 394_048  # OLMo-1B x4
    assert 32 * count(norm="layer_affine") == 525_120
    static = StaticSite(ConnectionContext(2048, 2), parse_options("shc"), 0)
    assert sum(p.numel() for p in static.parameters()) == 24  # n (n + 2)


@pytest.mark.parametrize(
    ("init", "read", "diagonal"),
    [
        ("prenorm", [0, 1, 0, 0], [1, 1, 1, 1]),  # sub-layer 5 of 4 streams
        ("ramp", [1, 0.75, 0.5, 0.25], [0, 0.25, 0.5, 0.75]),
        ("alternate", [1, 2, 1, 2], [1, 0, 1, 0]),
        ("mixed", [0.5, 1, 0.5, 1], [0.5, 0.25, 0, 0.5]),
    ],
)
def test_initialisations(init, read, diagonal):
    static = StaticSite(ConnectionContext(D, 1), parse_options("shc", init=init, output_scale=True), 5).static.detach()
    assert static[0].tolist() == read
    assert static[1:5].tolist() == torch.diag(torch.tensor(diagonal, dtype=torch.float32)).tolist()
    assert static[5].tolist() == [0.5] * 4  # 1 / sqrt(4)


def test_sparse_initialisation_uses_no_global_randomness():
    state = torch.get_rng_state()
    sites = [StaticSite(ConnectionContext(D, 1), parse_options("shc", init="sparse"), k).static for k in (0, 1, 1)]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(sites[1], sites[2])
    assert not torch.equal(sites[0], sites[1])
    assert sites[0][0].norm().item() == pytest.approx(0.1)
    assert 0 <= sites[0][1:5].min() < sites[0][1:5].max() <= 0.2


def test_large_means_do_not_spoil_the_norm():
    """The norm is applied to the product: the variance is a difference of squares."""
    site = shaken(DynamicSite(ConnectionContext(64, 1), parse_options("dhc"), 0))
    rows = torch.randn(6, 64) + 30.0
    expected = site.generator @ nn.functional.layer_norm(rows, (64,)).t()
    torch.testing.assert_close(site.logits(rows), expected, rtol=2e-3, atol=2e-3)


FUSED = [{}, {"norm": "rms", "tanh": False}, {"separate_scales": True, "streams": 3}]


def gradients(c, branches, x, backward_context=None):
    x = x.clone().requires_grad_()
    loss = run(c, branches, x).square().sum()
    inputs = [x, *c.parameters()]
    if backward_context is None:
        return torch.autograd.grad(loss, inputs)
    with backward_context:
        return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("options", FUSED)
def test_one_pass_equals_the_plain_form(options):
    c, branches, x = shaken(connection("dhc", **options)), linears(2), torch.randn(B, T, D, dtype=torch.float64)
    plain, mixed = shaken(connection("dhc", **options)), []

    def mix(site, h):
        mixed.append(site)
        return StreamConnection._mix(plain, site, h)

    plain._mix = mix
    for got, expected in zip(gradients(c, branches, x), gradients(plain, branches, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert mixed == [0, 1]


@pytest.mark.parametrize("options", FUSED)
def test_an_observer_changes_no_bit(options):
    c, branches, x = shaken(connection("dhc", **options)), linears(2), torch.randn(B, T, D, dtype=torch.float64)
    bare, seen = gradients(c, branches, x), []
    c.observer = lambda site, name, tensor, through: seen.append(name)
    for got, expected in zip(gradients(c, branches, x), bare, strict=True):
        assert torch.equal(got, expected)
    assert seen.count("residual_mix") == seen.count("write") == 2


def test_a_gradient_reaches_what_probes_hook():
    c, branches, hooked = shaken(connection("dhc")), linears(2), []

    def observe(site, name, tensor, through):
        (tensor if through is None else through).register_hook(lambda grad: hooked.append((site, name)))

    c.observer = observe
    gradients(c, branches, torch.randn(B, T, D, dtype=torch.float64))
    # the residual mapping is made in one node with what it mixes, which is hooked in its place
    names = ("streams", "branch_input", "residual_mix", "write")
    assert sorted(hooked) == sorted((site, name) for site in (0, 1) for name in names)


def test_backward_may_be_called_within_autocast():
    c, x = shaken(connection("dhc", dtype=torch.float32)), torch.randn(B, T, D)
    outside = gradients(c, [torch.cos, torch.sin], x)
    inside = gradients(c, [torch.cos, torch.sin], x, torch.autocast("cpu", torch.bfloat16))
    for got, expected in zip(inside, outside, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03 * expected.abs().max().item())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_of_each_sample_under_vmap():
    c, x = shaken(connection("dhc")), torch.randn(B, T, D, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in c.named_parameters()}

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = c

        def forward(self, x):
            return run(self.c, [torch.cos, torch.sin], x)

    def loss(parameters, x):
        named = {f"c.{name}": p for name, p in parameters.items()}
        return torch.func.functional_call(Flow(), named, (x.unsqueeze(0),)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for k in range(B):
        alone = torch.func.grad(loss)(parameters, x[k])
        for name, expected in alone.items():
            torch.testing.assert_close(each[name][k], expected)
