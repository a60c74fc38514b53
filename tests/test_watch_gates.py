"""`watch(gates=...)` on the user's own gates, and the metrics of concatenating flows, against naive computations."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flowscope


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate_proj, self.gate = nn.Linear(6, 6), nn.Linear(6, 6), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        t = self.gate(self.gate_proj(x))
        return t * torch.tanh(self.inner(x)) + (1 - t) * x


def test_gates_of_the_users_own_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated(), nn.Linear(6, 2))
    plain = copy.deepcopy(model)
    batches = [torch.randn(3, 5, 6), torch.randn(2, 5, 6)]
    values: list[list[Tensor]] = [[], []]
    for x in batches:
        for k in range(2):
            values[k].append(plain[k].gate(plain[k].gate_proj(x)).detach().double().flatten())
            x = plain[k](x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, every=1, gates=["*.gate"]) as scope:
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        (record,) = scope.records
    assert record.labels("gate_mean", "gates") == ["0.gate", "1.gate"]
    for k in range(2):
        t = torch.cat(values[k])
        assert record["gate_mean", "gates"][k] == pytest.approx(t.mean().item(), abs=1e-6)
        assert record["gate_std", "gates"][k] == pytest.approx(t.std(unbiased=False).item(), abs=1e-4)
        logits = torch.logit(t)
        for name, q in (("gate_p05", 0.05), ("gate_p95", 0.95)):
            truth = np.quantile(logits.numpy(), q)
            # one bucket of the logit is 0.5 wide
            assert abs(math.log(record[name, "gates"][k] / (1 - record[name, "gates"][k])) - truth) <= 0.6
        assert record["gate_saturation", "gates"][k] == (logits.abs() > 5).double().mean().item()


def test_a_pattern_without_a_module_is_an_error() -> None:
    with pytest.raises(flowscope.FlowscopeError, match="matches no module"):
        flowscope.watch(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)), gates=["*.forget"])


class DenseLayer(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, growth, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(torch.relu(self.norm(torch.cat(features, 1))))


class DenseBlock(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({f"denselayer{i + 1}": DenseLayer(5 + 4 * i, 4) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.denseblock1, self.classifier = nn.Conv2d(3, 5, 3, padding=1), DenseBlock(), nn.Linear(17, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.denseblock1(self.conv0(x)).mean((2, 3)))


def test_densenet_gradient_of_each_feature_group() -> None:
    torch.manual_seed(0)
    model = DenseNet()
    plain = copy.deepcopy(model)
    x = torch.randn(3, 3, 8, 6)
    features = [plain.conv0(x)]
    for layer in plain.denseblock1.values():
        features.append(layer(features))
    loss = plain.classifier(torch.cat(features, 1).mean((2, 3))).square().mean()
    truth = np.array([g.norm().item() for g in torch.autograd.grad(loss, features)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, every=1) as scope:
        model(x).square().mean().backward()
        optimizer.step()
        (record,) = scope.records
    assert record.flow_names == ("denseblock1",)
    np.testing.assert_allclose(record["group_grad_norm"], truth, rtol=1e-5)
    assert record["width"].tolist() == [5, 4, 4, 4]
