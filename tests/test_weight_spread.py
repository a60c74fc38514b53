"""`weight_spread` against numpy on whole matrices that are small enough to be looked at entirely."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import Stack, close_to, data, loss_of, watched

from flowscope.instruments.weight_spread import ENTRIES, ROWS, sampled, spreads


def naive(weight: Tensor) -> float:
    x = weight.detach().double().numpy().reshape(weight.shape[0], -1)
    x = x[:: -(-x.shape[0] // ROWS)]
    x = x[:, :: -(-x.shape[1] // ENTRIES)]
    return float(np.sqrt(np.mean(np.var(x, axis=0)) / np.mean(x**2)))


def spread(weight: Tensor) -> float:
    ((numbers, vector),) = spreads({4: weight})
    assert numbers == [4]
    return float(vector)


@pytest.mark.parametrize("shape", [(5, 7), (6, 3, 2, 2), (64, 64), (150, 130), (2, 3), (65, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_against_numpy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (0.3 + torch.randn(shape)).to(dtype)
    assert spread(weight) == pytest.approx(naive(weight.float() if dtype is torch.bfloat16 else weight), rel=1e-5)


def test_channels_last_and_transposed_weights() -> None:
    torch.manual_seed(1)
    conv = nn.Conv2d(6, 9, 3).weight.detach()
    assert spread(conv.to(memory_format=torch.channels_last)) == pytest.approx(spread(conv), rel=1e-6)
    assert spread(conv.flatten(1).T) == pytest.approx(naive(conv.flatten(1).T.contiguous()), rel=1e-5)


def test_by_hand() -> None:
    assert spread(torch.full((7, 5), 0.01)) == 0.0
    assert spread(torch.arange(1.0, 6.0).expand(7, 5) / 3) == 0.0
    assert np.isnan(spread(torch.zeros(7, 5)))
    assert spread(torch.tensor([[1.0, -1.0], [-1.0, 1.0]])) == pytest.approx(1.0)
    # rows 1 and 3: variance 1, mean square 5
    assert spread(torch.tensor([[1.0] * 3, [3.0] * 3])) == pytest.approx(0.2**0.5)
    assert spread(1e-30 * torch.tensor([[1.0] * 3, [3.0] * 3])) < 1.0


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_it_has_no_unit(scale: float) -> None:
    torch.manual_seed(2)
    weight = torch.randn(5, 8)
    assert spread(scale * weight) == pytest.approx(spread(weight), rel=1e-5)


def test_samples_are_at_most_sixty_four_rows_of_sixty_four_entries() -> None:
    for shape in [(1000, 1000), (65, 3), (3, 6500), (128, 4, 5, 6)]:
        rows, entries = sampled(torch.randn(shape)).shape
        assert 2 <= rows <= ROWS
        assert 1 <= entries <= ENTRIES


def test_equal_units_stay_equal_and_are_named() -> None:
    torch.manual_seed(3)
    model = Stack(3)
    with torch.no_grad():
        model.blocks[1].fc1.weight.fill_(0.01)
        model.blocks[1].fc1.bias.zero_()
        model.blocks[1].fc2.weight.copy_(model.blocks[1].fc2.weight[:, :1].expand(-1, 16))
        model.blocks[2].fc2.weight.zero_()
    model.head.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer, config={"slow_every": 2})
    before, gradients = {}, {}
    for k in range(4):
        before[k] = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        loss_of(model, data(k)).backward()
        gradients[k] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    assert ["weight_spread" in record for record in scope.records] == [True, False, True, False]
    for k in (0, 2):
        record = scope.records[k]
        labels = record.labels("weight_spread")
        assert labels == [name for name, p in before[k].items() if p.dim() == 2]
        found = dict(zip(labels, record["weight_spread"], strict=True))
        assert found.pop("blocks.1.fc1.weight") < 1e-5
        assert np.isnan(found.pop("head.weight"))
        if k == 0:
            assert np.isnan(found.pop("blocks.2.fc2.weight"))
        # the second block's last matrix is zero at first, so nothing reaches the one before it
        parting = {name: naive(w) for name, w in gradients[k].items() if bool(w.any())}
        unrelated = {name: value for name, value in parting.items() if value > 0.5}
        larger = [max(naive(before[k][name]), unrelated.get(name, 0.0)) for name in found]
        close_to(list(found.values()), larger)
        assert min(found.values()) > 0.5


def test_rows_that_start_equal_and_get_gradients_of_their_own_are_not_alike() -> None:
    """Mamba's A_log and the layer scale of a ConvNeXt, [channels, 1, 1], start as one row repeated."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 6)
            self.layer_scale = nn.Parameter(torch.full((6, 1, 1), 1e-2))

        def forward(self, x: Tensor) -> Tensor:
            scaled: Tensor = self.fc(x)[..., None, None] * self.layer_scale
            return scaled.flatten(1)

    torch.manual_seed(4)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(5, 16)) - torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
    record = scope.records[0]
    found = dict(zip(record.labels("weight_spread"), record["weight_spread"], strict=True))
    assert found["layer_scale"] > 0.1
    assert not [alert for alert in scope.alerts if alert.kind == "symmetry"]


def test_the_larger_of_the_weight_and_its_gradient() -> None:
    weight, gradient = torch.full((3, 4), 2.0), torch.tensor([[1.0] * 4, [-3.0] * 4, [1.0] * 4])
    # rows 1, -3, 1: variance 32/9, mean square 11/3; rows 1, 3, 1: 8/9, so .49, which random biases make too
    pairs = [(gradient, (32 / 33) ** 0.5), (gradient.abs(), 0.0), (torch.zeros(3, 4), 0.0), (gradient.to_sparse(), 0.0)]
    for found, expected in pairs:
        ((_, vector),) = spreads({5: weight}, {5: found})
        assert float(vector) == pytest.approx(expected, rel=1e-6)
    # rounding beside a gradient that is none
    found = spreads({5: weight, 6: torch.ones(3, 5)}, {5: 1e-6 * gradient, 6: torch.ones(3, 5)})
    assert [(numbers, vector.tolist()) for numbers, vector in found] == [([5], [0.0]), ([6], [0.0])]
    ((_, vector),) = spreads({5: torch.zeros(3, 4)}, {5: gradient})
    assert np.isnan(float(vector))
