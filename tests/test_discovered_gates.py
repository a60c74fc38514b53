"""Gates of the user's own model that nobody named: which are found, which are not, their numbers against naive ones."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flowscope
from flowscope.model.view import ModelView
from flowscope.records import Record


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, sigmoid: type[nn.Module] = nn.Sigmoid) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(channels, 3), nn.ReLU(), nn.Linear(3, channels), sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.fc(x.mean((2, 3)))
        return x * scale[:, :, None, None].expand_as(x)


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.se = nn.Conv2d(channels, channels, 3, padding=1), SqueezeExcitation(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.se(torch.relu(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock(8) for _ in range(4)))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x))


class Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.transform = nn.Linear(width, width), Gate(width)

    def forward(self, x: Tensor) -> Tensor:
        t = self.transform(x)
        return t * torch.tanh(self.inner(x)) + (1 - t) * x


class GatedMLP(nn.Module):
    """As of Llama: the gate's projection is no value in [0, 1], and SiLU by hand is no gate either."""

    class GateProjection(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.gating, self.sigmoid, self.activation = self.GateProjection(width), nn.Sigmoid(), activation

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x) + self.activation(self.gating(x))
        return x + (gate * self.sigmoid(1.702 * gate)) * self.up_proj(x)


def train(model: nn.Module, batches: list[Any], **options: Any) -> list[Record]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with flowscope.watch(model, optimizer, every=1, **options) as scope:
        for x in batches:
            optimizer.zero_grad()
            outputs = model(x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(y.square().mean() for y in outputs).backward()
            optimizer.step()
        return list(scope.records)


def outputs_of(model: nn.Module, paths: list[str], x: Tensor) -> list[Tensor]:
    """What the modules of these paths give in an unwatched copy."""
    plain, out = copy.deepcopy(model), {}
    for path in paths:
        plain.get_submodule(path).register_forward_hook(lambda m, a, y, path=path: out.__setitem__(path, y.detach()))
    plain(x)
    return [out[path].double().flatten() for path in paths]


def check(record: Record, values: list[Tensor]) -> None:
    for k, t in enumerate(values):
        assert record["gate_mean", "gates"][k] == pytest.approx(t.mean().item(), abs=1e-6)
        assert record["gate_std", "gates"][k] == pytest.approx(t.std(unbiased=False).item(), abs=1e-4)
        logits = torch.logit(t)
        assert record["gate_saturation", "gates"][k] == pytest.approx((logits.abs() > 5).double().mean().item())
        for name, q in (("gate_p05", 0.05), ("gate_p95", 0.95)):
            shown = record[name, "gates"][k]
            assert t.min() - 0.13 <= shown <= t.max() + 0.13
            assert abs(shown - np.quantile(t.numpy(), q)) <= 0.13  # half a bucket of the logit where t is steepest


def labels(record: Record) -> list[str]:
    return list(record.labels("gate_mean", "gates")) if "gates" in record.flow_names else []


def test_squeeze_and_excitation() -> None:
    torch.manual_seed(0)
    model, x = ConvNet(), torch.randn(5, 3, 7, 6)
    paths = [f"blocks.{i}.se.fc.3" for i in range(4)]
    truth = outputs_of(model, paths, x)
    first, second = train(model, [x, x])
    assert labels(first) == labels(second) == paths
    check(first, truth)


def test_highway_layers_whose_gate_applies_the_sigmoid_itself() -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(*(Highway(6) for _ in range(3)), nn.Linear(6, 2)), torch.randn(4, 5, 6)
    paths = [f"{i}.transform" for i in range(3)]
    truth = outputs_of(model, paths, x)
    (record,) = train(model, [x])
    assert labels(record) == paths
    check(record, truth)


def test_micro_batches_and_an_evaluation_between() -> None:
    torch.manual_seed(10)
    model = nn.Sequential(Highway(6), Highway(6), nn.Linear(6, 2))
    batches = [torch.randn(4, 5, 6), torch.randn(4, 5, 6)]
    each = [outputs_of(model, ["0.transform", "1.transform"], x) for x in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with flowscope.watch(model, optimizer, every=1) as scope:
        with torch.no_grad():
            model(torch.full((2, 3, 6), 9.0))
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        (record,) = scope.records
    assert labels(record) == ["0.transform", "1.transform"]
    check(record, [torch.cat([a, b]) for a, b in zip(*each, strict=True)])


class Wrapped(nn.Module):
    """A gate module around a sigmoid module: one gate, that of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.sigmoid = nn.Linear(6, 6), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.sigmoid(self.proj(x))


class Inner(nn.Module):
    """The sigmoid's own name says gate, too."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.gate = nn.Linear(6, 6), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.proj(x))


class Forgetting(nn.Module):
    """No name says gate, and only 1 - t is a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.proj, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) + (1 - self.act(self.proj(x))) * x


class GatedByInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = Inner(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(x) * self.value(x)


def test_a_gate_inside_a_gate_is_one_and_its_complement_is_a_factor() -> None:
    torch.manual_seed(11)
    model, x = nn.Sequential(GatedByInner(), Forgetting(), nn.Linear(6, 2)), torch.randn(4, 5, 6)
    truth = outputs_of(model, ["0.gate", "1.act"], x)
    (record,) = train(model, [x])
    assert labels(record) == ["0.gate", "1.act"]
    check(record, truth)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = Wrapped(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.lerp(self.value(x), x, self.gate(x))


@pytest.mark.parametrize(
    ("found", "named"),
    [(["1.gate"], None), (["1.gate"], ()), (["0.gate_proj", "1.gate"], "*.gate_proj"), (["1.gate"], ["*.gate"])],
)
def test_a_module_around_a_sigmoid_is_one_gate_and_patterns_add(found: list[str], named: Any) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(GatedMLP(6, functional.gelu), Attention(), nn.Linear(6, 2))
    (record,) = train(model, [torch.randn(4, 5, 6)], gates=named)
    assert labels(record) == found


@pytest.mark.parametrize("activation", [functional.gelu, lambda x: x.softmax(-1), torch.tanh, torch.relu])
def test_the_gate_of_a_gated_mlp_is_none(activation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(GatedMLP(6, activation) for _ in range(3)), nn.Linear(6, 2))
    records = train(model, [torch.randn(4, 5, 6)] * 2)
    assert [labels(r) for r in records] == [[], []]


class Softmaxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = Softmax(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(x) * self.value(x)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


def test_a_softmax_in_the_unit_interval_is_none() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Softmaxed(), nn.Linear(6, 2))
    (record,) = train(model, [torch.randn(4, 5, 6)])
    assert labels(record) == []


class Autoencoder(nn.Module):
    """The decoder is made before the encoder's last layer, so the order of modules does not show the head."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(3, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.Sigmoid())
        self.encoder = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class StopGate(nn.Module):
    """A head that is named gate (whether to stop, as of Tacotron) beside another output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(6, 6), Gate(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return hidden, self.gate(hidden)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 2), nn.Sigmoid()),
        Autoencoder(),
        StopGate(),
    ],
    ids=["classifier", "autoencoder", "stop gate"],
)
def test_activations_and_output_heads_are_none(model: nn.Module) -> None:
    records = train(model, [torch.randn(4, 5, 6)] * 2)
    assert [labels(r) for r in records] == [[], []]


class Experts(nn.Module):
    """A mixture whose router's sigmoids weight the experts: routing, not gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid())
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x)
        return x + sum(weights[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts))


def test_routers_are_none() -> None:
    (record,) = train(nn.Sequential(nn.Linear(6, 6), Experts(), nn.Linear(6, 2)), [torch.randn(4, 5, 6)])
    assert labels(record) == []
    assert record.labels("route_entropy") == ["1.gate"]


def test_gates_of_wrapped_blocks_come_once() -> None:
    torch.manual_seed(4)
    model = ConvNet()
    flowscope.wrap(model, mode="highway", example_inputs=torch.randn(2, 3, 7, 6))
    (record,) = train(model, [torch.randn(5, 3, 7, 6)])
    assert labels(record) == [f"blocks.{i}.se.fc.3" for i in range(4)]
    assert len(record.labels("gate_mean", "blocks")) == 4


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def test_a_checkpoint_counts_each_gate_once() -> None:
    torch.manual_seed(5)
    model, x = Checkpointed(reentrant=False), torch.randn(4, 5, 6)
    paths = [f"layers.{i}.gate" for i in range(3)]
    truth = outputs_of(model, paths, x.clone())
    first, second = train(model, [x, x])
    assert labels(first) == labels(second) == paths
    check(first, truth)
    # a reentrant one hides the graph of the forward, and no name here is a sigmoid's own
    assert [labels(r) for r in train(Checkpointed(reentrant=True), [x, x])] == [[], []]


def test_training_is_unchanged_and_nothing_stays() -> None:
    torch.manual_seed(6)
    plain = nn.Sequential(*(Highway(6) for _ in range(3)), GatedMLP(6, functional.gelu), nn.Linear(6, 2))
    watched, batches = copy.deepcopy(plain), [torch.randn(4, 5, 6) for _ in range(3)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for x in batches:
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    train(watched, batches)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    for module in watched.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_hooks_of_modules_that_are_no_gates_go_after_the_first_forward() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), GatedMLP(6, functional.gelu), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with flowscope.watch(model, optimizer, every=1, config={"metrics": ["parameters"]}):
        before = len(model[2].gating._forward_hooks)
        root = len(model._forward_hooks)
        model(torch.randn(4, 5, 6)).square().mean().backward()
        optimizer.step()
        assert len(model[2].gating._forward_hooks) == before - 1
        assert len(model._forward_hooks) == root - 1


def test_at_most_256_are_looked_at() -> None:
    found = ModelView(nn.Sequential(*(nn.Sigmoid() for _ in range(700)))).gates
    assert [c.path for c in found] == [str(i) for i in range(0, 700, 3)]


@pytest.mark.parametrize("sigmoid", [nn.Sigmoid, nn.Hardsigmoid])
def test_healthy_models_with_gates_raise_no_warning(sigmoid: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(7)
    model = ConvNet()
    for block in model.blocks:
        block.se = SqueezeExcitation(8, sigmoid)
    x, y = torch.randn(32, 3, 7, 6), torch.arange(32) % 2
    x = x + 0.7 * y[:, None, None, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with caplog.at_level(logging.WARNING), flowscope.watch(model, optimizer, every=5) as scope:
        for _ in range(60):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        kinds = [a.kind for a in scope.alerts if a.severity != "info"]
        record = scope.records[-1]
    assert loss.item() < math.log(2) / 2
    assert len(labels(record)) == 4
    assert np.isfinite(record["gate_mean", "gates"]).all()
    assert "gate_saturation" not in kinds


@pytest.mark.parametrize(("bias", "severity"), [(-8.0, "warning"), (8.0, "info")])
def test_found_gates_warn_where_most_are_shut_and_not_where_they_are_open(bias: float, severity: str) -> None:
    torch.manual_seed(8)
    model = ConvNet()
    for block in model.blocks:
        nn.init.constant_(block.se.fc[2].bias, bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with flowscope.watch(model, optimizer, every=1) as scope:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(5, 3, 7, 6)).square().mean().backward()
            optimizer.step()
        raised = [a for a in scope.alerts if a.kind == "gate_saturation"]
    assert [(a.where, a.severity) for a in raised] == [("blocks.0.se.fc.3", severity)]


def test_a_compiled_model_trains_on_and_records_gates_whose_name_says_it() -> None:
    torch.manual_seed(9)
    model, x = nn.Sequential(Named(), Named(), Highway(6), nn.Linear(6, 2)), torch.randn(4, 5, 6)
    truth = outputs_of(model, ["0.gate", "1.gate"], x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with flowscope.watch(compiled, optimizer, every=1) as scope:
        compiled(x).square().mean().backward()
        optimizer.step()
        (record,) = scope.records
    assert labels(record) == ["0.gate", "1.gate"]
    check(record, truth)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.proj, self.gate = nn.Linear(6, 6), nn.Linear(6, 6), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(self.proj(x)) * self.inner(x)
