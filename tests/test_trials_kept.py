"""Whatever is done to a model and what trains it, all is put back to the last bit."""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from trial_models import class_loss, rows

import flowscope
from flowscope.trials.kept import put_back


class Average:
    """An object of a user's, in an attribute."""

    def __init__(self) -> None:
        self.shadow, self.count = {"w": torch.ones(3)}, 0


class Everything(nn.Module):
    """Holds state wherever a module may hold it; each pass changes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.hidden = [nn.Linear(6, 6)]
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6), persistent=False)
        self.cache, self.array = torch.zeros(6), np.zeros(2)
        self.counts, self.last, self.average = {"passes": [0]}, deque([1], maxlen=3), Average()
        self.draw, self.numbers = torch.Generator().manual_seed(4), np.random.default_rng(5)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.hidden[0](self.first(x)))) * (1 + random.random()) * (1 + np.random.rand())
        with torch.no_grad():
            self.seen += x.mean(0)
            self.cache.add_(1)
            self.average.shadow["w"] *= 0.9
        self.array += 1
        self.average.count += 1
        self.counts["passes"].append(self.passes)
        self.last.append(2)
        self.passes += 1
        self.made_here = torch.rand(1, generator=self.draw) + float(self.numbers.random())
        return self.head(x)


def bits(value: Any) -> Any:
    """A value with its tensors as bytes: equal where every bit is."""
    if isinstance(value, Tensor):
        gradient = bits(value.grad) if value.is_leaf and value.grad is not None else None
        return (value.dtype, value.requires_grad, value.detach().contiguous().numpy().tobytes(), gradient)
    if isinstance(value, (nn.Module, torch.optim.Optimizer, Average)):
        return {name: bits(item) for name, item in vars(value).items() if "hook" not in name and "patch" not in name}
    if isinstance(value, dict):
        return [(key if isinstance(key, str) else "", bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [bits(item) for item in value]
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return value.tobytes() if isinstance(value, np.ndarray) else copy.copy(value)


def chance() -> Any:
    return bits(torch.get_rng_state()), random.getstate(), repr(np.random.get_state())


def trained() -> tuple[Everything, torch.optim.Optimizer]:
    """After one step, so that there are gradients and moments."""
    torch.manual_seed(0)
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    class_loss(model, rows()[0]).backward()
    optimizer.step()
    model.drop.eval()
    with torch.no_grad():
        model.first.weight[0, 0], model.first.weight[0, 1] = float("nan"), -0.0
    return model, optimizer


def test_a_training_step_and_worse_is_undone_bitwise() -> None:
    model, optimizer = trained()
    before, drawn, storage = bits(model), chance(), model.first.weight.data_ptr()
    moments = bits(optimizer)
    with put_back(model, optimizer):
        model.eval()
        class_loss(model, rows()[1]).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7
        optimizer.state.clear()
        model.head.weight.data = model.head.weight.data.double()
        model.first.bias.grad = None
        model.first.requires_grad_(False)
        model.hidden.append(nn.ReLU())
        model.extra = nn.Linear(2, 2)
        model.norm = nn.Identity()
        assert bits(model) != before
        assert bits(optimizer) != moments
        assert chance() != drawn
    assert bits(model) == before
    assert bits(optimizer) == moments
    assert chance() == drawn
    assert model.first.weight.data_ptr() == storage
    assert optimizer.param_groups[0]["params"][0] is model.first.weight
    assert not model.drop.training
    assert model.norm.training
    assert not hasattr(model, "extra")


def test_it_is_undone_where_what_is_done_raises() -> None:
    model, optimizer = trained()
    before = bits(model)

    def spoil() -> None:
        with put_back(model, optimizer):
            nn.init.zeros_(model.first.weight)
            raise KeyError

    with pytest.raises(KeyError):
        spoil()
    assert bits(model) == before


def test_a_buffer_that_a_pass_made_part_of_a_graph_is_a_leaf_again() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("total", torch.zeros(3))
    with put_back(model):
        model.total += model(torch.ones(3))
        assert not model.total.is_leaf
    assert model.total.is_leaf
    assert not model.total.requires_grad
    assert torch.equal(model.total, torch.zeros(3))


def test_what_did_not_change_is_not_written_to() -> None:
    model = nn.Linear(3, 3)
    graph = model(torch.ones(3)).square().sum()
    version = model.weight._version
    with put_back(model):
        model(torch.ones(3))
    assert model.weight._version == version
    graph.backward()


def test_all_trials_leave_everything_as_it_was() -> None:
    model, optimizer = trained()
    with torch.no_grad():
        model.first.weight[0, 0] = 0.5
    batches = rows()
    before, moments, drawn, held = bits(model), bits(optimizer), chance(), bits(batches)
    report = flowscope.check(model, class_loss, batches, optimizer=optimizer)
    assert not [f for f in report.findings if "could not be run" in f.message]
    assert bits(model) == before
    assert bits(optimizer) == moments
    assert chance() == drawn
    assert bits(batches) == held


CRITIC = nn.BatchNorm1d(3)


def judged_by(critic: nn.Module, out: Tensor) -> Tensor:
    return critic(out).square().mean()


class Losses:
    """Holds a net and a queue, and is called as a loss or by a method."""

    def __init__(self) -> None:
        self.critic, self.queue = nn.BatchNorm1d(3), torch.zeros(3)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        self.queue += out.detach().mean(0)
        return judged_by(self.critic, out) + (out - self.queue).square().mean()

    def method(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model, batch)


def by_name(model: nn.Module, batch: Any) -> Tensor:
    def inner() -> Tensor:
        return helped(model(batch[0]))

    return inner()


def helped(out: Tensor) -> Tensor:
    return judged_by(CRITIC, out)


def in_a_closure() -> tuple[Any, nn.Module]:
    nets = {"critic": nn.BatchNorm1d(3)}
    return lambda model, batch: judged_by(nets["critic"], model(batch[0])), nets["critic"]


def of_an_object(kind: str) -> tuple[Any, nn.Module]:
    held = Losses()
    return held if kind == "called" else held.method, held.critic


def partly_given(model: nn.Module, batch: Any, *, critic: nn.Module) -> Tensor:
    return judged_by(critic, model(batch[0]))


def of_a_partial() -> tuple[Any, nn.Module]:
    critic = nn.BatchNorm1d(3)
    return functools.partial(partly_given, critic=critic), critic


@pytest.mark.parametrize(
    "made",
    [
        in_a_closure,
        lambda: of_an_object("called"),
        lambda: of_an_object("method"),
        lambda: (by_name, CRITIC),
        of_a_partial,
    ],
    ids=["closure", "object", "method", "global", "partial"],
)
def test_a_second_net_that_a_loss_refers_to_is_put_back(made: Any) -> None:
    loss, critic = made()
    model, batches = nn.Linear(6, 3), rows()
    queue = getattr(getattr(loss, "__self__", loss), "queue", None)
    before = bits(critic), bits(queue)
    loss(model, batches[0])
    changed = bits(critic), bits(queue)
    assert changed != before
    flowscope.check(model, loss, batches, only=["gradient", "determinism", "overfit"])
    assert (bits(critic), bits(queue)) == changed
