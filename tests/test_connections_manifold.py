"""`mhc`: the projection (values, properties, gradients, memory) and the connection against DeepSeek-V4's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flowscope.merging.connection import ConnectionContext
from flowscope.merging.manifold import sinkhorn
from flowscope.merging.modes import make_connection, parse_options

# torch's own code: forward-mode AD scripts its decompositions on first use, dynamo makes an instance of a Function
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

B, T, D, N = 3, 5, 8, 4


def connection(sites=2, dtype=torch.float64, **options):
    return make_connection("mhc", ConnectionContext(D, sites, dtype=dtype), parse_options("mhc", **options))


def shaken(module, size=0.4):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * size)
    return module


def naive_sinkhorn(logits, iterations):
    m = logits.exp()
    for _ in range(iterations):
        m = m / m.sum(-2, keepdim=True)  # columns
        m = m / m.sum(-1, keepdim=True)  # rows
    return m


@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_sinkhorn_equals_the_definition_and_its_gradient(iterations):
    logits = torch.randn(B, T, 3, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(B, T, 3, 3, dtype=torch.float64)
    ours, theirs = sinkhorn(logits, iterations), naive_sinkhorn(logits, iterations)
    torch.testing.assert_close(ours, theirs)
    (a,), (b,) = (torch.autograd.grad((m * weight).sum(), logits) for m in (ours, theirs))
    torch.testing.assert_close(a, b)


def test_sinkhorn_equals_the_hyper_connections_package():
    theirs = pytest.importorskip("hyper_connections.manifold_constrained_hyper_connections").sinkhorn_knopps
    logits = torch.randn(B, T, N, N) * 2
    torch.testing.assert_close(sinkhorn(logits, 20), theirs(logits, iters=20), rtol=0, atol=1e-6)


def test_rows_are_exact_and_all_error_is_in_the_columns():
    logits = torch.randn(50, N, N) * 4
    m = sinkhorn(logits, 2)
    torch.testing.assert_close(m.sum(-1), torch.ones(50, N), rtol=0, atol=1e-6)
    assert (m.sum(-2) - 1).abs().max() > 1e-2
    converged = sinkhorn(torch.randn(50, N, N), 20)
    torch.testing.assert_close(converged.sum(-2), torch.ones(50, N), rtol=0, atol=1e-4)
    assert (converged > 0).all()


def test_sinkhorn_survives_logits_that_overflow_exp():
    logits = torch.diag(torch.full((N,), 500.0)).expand(2, N, N)
    torch.testing.assert_close(sinkhorn(logits), torch.eye(N).expand(2, N, N))
    assert sinkhorn(logits.to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(("c", "diagonal"), [(0.0, 0.25), (1.0, 0.475), (2.0, 0.711), (4.0, 0.948)])
def test_diagonal_of_the_projected_identity(c, diagonal):
    assert sinkhorn(c * torch.eye(N))[0, 0].item() == pytest.approx(diagonal, abs=6e-4)


def test_all_orders_of_differentiation():
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: sinkhorn(z, 4), logits, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda z: sinkhorn(z, 4), logits)
    reverse = torch.func.jacrev(lambda z: sinkhorn(z, 4))(logits.detach())
    torch.testing.assert_close(torch.func.jacfwd(lambda z: sinkhorn(z, 4))(logits.detach()), reverse)
    ours, theirs = (
        torch.func.hessian(lambda z, project=project: project(z, 4).square().sum())(logits.detach())
        for project in (sinkhorn, naive_sinkhorn)
    )
    torch.testing.assert_close(ours, theirs)


def test_only_the_logits_are_kept_for_backward():
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    logits = torch.randn(B, T, N, N, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        sinkhorn(logits, 20)
        ours, kept = sum(kept), []
        naive_sinkhorn(logits, 20)
    assert ours == logits.numel()
    assert sum(kept) > 40 * logits.numel()


def test_compiled_it_is_one_operator_and_exported_none():
    logits = torch.randn(N, N, 5, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.flowscope.sinkhorn, (logits, 3))
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.testing.assert_close(torch.compile(sinkhorn, backend=backend, fullgraph=True)(logits, 3), sinkhorn(logits, 3))
    assert any("flowscope.sinkhorn" in name for name in targets)

    class Projects(torch.nn.Module):
        def forward(self, logits):
            return sinkhorn(logits, 3)

    for strict in (False, True):
        exported = torch.export.export(Projects(), (logits.detach(),), strict=strict)
        assert not any("flowscope" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(exported.module()(logits.detach()), sinkhorn(logits.detach(), 3))


def test_equals_deepseek_v4_in_transformers():
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    eps = 1e-12
    settings = SimpleNamespace(hc_mult=N, hc_sinkhorn_iters=40, hc_eps=eps, rms_norm_eps=1e-20, hidden_size=D)
    oracle, ours = modeling.DeepseekV4HyperConnection(settings), shaken(connection(1, iterations=40)).float()
    site = ours.site[0]
    with torch.no_grad():  # order pre, post, comb as ours; their comb is the transpose of Hres
        n = 2 * N
        transpose = torch.arange(N * N).view(N, N).t().flatten()
        oracle.fn.copy_(torch.cat([site.generator[:n], site.generator[n:][transpose]]))
        oracle.base.copy_(torch.cat([site.static[:n], site.static[n:][transpose]]))
        oracle.scale.copy_(site.scale)
    streams = torch.randn(B, T, N, D)
    post, comb, collapsed = oracle(streams)
    f = torch.randn(B, T, D)
    expected = post.unsqueeze(-1) * f.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
    ours.first = ours.last = False
    h0, state = ours.begin(streams)
    torch.testing.assert_close(h0, collapsed, rtol=0, atol=1e-5)
    y, state = ours.merge(0, state, h0, f)
    torch.testing.assert_close(ours.end(y, state), expected, rtol=0, atol=1e-5)


def test_equals_a_loop_over_positions():
    c, x = shaken(connection(1)), torch.randn(B, T, N, D, dtype=torch.float64)
    c.first = c.last = False
    site, f = c.site[0], nn.Linear(D, D).double()
    h0, state = c.begin(x)
    y, state = c.merge(0, state, h0, f(h0))
    y = c.end(y, state)
    for b in range(B):
        for t in range(T):
            h = x[b, t]
            v = h.flatten() / h.square().mean().sqrt()
            logits = site.generator @ v
            a, bias = site.scale, site.static
            pre = torch.sigmoid(a[0] * logits[:N] + bias[:N])
            post = 2 * torch.sigmoid(a[1] * logits[N : 2 * N] + bias[N : 2 * N])
            residual = naive_sinkhorn((a[2] * logits[2 * N :] + bias[2 * N :]).view(N, N), 20)
            out = f(sum(pre[j] * h[j] for j in range(N)))
            for i in range(N):
                expected = sum(residual[i, j] * h[j] for j in range(N)) + post[i] * out
                torch.testing.assert_close(y[b, t, i], expected)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_starts_with_a_near_one_hot_read_and_unit_writes(n):
    seen = {}
    c = connection(3, streams=n)
    c.observer = lambda site, name, tensor, _: seen.setdefault((site, name), tensor)
    x, state = c.begin(torch.randn(B, T, D, dtype=torch.float64))
    for k in range(3):
        x, state = c.merge(k, state, x, x.sin())
        read = c.site[k](seen[k, "streams"].reshape(-1, n, D))[0][0, 0]
        write = seen[k, "write"][0, :, 0]
        torch.testing.assert_close(read.sum().item(), 1.0, rtol=0, atol=1e-6)
        assert read[k % n].item() == pytest.approx(1.0 if n == 1 else 0.94, abs=1e-6)
        torch.testing.assert_close(write, torch.ones_like(write))


def test_the_mixing_gets_gradient_and_moves():
    """At step 0 the streams are equal, so Hres gets none; a uniform read would keep it so for ever."""
    torch.manual_seed(0)
    c = connection(4, torch.float32)
    branches = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh()) for _ in range(4))
    x, target = torch.randn(16, T, D), torch.randn(16, T, D)
    optimizer = torch.optim.AdamW([*c.parameters(), *branches.parameters()], lr=1e-2, weight_decay=0.0)
    start = [sinkhorn(site.static.detach()[2 * N :].view(N, N)) for site in c.site]
    losses, moved_by = [], []
    for step in range(60):
        h, state = c.begin(x)
        for k, f in enumerate(branches):
            h, state = c.merge(k, state, h, f(h))
        loss = (c.end(h, state) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        grads = [site.static.grad[2 * N :].norm().item() for site in c.site]
        if step == 0:
            assert max(grads) < 1e-6
        if step == 3:
            # the last site's residual mapping cannot matter before the mean: its columns sum to 1
            assert all(g > 1e-6 for g in grads[1:-1])
        optimizer.step()
        losses.append(loss.item())
        moved_by = [
            (sinkhorn(site.static.detach()[2 * N :].view(N, N)) - m).abs().max().item()
            for site, m in zip(c.site, start, strict=True)
        ]
    assert losses[-1] < 0.8 * losses[0]
    assert max(moved_by) > 0.02


def test_gradient_at_the_initial_logits_is_not_dead():
    """formulas: .098 at a diagonal of 4, 1.8e-3 at 8, 1.4e-8 at 20; ours starts at 2."""

    def gradient(c):
        logits = (c * torch.eye(N, dtype=torch.float64)).requires_grad_()
        return torch.autograd.grad(sinkhorn(logits)[0, 0], logits)[0].norm().item()

    start = parse_options("mhc").init_diagonal
    assert gradient(start) > 0.1
    assert gradient(start) > 50 * gradient(8.0)


def test_positions_that_are_all_zero_pass_no_gradient_through_the_norm():
    c = shaken(connection(sites=1))
    x = torch.randn(B, T, D, dtype=torch.float64)
    x[1, 2] = 0.0  # a pixel whose features a ReLU has all switched off
    x.requires_grad_()
    weight = torch.randn(B, T, D, dtype=torch.float64)

    def run(x):
        read, state = c.begin(x)
        y, state = c.merge(0, state, read, torch.cos(read))
        return c.end(y, state)

    (gradient,) = torch.autograd.grad((run(x) * weight).sum(), x)
    # there read, write and mixing are constants, sigma(b), 2 sigma(b) and the projected b: those of phi = 0
    with torch.no_grad():
        c.site[0].generator.zero_()
    (expected,) = torch.autograd.grad((run(x) * weight).sum(), x)
    assert 0 < gradient[1, 2].abs().max() < 1e3
    torch.testing.assert_close(gradient[1, 2], expected[1, 2])
    assert not torch.allclose(gradient[0], expected[0])
