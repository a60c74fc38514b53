"""Depth is where data goes: branches beside each other are on no chain, whatever list they stand in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flowscope

B, D = 3, 8


def mlp(into: int = D, out: int = D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(into, D), nn.Tanh(), nn.Linear(D, out), nn.Tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def trained(model: nn.Module, answer: Callable[[Tensor], Sequence[Tensor]], steps: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    alerts: list[Any] = []
    with flowscope.watch(model, optimizer, every=1, on_alert=alerts.append, **options) as scope:
        for _ in range(steps):
            loss = sum(out.square().mean() for out in answer(torch.randn(B, D)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    return scope.records, alerts


def products(record: Any) -> list[tuple[str, ...]]:
    return [record.labels(key) for key in record.metrics if key.partition("@")[0] == "gradient_product"]


class Scales(nn.Module):
    """A backbone and a branch a scale, in a list that is called neither heads nor branches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.cv2 = nn.ModuleList(nn.Sequential(Block(), nn.Linear(D, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        scales = []
        for block in self.blocks:
            x = block(x)
            scales.append(x)
        return [branch(scale) for branch, scale in zip(self.cv2, scales, strict=True)]


def test_branches_of_a_list_are_places_with_a_norm_and_on_no_chain() -> None:
    model, norms = Scales(), {}
    for number, branch in enumerate(model.cv2):

        def look(module: nn.Module, args: Any, out: Tensor, number: int = number) -> None:
            out.register_hook(lambda gradient: norms.__setitem__(number, float(gradient.norm())))

        branch.register_forward_hook(look)
    record = trained(model, model)[0][-1]
    assert [[*labels] for labels in products(record)] == [["blocks.0:input", "blocks.0", "blocks.1", "blocks.2"]]
    assert [*record.labels("grad_norm@cv2")][-3:] == ["cv2.0", "cv2.1", "cv2.2"]
    np.testing.assert_allclose(record["grad_norm@cv2"][-3:], [norms[n] for n in range(3)], rtol=1e-5)


class Pyramid(nn.Module):
    """From the top down, as torchvision's: each level's lateral is added to what is above, then smoothed."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.stems = nn.ModuleDict({f"s{i}": nn.Linear(D, w) for i, w in enumerate(widths)})
        self.inner_blocks = nn.ModuleList(nn.Sequential(nn.Linear(w, D), nn.ReLU()) for w in widths)
        self.layer_blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in widths)

    def forward(self, x: Tensor) -> list[Tensor]:
        levels, top, out = [stem(x) for stem in self.stems.values()], torch.zeros(()), []
        for inner, layer, level in zip(self.inner_blocks, self.layer_blocks, levels, strict=True):
            top = inner(level) + top
            out.append(layer(top))
        return out


@pytest.mark.parametrize("widths", [(D, D, D), (4, 6, 12)])
def test_the_levels_of_a_pyramid_are_no_depth(widths: Sequence[int]) -> None:
    records, alerts = trained(model := Pyramid(widths), model, steps=4)
    assert not any("_blocks" in label for labels in products(records[-1]) for label in labels)
    assert not [alert for alert in alerts if alert.severity == "error"]


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy_net, self.value_net, self.action_head = mlp(), mlp(), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.action_head(self.policy_net(x)), self.value_net(x)


def test_no_chain_goes_from_one_net_into_the_head_of_another() -> None:
    model = ActorCritic()
    for labels in products(trained(model, model)[0][-1]):
        assert not ("action_head" in labels and any("value_net" in label for label in labels))


class Stack(nn.Module):
    def __init__(self, way: str, depth: int = 4) -> None:
        super().__init__()
        self.blocks, self.way, self.skip = nn.ModuleList(Block() for _ in range(depth)), way, False

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for number, block in enumerate(self.blocks):
            if self.way == "outside":
                x = x + block(x)
            elif self.way.startswith("checkpoint"):
                x = checkpoint(block, x.requires_grad_() if not number else x, use_reentrant=self.way.endswith("r"))
            elif self.way == "cut" and number == 2:
                x = block(x.detach())
            elif not (self.skip and number == 1):
                x = block(x)
        return (x,)


@pytest.mark.parametrize("way", ["plain", "outside", "checkpoint", "checkpoint r", "cut"])
def test_a_stack_stays_one_chain(way: str) -> None:
    model = Stack(way)
    records, alerts = trained(model, model, steps=6)
    for record in records:
        (labels,) = products(record)
        assert [label for label in labels if not label.endswith(":input")] == [f"blocks.{i}" for i in range(4)]
    assert ("no_gradient" in {alert.kind for alert in alerts}) == (way == "cut")


def test_a_block_that_was_skipped_first_joins_the_chain() -> None:
    model = Stack("plain")
    calls = iter([True, False, True])

    def answer(x: Tensor) -> Sequence[Tensor]:
        model.skip = next(calls)
        return model(x)

    records, _ = trained(model, answer, steps=3)
    for record in records:
        (labels,) = products(record)
        assert [*labels[-4:]] == [f"blocks.{i}" for i in range(4)]
    assert np.isfinite(records[1]["gradient_product"][-4:]).all()


def test_containers_of_parameters_are_no_layers() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ParameterDict({"kernel": torch.randn(D, D)})
            self.second = nn.ParameterList([torch.randn(D, D)])

    assert not len(flowscope.find_flows(Bare()))


def test_a_branch_between_two_blocks_leaves_the_chain_whole() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> list[Tensor]:
            a = self.blocks[0](x)
            return [self.blocks[1](x), self.blocks[3](self.blocks[2](a))]  # the second runs beside the others

    model = Aside()
    record = trained(model, model)[0][-1]
    assert [[*labels[-3:]] for labels in products(record)] == [["blocks.0", "blocks.2", "blocks.3"]]
    assert [*record.labels("grad_norm@blocks.branches")] == ["blocks.1"]


def test_stages_whose_entries_are_points_too_are_one_network() -> None:
    """A stage's input is the point before it: both are found, and the flow over all stages stays whole."""

    class Stage(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.into = nn.Linear(D, D)
            self.norm = nn.LayerNorm(D)
            self.out = nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, D))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(self.norm(self.into(x)))

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(*(Stage(4) for _ in range(2)))
            self.layer2 = nn.Sequential(*(Stage(6) for _ in range(2)))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.layer2(self.layer1(x))]

    model = Stages()
    record = trained(model, model)[0][-1]
    assert any(len(labels) == 5 for labels in products(record))
    assert not any("branches" in key for key in record.metrics)
