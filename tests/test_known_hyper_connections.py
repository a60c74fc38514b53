"""Hyper-connections of other packages are seen as ours are: against the package's own tensors, in an unwatched copy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hyper_connections import ManifoldConstrainedHyperConnections, get_init_and_expand_reduce_stream_functions
from hyper_connections import mc_get_init_and_expand_reduce_stream_functions as mc_functions
from hyper_connections.hyper_connections import HyperConnections
from torch import Tensor, nn

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.records import Record

S, D, B, T = 3, 8, 4, 5


class Branch(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(D), nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D))


class Stack(nn.Module):
    def __init__(self, functions: Any, **options: Any) -> None:
        super().__init__()
        make, self.expand, self.reduce = functions(S, dim=D, **options)
        self.layers = nn.ModuleList(make(branch=Branch(), layer_index=k) for k in range(4))
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.expand(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.reduce(x))


def shaken(model: nn.Module) -> nn.Module:
    """Zero-initialised generators get values, so that coefficients differ by position."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "dynamic" in name or "static" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            elif "scale" in name:
                parameter.fill_(0.5)
    return model


def seen_in(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(mapping [S, S], weights [S], streams [B*T, S, D]) of each connection, as the package itself used them.

    alpha is read from the package's einsum, beta from what width_connection returns.
    """
    import hyper_connections.hyper_connections as dynamic
    import hyper_connections.manifold_constrained_hyper_connections as manifold

    mixes: list[Tensor] = []
    out: list[tuple[Tensor, Tensor, Tensor]] = []

    for package in (dynamic, manifold):

        def spy(*args: Any, einsum: Any = package.einsum) -> Tensor:
            if args[-1] == "... f1 s f2 t, ... f1 s d -> ... f2 t d":
                mixes.append(args[0].detach())
                mixes.append(args[1].detach())
            return einsum(*args)

        monkeypatch.setattr(package, "einsum", spy)
    for kind in (HyperConnections, ManifoldConstrainedHyperConnections):

        def spied(self: Any, residuals: Tensor, original: Any = kind.width_connection) -> Any:
            given = original(self, residuals)
            alpha, streams = mixes[-2], mixes[-1]
            mapping = alpha[..., 0, :, 0, 1:].reshape(-1, S, S).double().mean(0).T
            weights = given[2]["beta"].detach().reshape(-1, S).double().mean(0)
            out.append((mapping, weights, streams.reshape(-1, S, D)))
            return given

        monkeypatch.setattr(kind, "width_connection", spied)
    copy.deepcopy(model)(x)
    monkeypatch.undo()
    return out


def train(model: nn.Module, batches: list[Tensor]) -> list[Record]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with flowscope.watch(model, optimizer, every=1) as scope:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return list(scope.records)


def stream_cosine(streams: Tensor) -> float:
    pairs = [(i, j) for i in range(S) for j in range(S) if i != j]
    cosines = [torch.cosine_similarity(streams[:, i].double(), streams[:, j].double(), -1) for i, j in pairs]
    return float(torch.stack(cosines).mean())


def dominant(streams: Tensor) -> float:
    energies = [streams[..., i, :].double().square().sum().item() for i in range(S)]
    return max(energies) / sum(energies)


FUNCTIONS = pytest.mark.parametrize(
    ("functions", "options"),
    [
        (get_init_and_expand_reduce_stream_functions, {}),
        (get_init_and_expand_reduce_stream_functions, {"disable": False}),
        (mc_functions, {}),
        (mc_functions, {"log_domain_sinkhorn": True, "num_dynamic_alpha_proposals": 2}),
    ],
    ids=["dynamic", "dynamic given", "manifold", "manifold in logs"],
)


@FUNCTIONS
def test_parity_with_the_packages_own_tensors(functions: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = shaken(Stack(functions, **options)), torch.randn(B, T, D)
    truth = seen_in(model, x, monkeypatch)
    (record,) = train(model, [x])
    assert len(truth) == 4
    assert record.labels("branch_weight", "layers") == [f"layers.{k}" for k in range(4)]
    mixes = np.stack([mapping.numpy() for mapping, _, _ in truth])
    np.testing.assert_allclose(record["mix_matrix"], mixes, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(record["branch_weight"], [w.mean() for _, w, _ in truth], rtol=1e-5)
    np.testing.assert_allclose(record["stream_cosine"], [stream_cosine(s) for *_, s in truth], rtol=1e-4, atol=1e-5)
    distance = [np.linalg.norm(mix - np.eye(S)) for mix in mixes]
    np.testing.assert_allclose(record["mix_identity_distance"], distance, rtol=1e-5, atol=1e-6)
    forward, backward = mixes[3] @ mixes[2] @ mixes[1] @ mixes[0], mixes[3] @ mixes[2]
    assert record["mix_gain_forward"][3] == pytest.approx(np.abs(forward.sum(1)).max(), rel=1e-5)
    assert record["mix_gain_backward"][2] == pytest.approx(np.abs(backward.sum(0)).max(), rel=1e-5)


@FUNCTIONS
def test_gradients_by_connection(functions: Any, options: Any) -> None:
    torch.manual_seed(1)
    model, x = shaken(Stack(functions, **options)), torch.randn(B, T, D)
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    (record,) = train(model, [x])
    for k, layer in enumerate(plain.layers):
        static = [layer.static_alpha.grad, layer.static_beta.grad]
        generators = [p.grad for n, p in layer.named_parameters(recurse=False) if not n.startswith("static")]
        for name, tensors in (("", static), ("_generators", generators)):
            truth = torch.cat([t.flatten() for t in tensors]).double().norm().item()
            assert record[f"connection_grad_norm{name}"][k] == pytest.approx(truth, rel=1e-5)


@FUNCTIONS
def test_training_is_unchanged_and_healthy(functions: Any, options: Any) -> None:
    torch.manual_seed(2)
    model = Stack(functions, **options)
    plain, batches = copy.deepcopy(model), [torch.randn(B, T, D) for _ in range(6)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for x in batches:
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    other = torch.optim.SGD(model.parameters(), lr=0.05)
    with flowscope.watch(model, other, every=1) as scope:
        for x in batches:
            other.zero_grad()
            model(x).square().mean().backward()
            other.step()
        kinds = {a.kind for a in scope.alerts if a.severity != "info"}
    assert not kinds & {"mixing_gain", "stream_collapse", "gate_saturation"}
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(module._forward_hooks for module in model.modules())


def test_what_is_no_matrix_of_streams_is_left_alone() -> None:
    model = Stack(get_init_and_expand_reduce_stream_functions, num_fracs=2)
    (record,) = train(model, [torch.randn(B, T, D)])
    assert "mix_matrix" not in {name.partition("@")[0] for name in record.metrics}


def deepseek() -> nn.Module:
    import transformers

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 12}
    experts = {"n_routed_experts": 5, "num_experts_per_tok": 2, "num_hash_layers": 2}
    low_rank = {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2}
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "sliding_window": 8}
    config = transformers.DeepseekV4Config(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, hc_mult=S, **sizes, **experts, **low_rank, **index
    )
    return transformers.DeepseekV4ForCausalLM(config)  # type: ignore[no-any-return]


class Asks(nn.Module):
    """A model with one argument and one output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=tokens).logits
        return logits


def test_parity_with_what_the_modules_of_transformers_return() -> None:
    torch.manual_seed(3)
    model, tokens = Asks(deepseek()), torch.randint(0, 40, (B, 11))
    plain, truth = copy.deepcopy(model), []
    gradients: dict[int, Tensor] = {}

    def spy(m: Any, args: Any, out: Any) -> None:
        number = len(truth)
        truth.append((args[0], out[0], out[1]))
        args[0].register_hook(lambda gradient: gradients.update({number: gradient}))

    for name, module in plain.named_modules():
        if name.endswith("_hc"):
            module.register_forward_hook(spy)
    plain(tokens).square().mean().backward()
    (record,) = train(model, [tokens])
    close = np.testing.assert_allclose
    close(record["dominant_stream"], [dominant(streams) for streams, *_ in truth], rtol=1e-5)
    close(record["dominant_stream_grad"], [dominant(gradients[k]) for k in range(len(truth))], rtol=1e-4)
    paths = [f"inner.model.layers.{k}.{part}_hc" for k in range(2) for part in ("attn", "ffn")]
    assert record.labels("mix_matrix") == paths
    for k, (streams, post, comb) in enumerate(truth):
        # the decoder adds comb[..., j, i] * streams[..., j, :] to output stream i
        mapping = comb.detach().double().mean((0, 1)).T.numpy()
        np.testing.assert_allclose(record["mix_matrix"][k], mapping, rtol=1e-5, atol=1e-7)
        assert record["branch_weight"][k] == pytest.approx(post.double().mean().item(), rel=1e-5)
        cosine = stream_cosine(streams.detach().reshape(-1, S, streams.shape[-1]))
        assert record["stream_cosine"][k] == pytest.approx(cosine, rel=1e-4)


class HYV4HyperConnection(nn.Module):
    """As transformers' module of this name: the streams are carried on as they are, so there is no mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.hc_mult, self.fn = S, nn.Linear(S * D, 2 * S)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        pre, post = torch.sigmoid(self.fn(streams.flatten(2))).split(S, dim=-1)
        return 2 * post, (pre.unsqueeze(-1) * streams).sum(2)


HYV4HyperConnection.__module__ = "transformers.models.hy_v4.modeling_hy_v4"


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hc, self.mlp = HYV4HyperConnection(), Branch()

    def forward(self, streams: Tensor) -> Tensor:
        post, hidden = self.hc(streams)
        return post.unsqueeze(-1) * self.mlp(hidden).unsqueeze(-2) + streams


def test_streams_that_are_carried_on_as_they_are() -> None:
    torch.manual_seed(4)
    model, x = nn.Sequential(Carried(), Carried(), nn.Linear(D, 2)), torch.randn(B, T, S, D)
    plain = copy.deepcopy(model)
    (record,) = train(model, [x])
    post = [plain[0].hc(x)[0], plain[1].hc(plain[0](x))[0]]
    np.testing.assert_allclose(record["branch_weight"], [p.double().mean().item() for p in post], rtol=1e-5)
    np.testing.assert_array_equal(record["mix_matrix"], np.stack([np.eye(S)] * 2))


class HyperConnectionModule(nn.Module):
    """As Megatron's module of this name: streams are packed [T, B, S*D], and it gives its coefficients back."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.mapping_proj = S, nn.Linear(S * D, S * S + 2 * S)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pre, post, mapping = self.mapping_proj(streams).split([S, S, S * S], dim=-1)
        mapping = mapping.unflatten(-1, (S, S)).softmax(-2)
        read = (torch.sigmoid(pre).unsqueeze(-1) * streams.unflatten(-1, (S, D))).sum(2)
        return read, mapping, 2 * torch.sigmoid(post), streams


HyperConnectionModule.__module__ = "megatron.core.transformer.hyper_connection"


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hc, self.mlp = HyperConnectionModule(), Branch()

    def forward(self, streams: Tensor) -> Tensor:
        hidden, mapping, post, residual = self.hc(streams)
        mixed = mapping.transpose(-1, -2) @ residual.unflatten(-1, (S, D))
        return (mixed + post.unsqueeze(-1) * self.mlp(hidden).unsqueeze(-2)).flatten(-2)


def test_streams_that_are_packed_with_the_features() -> None:
    torch.manual_seed(4)
    model, x = nn.Sequential(nn.Linear(S * D, S * D), Packed(), Packed()), torch.randn(T, B, S * D)
    plain = copy.deepcopy(model)
    (record,) = train(model, [x])
    first = plain[0](x)
    second = plain[1](first)
    first.retain_grad()
    second.retain_grad()
    plain[2](second).square().mean().backward()
    for k, streams in enumerate((first, second)):
        _, mapping, post, _ = plain[k + 1].hc(streams)
        np.testing.assert_allclose(record["mix_matrix"][k], mapping.detach().mean((0, 1)).T, rtol=1e-5)
        assert record["branch_weight"][k] == pytest.approx(post.mean().item(), rel=1e-5)
        apart = [t.detach().unflatten(-1, (S, D)) for t in (streams, streams.grad)]
        assert record["stream_cosine"][k] == pytest.approx(stream_cosine(apart[0].reshape(-1, S, D)), abs=1e-5)
        assert record["dominant_stream"][k] == pytest.approx(dominant(apart[0]), rel=1e-5)
        assert record["dominant_stream_grad"][k] == pytest.approx(dominant(apart[1]), rel=1e-5)


def test_a_model_with_hyper_connections_of_its_own_is_not_wrapped() -> None:
    model = nn.Sequential(nn.Linear(S * D, S * D), Packed(), Packed())
    with pytest.raises(FlowscopeError, match=r"of its own \(1\.hc, 2 in all\).*flowscope\.watch"):
        flowscope.wrap(model, "keel", example_inputs=torch.randn(T, B, S * D))
    with pytest.raises(FlowscopeError, match="of its own"):
        flowscope.wrap(deepseek(), "keel", example_inputs=torch.zeros(B, 11, dtype=torch.long))
