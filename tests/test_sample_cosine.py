"""`sample_cosine` against all pairs of samples, one by one, on hidden states that the test's own forward returns."""

from __future__ import annotations

import copy
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import IN, B, D, Stack, T, data, loss_of, watched

import flowscope
from flowscope.sums import statistics


def naive(states: list[Tensor]) -> float:
    """Mean over forwards of the mean over ordered pairs of samples [B, positions, D]."""
    means = []
    for state in states:
        vectors = state.detach().double().mean(1)
        pairs = permutations(range(len(vectors)), 2)
        means.append(np.mean([float(torch.cosine_similarity(vectors[i], vectors[j], dim=0)) for i, j in pairs]))
    return float(np.mean(means))


def test_two_micro_batches_of_sequences() -> None:
    torch.manual_seed(0)
    model = Stack(4)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    seen: list[list[Tensor]] = []
    for seed, batch in ((0, B), (1, 2)):
        taps: list[Tensor] = []
        twin(data(seed, batch)[0], taps)
        seen.append(taps)
        loss_of(model, data(seed, batch)).backward()
    optimizer.step()
    record = scope.records[0]
    assert record.labels("sample_cosine") == record.labels("grad_norm")
    expected = [naive([taps[point] for taps in seen]) for point in range(5)]
    np.testing.assert_allclose(record["sample_cosine"], expected, atol=1e-5)


def test_samples_without_positions() -> None:
    torch.manual_seed(1)
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    states: list[Tensor] = []
    x = torch.randn(6, IN)
    copy.deepcopy(model)(x, states)
    model(x).square().sum().backward()
    optimizer.step()
    expected = [naive([state[:, None]]) for state in states]
    np.testing.assert_allclose(scope.records[0]["sample_cosine"], expected, atol=1e-5)


class Plane(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, D, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def test_images_are_averaged_over_their_positions() -> None:
    torch.manual_seed(2)
    model = Plane()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer, flows=["blocks"])
    x = torch.randn(4, 3, 6, 5)
    with torch.no_grad():
        outputs = [model.stem(x)]
        h = outputs[0]
        for block in model.blocks:
            outputs.append(block(h))
            h = h + torch.tanh(outputs[-1])
    model(x).square().sum().backward()
    optimizer.step()
    expected = [naive([state.flatten(2).transpose(1, 2)]) for state in outputs]
    np.testing.assert_allclose(scope.records[0]["sample_cosine"], expected, atol=1e-5)


def test_a_single_sample_has_none() -> None:
    torch.manual_seed(3)
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    loss_of(model, data(batch=1)).backward()
    optimizer.step()
    assert np.isnan(scope.records[0]["sample_cosine"]).all()
    assert np.isfinite(scope.records[0]["token_cosine"]).all()


def test_many_positions_are_sampled_from_every_sample() -> None:
    x = torch.randn(8, 64, D)
    positions = statistics.sample_positions(x, -1, 256, sequence=True)
    assert positions.samples == 8
    means = positions.values.view(8, -1, D).mean(1)
    torch.testing.assert_close(means, x[:, :: 64 // (len(positions.values) // 8)].mean(1))


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_samples_that_end_in_one_vector(scale: float) -> None:
    torch.manual_seed(4)
    common, own = torch.randn(D), torch.randn(B, T, D)
    states = common + scale * own
    cosine = float(statistics.sample_cosines(states.reshape(1, B * T, D), B))
    assert cosine == pytest.approx(naive([states]), abs=1e-6)
    assert cosine > 0.999


def test_with_streams_it_is_that_of_the_sub_layer_inputs() -> None:
    torch.manual_seed(5)
    model = flowscope.wrap(Stack(3), "dhc", example_inputs=data()[0])
    inputs: list[Tensor] = []
    for block in model.blocks:
        block.norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().clone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    loss_of(model, data()).backward()
    optimizer.step()
    np.testing.assert_allclose(scope.records[0]["sample_cosine"], [naive([x]) for x in inputs], atol=1e-5)
