"""Loops whose backwards and optimizer steps do not come one after the other: inside each other, or for something else.

Optimizers that step inside backward, attacks and meta-learners that take gradients before the step's own, two
optimizers that share parameters. The truth is torch.autograd.grad on unwatched copies.
"""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import Checkpointed, D, Stack, close_to, data, loss_of, norms, truth, watched

import flowscope

pytestmark = pytest.mark.usefixtures("strict")


# -- optimizers that step inside backward


class Recomputed(Checkpointed):
    """Every block is checkpointed, so its parameters get their gradients in a backward of its own."""

    reentrant = True


def step_inside_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer a parameter, which steps as soon as its gradient is there and frees it."""
    made = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        made[parameter].step()
        made[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return list(made.values())


@pytest.mark.parametrize("given", ["in order", "reversed", "found"])
@pytest.mark.parametrize("kind", [Stack, Recomputed])
def test_optimizers_inside_backward_end_the_step_with_that_backward(kind: type[Stack], given: str) -> None:
    plain = Stack(depth=3)
    model = kind(depth=3)
    model.load_state_dict(plain.state_dict())
    optimizers = step_inside_backward(model)
    twin_optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    taken = {"in order": optimizers, "reversed": optimizers[::-1], "found": None}[given]
    expected, gradients, weights = [], [], []
    with watched(model, taken) as scope:
        for number in range(3):
            batch = data(number)
            expected.append(norms(truth(plain, batch)))
            twin_optimizer.zero_grad()
            loss_of(plain, batch).backward()
            gradients.append([float(p.grad.norm()) for p in plain.parameters() if p.grad is not None])
            weights.append([float(p.detach().norm()) for p in plain.parameters()])
            twin_optimizer.step()
            loss_of(model, batch).backward()
        records = scope.records
    assert [record.step for record in records] == [0, 1, 2]
    for record, points, per_parameter, norm in zip(records, expected, gradients, weights, strict=True):
        close_to(record["grad_norm"], points)
        close_to(record["param_grad_norm"], per_parameter)
        close_to(record["param_norm"], norm)
        assert record["param_optimized"].all()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_backward_that_raises_leaves_the_next_one_its_step() -> None:
    model = Stack(depth=3)
    optimizers = step_inside_backward(model)
    with watched(model, optimizers) as scope:
        loss_of(model, data(0)).backward()
        broken = model.embed.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, data(1)).backward()
        broken.remove()
        expected = norms(truth(model, data(2)))
        weights = [float(p.detach().norm()) for p in model.parameters()]
        loss_of(model, data(2)).backward()
        assert [record.step for record in scope.records] == [0, 1]
        close_to(scope.records[1]["grad_norm"], expected)
        close_to(scope.records[1]["param_norm"], weights)


def test_stop_training_comes_out_of_that_backward_or_the_next() -> None:
    model = Stack(depth=3)
    step_inside_backward(model)

    def stop(alert: flowscope.Alert) -> None:
        raise flowscope.StopTraining(alert.kind)

    begun: list[int] = []

    def train() -> None:
        for number in range(6):
            begun.append(number)
            (loss_of(model, data(number)) * (float("nan") if number == 2 else 1.0)).backward()

    with watched(model, on_alert=stop), pytest.raises(flowscope.StopTraining):
        train()
    assert begun[-1] in (2, 3)


# -- gradients taken before the step's own


def attacked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two steps of projected gradient descent on the input, by torch.autograd.grad."""
    x, y = batch
    for _ in range(2):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model, (x, y)), x)
        x = (x + 0.1 * gradient.sign()).detach()
    return x, y


def test_an_attack_is_no_part_of_any_step_not_even_of_the_first() -> None:
    model = Stack(depth=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    with watched(model, optimizer) as scope:
        for number in range(3):
            expected.append(norms(truth(model, attacked(copy.deepcopy(model), data(number)))))
            batch = attacked(model, data(number))
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        for record, points in zip(scope.records, expected, strict=True):
            close_to(record["grad_norm"], points)


def test_a_loop_that_never_fills_grad_keeps_all_its_passes() -> None:
    model = Stack(depth=3)
    with watched(model) as scope:
        for number in range(2):
            passes = [data(2 * number), data(2 * number + 1)]
            expected = norms(*(truth(model, batch) for batch in passes))
            weights = list(model.parameters())
            sums = [torch.zeros_like(w) for w in weights]
            for batch in passes:
                found = torch.autograd.grad(loss_of(model, batch), weights)
                sums = [s + g for s, g in zip(sums, found, strict=True)]
            with torch.no_grad():
                for weight, total in zip(weights, sums, strict=True):
                    weight.sub_(total, alpha=0.1)
            scope.step()
            close_to(scope.records[number]["grad_norm"], expected)


def test_a_meta_learner_makes_no_warning_and_its_inner_gradients_no_record() -> None:
    model = Stack(depth=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def outer(net: nn.Module, number: int) -> Tensor:
        held = dict(net.named_parameters())
        x, y = data(number)
        inner = nn.functional.mse_loss(torch.func.functional_call(net, held, (x,)), y)
        found = torch.autograd.grad(inner, list(held.values()))
        fast = {name: p - 0.1 * g for (name, p), g in zip(held.items(), found, strict=True)}
        x, y = data(number + 10)
        return nn.functional.mse_loss(torch.func.functional_call(net, fast, (x,)), y)

    with watched(model, optimizer) as scope, warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            expected = outer_gradients(copy.deepcopy(model), lambda net, n=number: outer(net, n))
            optimizer.zero_grad()
            outer(model, number).backward()
            optimizer.step()
            close_to(scope.records[number]["grad_norm"], expected)


def outer_gradients(model: Stack, run: Any) -> np.ndarray:
    """Norms of dL/dx_0 ... dL/dx_L of the last forward, from torch.autograd.grad."""
    taps: list[Tensor] = []
    hooks = [model.embed.register_forward_hook(lambda *a: taps.append(a[2]))]
    hooks += [block.register_forward_hook(lambda *a: taps.append(a[2])) for block in model.blocks]
    loss = run(model)
    for hook in hooks:
        hook.remove()
    return norms(torch.autograd.grad(loss, taps[-(len(model.blocks) + 1) :]))


# -- two optimizers that share parameters


class Game(nn.Module):
    """A generator and a discriminator on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(3)))
        self.maker, self.judge = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


def test_two_optimizers_with_a_shared_trunk_are_both_known_though_neither_was_given() -> None:
    model = Game()
    first = torch.optim.SGD([*model.trunk.parameters(), *model.judge.parameters()], 0.01)
    second = torch.optim.SGD([*model.trunk.parameters(), *model.maker.parameters()], 0.01)
    with watched(model) as scope:
        for _ in range(6):
            first.zero_grad()
            model.judge(model(torch.randn(3, D))).square().mean().backward()
            first.step()
            second.zero_grad()
            model.judge(model(model.maker(torch.randn(3, D)))).square().mean().backward()
            second.step()
        records = scope.records
        assert scope.optimizers == [first, second]
    # the first comes back in the third pass: from there on one step is both
    assert [record.step for record in records] == list(range(7))
    assert all(record["param_optimized"].all() for record in records[2:])
    assert records[2]["backward_calls"].max() == 2


# -- backward passes inside a loss


class Chain(nn.Module):
    """Layers of one activation behind each other; `forward(x, taps)` appends the points."""

    def __init__(self, activation: type[nn.Module], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), activation()) for a, b in pairwise(widths))

    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if taps is not None:
                taps.append(x)
        return x


def slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def gradient_penalty(critic: nn.Module, taps: list[list[Tensor]]) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    real, fake = torch.randn(6, 4, generator=draws) + 1, torch.randn(6, 4, generator=draws)
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    first, second, third = (critic(x, kept) for x, kept in zip((real, fake, between), taps, strict=True))
    return second.mean() - first.mean() + 10 * (slope(third, between).norm(dim=1) - 1).square().mean()


def heat_equation(net: nn.Module, taps: list[list[Tensor]]) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    u = net(x, taps[0])
    first = slope(u, x)
    return (slope(first[:, :1], x)[:, 1:2] + u - 1).square().mean() + net(torch.zeros(2, 4), taps[1]).square().mean()


def fit_of_a_gradient(net: nn.Module, taps: list[list[Tensor]]) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return (slope(net(x, taps[0]), x) - 1).square().mean()


@pytest.mark.parametrize("activation", [nn.Tanh, nn.LeakyReLU])
@pytest.mark.parametrize("loss", [gradient_penalty, heat_equation, fit_of_a_gradient])
@pytest.mark.parametrize("create_graph", [False, True])  # as for an optimizer of second order
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_what_a_loss_differentiates_itself_is_no_gradient_of_it(
    loss: Any, activation: type[nn.Module], create_graph: bool
) -> None:
    model = Chain(activation, (4, 8, 8, 8, 1))
    twin, taps = copy.deepcopy(model), [[], [], []]
    total = loss(twin, taps)
    passes = [torch.autograd.grad(total, kept, retain_graph=True, allow_unused=True) for kept in taps if kept]
    expected = norms(*passes)
    gradients = torch.autograd.grad(total, list(twin.parameters()), allow_unused=True)
    weights = [float(g.norm()) if g is not None else np.nan for g in gradients]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with watched(model, optimizer) as scope:
        loss(model, [[], [], []]).backward(create_graph=create_graph)
        optimizer.step()
    (record,) = scope.records
    seen = record["grad_norm"][1:]  # behind the input, which is no layer's output
    seen[(seen == 0) & np.isnan(expected)] = np.nan  # autograd may hand on zeros, or nothing
    close_to(seen, expected)
    close_to(record["param_grad_norm"], weights)
