"""What is read of parameters around a step, against copies of weights and gradients that the test makes itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import Stack, close_to, data, loss_of, watched

from flowscope.instruments.weight_samples import WeightSamples
from flowscope.records import Record


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def by_name(record: Record, metric: str) -> dict[str, float]:
    return dict(zip(record.labels(metric), record[metric].tolist(), strict=True))


# -- what stayed as it was


def test_unchanged_is_the_share_of_entries_that_the_step_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scope = watched(model, optimizer)
    before = copies(model.parameters())
    model(torch.tensor([[1, 1, 4], [4, 7, 1]])).square().sum().backward()
    optimizer.step()
    found = by_name(scope.records[0], "param_unchanged")
    naive = [float((old == new).double().mean()) for old, new in zip(before, model.parameters(), strict=True)]
    assert naive[0] == 8 / 11
    close_to([found["0.weight"], found["1.weight"]], naive[:2])
    assert np.isnan(found["1.bias"])


def test_updates_under_the_resolution_of_bf16_leave_the_weights_as_they_are() -> None:
    model = nn.Linear(6, 4, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([1.0, 0.5, 2.0, 1.0, 4.0, 1.0]).expand(4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scope = watched(model, optimizer)
    model.weight.grad = torch.full_like(model.weight, 2.0**-9)
    optimizer.step()
    # half a unit in the last place of 0.5 is 2^-10: that column alone moves
    close_to(scope.records[0]["param_unchanged"], [5 / 6])


def test_small_updates_of_fp64_weights_are_seen() -> None:
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scope = watched(model, optimizer)
    before = copies(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-11)
    optimizer.step()
    record = scope.records[0]
    changes = zip(before, copies(model.parameters()), strict=True)
    close_to(record["update_ratio"], [float((new - old).norm() / old.norm()) for old, new in changes], rtol=1e-4)
    close_to(record["param_unchanged"], [0.0, 0.0])


@pytest.mark.parametrize("sizes", [(7, 0, 5), (0, 3), (4, 600, 2, 900), (700,)])
def test_shares_of_whole_tensors_and_of_runs_of_large_ones(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    tensors = {3 * i: torch.randn(size) for i, size in enumerate(sizes)}
    samples = WeightSamples(100)
    samples.take_before(tensors)
    for number, tensor in tensors.items():
        tensor[: len(tensor) * (number + 1) // (number + 3)] += 1.0
    found = samples.changes(tensors)
    for number, tensor in tensors.items():
        moved = len(tensor) * (number + 1) // (number + 3)
        at = np.arange(len(tensor))
        if len(tensor) > 100:  # three runs of 16, evenly spaced
            at = (np.arange(3)[:, None] * (len(tensor) // 3) + np.arange(16)).ravel()
        expected = float(np.mean(at >= moved)) if len(at) else np.nan
        np.testing.assert_allclose(found[number][2], expected, rtol=1e-12)


def test_a_rate_of_zero_leaves_everything_as_it_was() -> None:
    torch.manual_seed(2)
    model = Stack(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    scope = watched(model, optimizer)
    loss_of(model, data()).backward()
    optimizer.step()
    assert (scope.records[0]["param_unchanged"] == 1).all()


# -- learning rates


def test_the_rate_is_that_of_the_group_and_of_the_step() -> None:
    torch.manual_seed(3)
    model = Stack(2)
    head, body = list(model.head.parameters()), list(model.blocks.parameters())
    groups = [{"params": head, "lr": 0.3}, {"params": body, "lr": torch.tensor(0.02)}]
    optimizer = torch.optim.SGD(groups, lr=9.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 0.5**k, lambda k: 1.0])
    scope = watched(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, data()).backward()
        optimizer.step()
        schedule.step()
    for k, record in enumerate(scope.records):
        for name, rate in by_name(record, "param_lr").items():
            expected = {"head": 0.3 * 0.5**k, "blocks": 0.02}.get(name.split(".")[0], np.nan)
            np.testing.assert_allclose(rate, expected, rtol=1e-6)


def test_without_an_optimizer_no_rate_is_known() -> None:
    model = Stack(2)
    scope = watched(model)
    loss_of(model, data()).backward()
    scope.step()
    assert np.isnan(scope.records[0]["param_lr"]).all()
