"""Trainable tensors in plain lists, dicts and attributes: an info names them, a warning once a gradient is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flowscope
from flowscope.instruments.unregistered import unregistered
from flowscope.records import Alert


class Plain(nn.Module):
    """Layers in a list, a dict of lists, a raw tensor; and much that is none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.parts = {"a": [nn.Linear(8, 3)]}
        self.scale = torch.ones(3, requires_grad=True)
        # registered elsewhere, frozen, no leaf, data
        self.again = [self.first]
        self.frozen = (nn.Linear(2, 2).requires_grad_(False),)
        self.made = self.first.weight * 2
        self.data = [torch.ones(3)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x.relu())
        return self.parts["a"][0](x) * self.scale


NAMES = [
    "layers[0].weight",
    "layers[0].bias",
    "layers[1].weight",
    "layers[1].bias",
    "parts[a][0].weight",
    "parts[a][0].bias",
    "scale",
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> flowscope.Scope:
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    assert not scope._faults.failed
    return scope


def of_kind(scope: flowscope.Scope) -> list[tuple[str, str, int]]:
    found = [a for a in scope.alerts if a.kind == "parameters_not_optimized"]
    return [(a.severity, a.where, a.step) for a in found]


def test_what_is_held_and_not_registered_is_found_under_its_path() -> None:
    model = Plain()
    assert list(unregistered(model.named_modules())) == NAMES


def test_a_lost_gradient_is_a_warning_and_the_rest_information() -> None:
    torch.manual_seed(0)
    model = Plain()
    scope = train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert of_kind(scope) == [("info", "layers", 0), ("warning", "layers", 1)]
    assert scope.records[0].labels("unregistered") == NAMES
    assert scope.records[0]["unregistered"].tolist() == [1.0] * len(NAMES)
    messages: list[Alert] = [a for a in scope.alerts if a.severity == "warning"]
    assert "7 trainable tensors" in messages[0].message
    assert "ModuleList" in messages[0].advice


@pytest.mark.parametrize("own", [True, False])
def test_what_an_optimizer_holds_is_not_lost(own: bool) -> None:
    """In the model's own optimizer, or in another one that steps beside it."""
    torch.manual_seed(0)
    model = Plain()
    plain = [*unregistered(model.named_modules()).values()]
    held = [*model.parameters(), *plain] if own else [*model.parameters()]
    optimizer, other = torch.optim.SGD(held, lr=0.01), torch.optim.SGD(plain, lr=0.01)
    if not own:
        optimizer.register_step_pre_hook(lambda *args: other.step())
    assert of_kind(train(model, optimizer)) == [("info", "layers", 0)]


def test_a_teacher_hidden_in_a_list_is_information() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.teacher = nn.Linear(4, 3), [nn.Linear(4, 3)]

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                aim = self.teacher[0](x)
            return self.net(x) - aim

    model = Student()
    assert of_kind(train(model, torch.optim.SGD(model.parameters(), lr=0.01))) == [("info", "teacher", 0)]


def test_models_without_such_have_no_such_instrument() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 8))
    assert unregistered(model.named_modules()) == {}
