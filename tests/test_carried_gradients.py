"""`grad_carried` against copies of `.grad` that the loop makes before each backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import B, Stack, close_to, data, loss_of, watched

from flowscope.instruments.raw_gradients import spread


def looked_at(model: nn.Module) -> list[nn.Parameter]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [parameters[0], parameters[len(parameters) // 2], parameters[-1]]


def total(gradients: list[Tensor | None]) -> float:
    return float(np.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None)))


def held(model: nn.Module) -> float:
    return total([p.grad for p in looked_at(model)])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_that_were_set_to_zero(to_none: bool, micro_batches: int) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    for k in range(3):
        for j in range(micro_batches):
            loss_of(model, data(10 * k + j)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert [record["grad_carried"].tolist() for record in scope.records] == [[0.0]] * 3


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_without_zero_grad_the_share_is_that_of_the_loop(micro_batches: int) -> None:
    torch.manual_seed(1)
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scope = watched(model, optimizer)
    expected = []
    for k in range(4):
        before = [p.grad.clone() if p.grad is not None else None for p in looked_at(model)]
        least = [float(total([g])) for g in before]
        for j in range(micro_batches):
            if j:
                least = [min(x, total([p.grad])) for x, p in zip(least, looked_at(model), strict=True)]
            loss_of(model, data(10 * k + j, batch=B - j)).backward()
        expected.append(float(np.linalg.norm(least)) / held(model))
        optimizer.step()
    found = [float(record["grad_carried"][0]) for record in scope.records]
    close_to(found, expected)
    assert found[0] == 0
    assert min(found[1:]) > 0.3


def test_a_discriminator_that_the_generators_backward_went_through() -> None:
    torch.manual_seed(2)
    generator, critic = Stack(2), nn.Linear(7, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, critic)]
    scope = watched(critic, optimizers[1])
    for k in range(3):
        x, real = data(k)
        optimizers[0].zero_grad()
        critic(generator(x)).mean().backward()  # leaves gradients in the critic
        optimizers[0].step()
        optimizers[1].zero_grad()
        (critic(real) - critic(generator(x).detach())).mean().backward()
        optimizers[1].step()
    assert [record["grad_carried"].tolist() for record in scope.records] == [[0.0]] * 3


def test_gradients_that_are_only_returned_do_not_count() -> None:
    torch.manual_seed(3)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    for k in range(2):
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss_of(model, data(k)), list(model.parameters())), strict=True
        ):
            p.grad = g
        optimizer.step()
    assert all(np.isnan(record["grad_carried"]).all() for record in scope.records)


def test_a_penalty_by_autograd_grad_before_zero_grad_does_not_count() -> None:
    torch.manual_seed(4)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    for k in range(2):
        torch.autograd.grad(loss_of(model, data(k)), list(model.parameters()))
        optimizer.zero_grad()
        loss_of(model, data(k)).backward()
        optimizer.step()
    assert [record["grad_carried"].tolist() for record in scope.records] == [[0.0]] * 2


def test_only_small_parameters_are_looked_at() -> None:
    sizes = [1 << 17, 5, 1 << 17, 7, 0, 8, 9, 1 << 17]
    parameters: list[tuple[int, Any]] = [(10 * i, torch.empty(size)) for i, size in enumerate(sizes)]
    assert [number for number, _ in spread(parameters)] == [10, 50, 60]
    assert spread(parameters[:1]) == []


def test_another_process_and_a_file_get_the_parameters_without_hooks_or_warnings(tmp_path: Any) -> None:
    model = Stack(2)
    scope = watched(model)
    weight = model.embed.weight
    assert len(weight._backward_hooks) == 1
    torch.utils.hooks.warn_if_has_hooks(weight)  # warnings are errors here
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert not loaded.embed.weight._backward_hooks
    scope.close()
    assert not weight._backward_hooks


@pytest.mark.parametrize(("cleared", "carried"), [(True, False), (False, True)])
def test_gradients_that_were_handed_over_are_none_of_an_earlier_step(cleared: bool, carried: bool) -> None:
    """A worker's copy makes half of the gradients; the other half is added. Without zero_grad those of before stay."""
    torch.manual_seed(3)
    model, worker = Stack(3), Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scope = watched(model, optimizer)
    for k in range(5):
        worker.load_state_dict(model.state_dict())
        if cleared:
            loss_of(worker, data(100 + k)).backward()
            for mine, theirs in zip(model.parameters(), worker.parameters(), strict=True):
                mine.grad, theirs.grad = theirs.grad, None
        loss_of(model, data(k)).backward()
        optimizer.step()
        if cleared:
            optimizer.zero_grad()
    found = [float(record["grad_carried"][0]) for record in scope.records]
    assert [share > 0.1 for share in found[1:]] == [carried] * 4
    raised = {alert.kind for alert in scope.alerts}
    assert ("gradient_accumulates" in raised) == carried
