"""What is in a model is found once: by one walk over its modules, whichever instruments look for something."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flows_models import Implicit, Integrated, MixtureStack, weight_of_radius
from torch import Tensor, nn
from wrap_models import ConvNet, PostNormBlock, PreNormBlock
from wrap_models import Stack as Wrappable

import flowscope
from flowscope.model.view import ModelView


class Attention(nn.Module):
    """A gate over a convolution, as in squeeze-and-excitation, and a shared activation."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.se = nn.Sequential(nn.Conv2d(4, 4, 1), self.act, nn.Conv2d(4, 4, 1), nn.Sigmoid())
        self.norm, self.again, self.gelu = nn.BatchNorm2d(4), self.act, nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.gelu(self.norm(self.act(x) * self.se(x)))


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.top_k, self.gate = nn.Parameter(torch.zeros(3, 4)), 2, nn.Sigmoid()


class DEQBase(nn.Module):
    pass


class Layer(DEQBase):
    pass


class Mixed(nn.Module):
    """One of each: nothing here is ever run."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = TopKRouter(), Layer()
        self.implicit = Implicit(weight_of_radius(0.5))
        self.ode = Integrated(torch.add)
        self.rnn, self.attention = nn.LSTM(4, 4), nn.ModuleList(Attention() for _ in range(2))
        self.twin = self.attention[0]
        self.gating = Attention()
        self.norm, self.tanh = nn.InstanceNorm1d(4, track_running_stats=True), nn.Tanh()


def wrapped() -> nn.Module:
    model = Wrappable(PreNormBlock)
    flowscope.wrap(model, mode="highway")
    return model


ZOO: dict[str, Callable[[], nn.Module]] = {
    "mixture": MixtureStack,
    "implicit": lambda: Implicit(weight_of_radius(0.5)),
    "ode": lambda: Integrated(torch.add),
    "convolutions": ConvNet,
    "post-norm": lambda: Wrappable(PostNormBlock),
    "wrapped": wrapped,
    "mixed": Mixed,
}

FOUND: dict[str, dict[str, Any]] = {
    "mixture": {
        "flows": [("blocks", "blocks", ("blocks.0", "blocks.1"))],
        "routers": [("blocks.0.mlp.gate", 4, 2), ("blocks.1.mlp.gate", 3, 1)],
    },
    "implicit": {"flows": [("network", "chain", ("f.outer", "head"))], "maps": ["f"]},
    "ode": {"flows": [("network", "chain", ("embed", "head"))], "dynamics": ["func"]},
    "convolutions": {
        "flows": [
            ("network", "network", ("layer1.0", "layer1.1", "layer2.0", "layer2.1")),
            ("layer1", "stage", ("layer1.0", "layer1.1")),
            ("layer2", "stage", ("layer2.0", "layer2.1")),
        ],
        "batch_norms": [
            *("layer1.0.bn1", "layer1.0.bn2", "layer1.1.bn1", "layer1.1.bn2"),
            *("layer2.0.bn1", "layer2.0.bn2", "layer2.0.downsample.1", "layer2.1.bn1", "layer2.1.bn2"),
        ],
    },
    "post-norm": {"flows": [("blocks", "blocks", ("blocks.0", "blocks.1"))]},
    "wrapped": {
        "flows": [("blocks", "blocks", ("blocks.0", "blocks.1"))],
        "connections": ["blocks.0.connection", "blocks.1.connection"],
    },
    "mixed": {
        "flows": [("attention", "blocks", ("attention.0", "attention.1")), ("rnn", "time", ("rnn",))],
        "routers": [("router", 3, 2)],
        "gates": [
            ("attention.0.se.3", True, False),
            ("attention.1.se.3", True, False),
            ("gating", False, True),
            ("gating.se.3", True, False),
        ],
        "dynamics": ["ode.func"],
        "maps": ["implicit.f"],
        "equilibrium_layers": ["layer"],
        "batch_norms": ["attention.0.norm", "attention.1.norm", "gating.norm"],
    },
}
"""What single finders gave, each with a walk of its own, before there was a view; a kind left out was not found."""


def paths(named: list[tuple[str, nn.Module]]) -> list[str]:
    return [path for path, _ in named]


@pytest.mark.parametrize("name", ZOO)
def test_it_finds_what_single_searches_found(name: str) -> None:
    view = ModelView(ZOO[name]())
    found = {
        "flows": [(flow.name, flow.kind, flow.outputs) for flow in view.flows],
        "routers": [(router.path, router.experts, router.chosen) for router in view.routers],
        "gates": [(gate.path, gate.sigmoid, gate.named) for gate in view.gates],
        "dynamics": paths(view.dynamics),
        "maps": paths(view.maps),
        "equilibrium_layers": paths(view.equilibrium_layers),
        "batch_norms": paths(view.batch_norms),
        "connections": paths(view.connections),
    }
    assert found == {kind: FOUND[name].get(kind, []) for kind in found}
    assert view.flows == flowscope.find_flows(view.model)
    assert paths(view.connections) == [path for path, _ in flowscope.connections(view.model)]


def test_what_shows_activations() -> None:
    kinds = {nn.ReLU: "rectifier", nn.GELU: "smooth", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}
    kinds |= {nn.Linear: "input", nn.Conv2d: "input"}
    model = Mixed()
    expected = [(path, kinds[type(m)]) for path, m in model.named_modules() if type(m) in kinds]
    assert [(path, kind) for path, _, kind in ModelView(model).activations] == expected
    assert ("attention.0.act", "rectifier") in expected
    assert not any(path.startswith("twin") for path, _ in expected)


def count_walks(model: nn.Module) -> list[str]:
    """Make a model note each walk over its modules from here on, and by whom."""
    walks: list[str] = []
    kind = type(model)

    def named_modules(self: nn.Module, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        walks.append(" -> ".join(frame.name for frame in traceback.extract_stack(limit=6)))
        yield from kind.named_modules(self, *args, **options)

    model.__class__ = type(kind.__name__, (kind,), {"named_modules": named_modules, "__module__": kind.__module__})
    return walks


@pytest.mark.parametrize("name", ["mixture", "implicit", "ode", "convolutions", "wrapped"])
def test_a_watch_walks_the_modules_once(name: str) -> None:
    model = ZOO[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    walks = count_walks(model)
    with flowscope.watch(model, optimizer, config={"console": "off"}):
        # besides: whether there is a parameter at all, and where the features of what holds a layer are
        searches = [walk for walk in walks if "check_model" not in walk and "-> of ->" not in walk]
        assert len(searches) == 1, searches
        assert len(walks) == len(set(walks)), "a search walked twice"


def test_steps_walk_no_modules() -> None:
    model = MixtureStack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        walks = count_walks(model)
        for _ in range(3):
            model(torch.ones(3, 5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert len(scope.records) == 3
    assert walks == []


def test_flows_named_by_the_user_take_one_walk_more() -> None:
    model = Mixed()
    walks = count_walks(model)
    view = ModelView(model, flows=["attention", "implicit.f", "attention.*", "ode.func.net"], gates=["gating", "*.se"])
    assert [flow.name for flow in view.flows] == ["attention", "implicit.f", "attention#2", "ode.func.net"]
    assert [path for path, _ in view.named_gates] == ["attention.0.se", "attention.1.se", "gating", "gating.se"]
    assert len(walks) == 2


def replace_module(model: Mixed) -> None:
    model.tanh = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))


def share_module(model: Mixed) -> None:
    model.twin = model.attention[1]


def add_parameter(model: Mixed) -> None:
    model.layer.register_parameter("scale", nn.Parameter(torch.ones(4)))


def take_out_module(model: Mixed) -> None:
    del model.implicit


@pytest.mark.parametrize("change", [replace_module, share_module, add_parameter, take_out_module])
def test_the_modules_are_read_again_where_they_changed(change: Callable[[Mixed], None]) -> None:
    model = Mixed()
    view = ModelView(model)
    gates = view.gates
    assert view.tree.follow() == view.tree.follow() == 1
    change(model)
    assert view.tree.follow() == view.tree.follow() == 2
    assert view.modules == tuple(model.named_modules())
    assert view.tree.by_path == dict(model.named_modules(remove_duplicate=False))
    assert view.gates is gates  # hooks are at what was found when the view was first asked


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_torch_jit_compiled_is_not_looked_into() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        return nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()

    model, bare = make(), make()
    with flowscope.watch(model, every=1, config={"console": "off"}) as scope:
        train(model)
    train(bare)
    assert scope.records[-1].labels("param_norm") == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), bare.parameters(), strict=True))
    with pytest.raises(flowscope.FlowscopeError, match=r"watch\(model\).*torch.jit"):
        flowscope.watch(torch.jit.script(nn.Linear(4, 4)))
