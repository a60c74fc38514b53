"""`output_spread` against numpy on the outputs that the test keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import IN, OUT, B, D, Stack, T, close_to, data, loss_of, watched

import flowscope
from flowscope.instruments.outputs import ENTRIES, SAMPLES, outputs_of, variation, width_of


def naive(*outputs: Tensor) -> float:
    variance, square = 0.0, 0.0
    for output in outputs:
        x = output.detach().double().numpy()
        x = x.reshape(x.shape[0], -1)
        square += float((x**2).mean(0).sum())
        variance += float((x**2).mean(0).sum() - (x.mean(0) ** 2).sum())
    return variance / square


class Returns(nn.Module):
    """A model that returns what `form` makes of its output."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.stack, self.form = Stack(2), form
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.kept.append(self.stack(x))
        return self.form(self.kept[-1])


def step(model: Returns, loss: Callable[[Any], Tensor], batches: list[Tensor]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    for x in batches:
        loss(model(x)).backward()
    optimizer.step()
    return scope.records[0]


def first(output: Any) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).square().sum()


def inputs(batch: int = B, seed: int = 0) -> Tensor:
    return data(seed, batch)[0]


def test_two_micro_batches() -> None:
    torch.manual_seed(0)
    model = Returns(lambda y: y)
    record = step(model, first, [inputs(3), inputs(2, seed=1)])
    close_to(record["output_spread"], [naive(*model.kept)])
    assert record.labels("output_spread") == [""]


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Tensor], Tensor]]] = {
    "one number a sample": (lambda y: y.mean((1, 2)), first, lambda y: y.mean((1, 2))),
    "loss first": (
        lambda y: {"loss": y.square().mean(), "mask": torch.ones(B, T), "logits": y},
        lambda o: o["loss"],
        lambda y: y,
    ),
    "pair": (lambda y: (y[:, 0], y[:, 1]), first, lambda y: y[:, 0]),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_first_output_of_several_samples_is_looked_at(name: str) -> None:
    torch.manual_seed(1)
    form, loss, looked_at = FORMS[name]
    model = Returns(form)
    record = step(model, loss, [inputs()])
    close_to(record["output_spread"], [naive(looked_at(model.kept[0]))])


def test_positions_of_a_single_sample_stand_for_samples() -> None:
    torch.manual_seed(2)
    model = Returns(lambda y: y)
    record = step(model, first, [inputs(1)])
    close_to(record["output_spread"], [naive(model.kept[0][0])])


def test_a_loss_alone_tells_nothing() -> None:
    record = step(Returns(lambda y: y.square().mean()), first, [inputs()])
    assert "output_spread" not in record


def test_what_got_no_gradient_is_not_counted() -> None:
    torch.manual_seed(3)
    model = Returns(lambda y: y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    with torch.no_grad():
        model(inputs(seed=5))
    model(inputs(seed=6))
    model(inputs(seed=7)).square().sum().backward()
    optimizer.step()
    close_to(scope.records[0]["output_spread"], [naive(model.kept[-1])])


def test_a_constant_output_is_zero_and_a_small_part_is_resolved() -> None:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(IN, D), nn.Linear(D, OUT)
            nn.init.zeros_(self.head.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.embed(x)))

    torch.manual_seed(4)
    model = Bias()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    loss_of(model, data()).backward()
    optimizer.step()
    assert scope.records[0]["output_spread"].tolist() == [0.0]
    x = torch.full((6, 5), 1000.0)
    x[:3] += 1.0 / 64
    variance, square, *_ = variation(x).tolist()
    assert variance / square == pytest.approx((1 / 128) ** 2 / 1000**2, rel=1e-4)


def test_large_outputs_are_sampled_evenly() -> None:
    torch.manual_seed(5)
    a, b, c, d = torch.randn(150, 30, 70), torch.randn(9, 2, 3000), torch.randn(70, 2500), torch.randn(5, 6, 7, 8)
    for x, some in (
        (a, a[::3, ::3][:, :10]),  # whole rows of features: 10 of the 30 positions
        (b, b[:, ::2, ::3].flatten(1)),
        (c, c[::2, ::3]),
        (d, d),
    ):
        assert some.shape[0] <= SAMPLES
        assert some.flatten(1).shape[1] <= ENTRIES
        variance, square, *_ = variation(x).tolist()
        assert variance / square == pytest.approx(naive(some), rel=1e-5)


def test_outputs_without_gradient_or_samples_are_none() -> None:
    held = torch.randn(4, 3, requires_grad=True)
    assert outputs_of((torch.randn(4, 3), held.sum(), held)) == [held]
    assert outputs_of(held[:1] * 2) == []
    assert outputs_of({"a": [torch.arange(3), None, "x"]}) == []


class Posterior(nn.Module):
    """A model that returns its answer, one number a sample, and the mean and log-variance of a code."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(IN, D), nn.Linear(D, 3), nn.Linear(D, 3)
        self.kept: list[tuple[Tensor, ...]] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x[:, 0])
        self.kept.append((h, h.sum(1, keepdim=True), self.mean(h), self.spread(h).clamp(max=9)))
        return self.kept[-1]


def test_outputs_beside_the_first_have_their_deviation_under_the_module_that_made_them() -> None:
    torch.manual_seed(6)
    model = Posterior()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    for x in (inputs(4), inputs(3, seed=1)):
        answer, number, mean, spread = model(x)
        (answer.sum() + number.sum() + mean.square().sum() + spread.sum()).backward()
    optimizer.step()
    record = scope.records[0]
    means = [np.mean([x[n].detach().double().numpy().var(0).sum() for x in model.kept]) for n in (2, 3)]
    close_to(record["further_deviation"], np.sqrt(means))
    assert record.labels("further_deviation") == ["mean", "spread"]


def test_nan_stays_nan() -> None:
    assert np.isnan(variation(torch.tensor([[1.0, float("nan")], [2.0, 3.0]])).numpy()[:-1]).all()


@pytest.mark.parametrize(
    ("shape", "width"), [((3, 7), 7), ((3, 5, 11), 11), ((3, 7, 5, 4), 7), ((3,), 1), ((1, 7), 7), ((1, 5, 11), 11)]
)
def test_the_width_is_the_axis_that_a_cross_entropy_chooses_over(shape, width):
    x = torch.randn(shape, requires_grad=True)
    assert width_of({"loss": x.sum(), "logits": x, "hidden": torch.randn(3, 13, requires_grad=True)}) == width
    assert width_of((x.detach(), x.sum())) is None


def test_records_hold_the_output_width_and_the_parameters_precision():
    model = nn.Sequential(nn.Linear(5, 8).bfloat16(), nn.ReLU(), nn.Linear(8, 7).bfloat16())
    model[2].bias.data = model[2].bias.data.double()
    model[2].forward = lambda x: x.float() @ model[2].weight.float().T + model[2].bias.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        model(torch.randn(3, 5).bfloat16()).sum().backward()
        optimizer.step()
    (record,) = scope.records
    assert record["output_width"].tolist() == [7]
    # eight bits of precision: the number after 1 is 1 + 2^-7; double has 2^-52
    assert record["param_epsilon"].tolist() == [2**-7, 2**-7, 2**-7, 2**-52]


def test_the_deviation_of_several_passes_is_not_their_sum() -> None:
    torch.manual_seed(0)
    model = Returns(lambda y: y)
    record = step(model, first, [inputs(seed=1), inputs(seed=2)])
    kept = [y.detach().double().numpy().reshape(len(y), -1) for y in model.kept]
    squares = [np.square(y - y.mean(0)).sum(1).mean() for y in kept]
    close_to(record["output_deviation"], [np.sqrt(np.mean(squares))])
