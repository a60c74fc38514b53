"""Several places differ at once: the one that is named is what they have in common, or what most of them lie in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flowscope
from flowscope.parting.bisection import Parting


class Attention(nn.Module):
    """Scores of a query and a key over a value, without a softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.out(scores @ self.value(x) / x.shape[1])


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x + self.attention(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def recorded(folder: Path, change: Callable[[Net], None]) -> Path:
    torch.manual_seed(0)
    model = Net()
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flowscope.watch(model, optimizer, log_dir=folder, config={"console": "off"}) as scope:
        loss = model(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))).square().mean()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return folder


@pytest.fixture
def parting(tmp_path: Path) -> Callable[[Callable[[Net], None]], Parting]:
    """Where a changed run parts from the same without the change."""
    good = recorded(tmp_path / "good", lambda model: None)
    return lambda change: flowscope.bisect(good, recorded(tmp_path / "bad", change))


def scaled(*endings: str) -> Callable[[Net], None]:
    def change(model: Net) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(endings):
                    parameter.mul_(1.5)

    return change


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        # most of the numbers are the feed-forward's, though a projection of the attention comes before it
        (scaled("out.weight", "mlp.0.weight", "mlp.2.weight"), "blocks.0.mlp.0.weight", "in mlp of the blocks"),
        (scaled("head.weight"), "head.weight", "is the first of 1"),
        (scaled("norm.weight", "norm.bias"), "blocks.0.norm.weight", "is the first of 3"),  # biases begin as zeros
        (scaled("weight", "bias"), "embed.weight", "embed.weight is the first of"),
    ],
)
def test_of_other_weights_the_part_that_most_of_them_lie_in_is_named(
    change: Callable[[Net], None], where: str, words: str, parting: Callable[..., Parting]
) -> None:
    found = parting(change)
    assert (found.step, found.phase, found.where) == (0, "setup", where)
    assert words in found.message


def louder(*paths: str) -> Callable[[Net], None]:
    """Modules whose output is half as large again: the same weights, another forward."""

    def change(model: Net) -> None:
        for path in paths:
            module = model.get_submodule(path)
            module.forward = lambda x, forward=module.forward: 1.5 * forward(x)

    return change


@pytest.mark.parametrize(
    ("paths", "where"),
    [
        (("blocks.1.attention.query", "blocks.1.attention.key", "blocks.1.attention.value"), "blocks.1.attention"),
        (("blocks.1.attention.key",), "blocks.1.attention.key"),
        # the value of block 2 is not given the same any more: nothing is known of it
        (("blocks.1.attention.key", "blocks.2.attention.value"), "blocks.1.attention.key"),
    ],
)
def test_what_parts_that_differ_at_once_have_in_common_is_named(
    paths: tuple[str, ...], where: str, parting: Callable[..., Parting]
) -> None:
    found = parting(louder(*paths))
    assert (found.step, found.phase, found.where) == (0, "forward", where)
    assert ("several of them compute something else" in found.message) == (len(paths) == 3)
