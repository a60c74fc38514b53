"""Vanishing and exploding gradients in chains and through time (F01-F06, F09-F11); one bad layer among good ones."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.faults.case import (
    Catalogue,
    Draw,
    Program,
    above,
    below,
    either,
    names,
    not_finite,
    plain_step,
    r2_of,
    supervised,
)
from benchmarks.faults.data import adding, blobs, circles, diabetes, digits
from benchmarks.faults.models import LastState, chain, class_loss, square_loss

case = Catalogue("gradients")
VANISHING = "vanishing_gradient"
EXPLODING = ("exploding_gradient", "non_finite", "update_too_large")


def hidden(model: nn.Sequential) -> str:
    """Any layer of a chain but its head."""
    return names(*map(str, range(len(model) - 1)))


@case("F01", "deep narrow sigmoid chain, circles", VANISHING)
def sigmoid_circles(draw: Draw) -> Program:
    model = chain(2, draw.pick("width", 5, 8, 12, 16), draw.pick("depth", 12, 10, 11, 14), 1, nn.Sigmoid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-3, 2))
    return supervised(draw, model, circles(), optimizer, class_loss, shows=below(0.75), place=hidden(model))


@case("F02", "deep narrow sigmoid chain, blobs", VANISHING)
def sigmoid_blobs(draw: Draw) -> Program:
    model = chain(2, draw.pick("width", 5, 8, 12, 16), draw.pick("depth", 11, 10, 12, 14), 3, nn.Sigmoid)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.01, 3))
    return supervised(draw, model, blobs(), optimizer, class_loss, shows=below(0.7), place=hidden(model))


@case("F04", "ten tanh layers, weights too small", VANISHING)
def small_weights(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 32, 24, 48, 64), draw.pick("depth", 10, 8, 12, 14), 10, nn.Tanh)
    std = draw.factor("std", 0.02, 1.5)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=below(0.5), place=hidden(model))


def through_time(draw: Draw, gain: float, lr: float) -> Program:
    """A plain RNN on the adding problem."""
    model = LastState(draw.pick("width", 24, 16, 32), gain=gain)
    length = draw.pick("length", 60, 50, 70)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    test = next(adding(200, length, 99))
    step = plain_step(model, optimizer, adding(32, length, draw.seed), square_loss)
    return Program(model, optimizer, step, 250, r2_of(model, test), accuracy=False, place=names("rnn"))


@case("F05", "recurrent weights too small: nothing through time", VANISHING)
def vanishing_in_time(draw: Draw) -> Program:
    program = through_time(draw, draw.factor("gain", 0.5, 1.2), draw.factor("lr", 0.05, 2))
    program.shows = below(0.3)
    return program


@case("F11", "recurrent weights too large, high rate", *EXPLODING)
def exploding_in_time(draw: Draw) -> Program:
    program = through_time(draw, draw.factor("gain", 2.5, 1.2), draw.factor("lr", 0.5, 1.5))
    program.shows = either(not_finite, below(0.0))
    program.place = None
    return program


class Softmax(nn.Softmax):
    """Softmax over features."""

    def __init__(self) -> None:
        super().__init__(dim=-1)


@case("F06", "softmax between layers", VANISHING, "representation_collapse", "token_collapse", "rank_collapse")
def softmax_hidden(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10, Softmax)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    place = names(*map(str, range(len(model))))  # the softmax belongs to the block of the layer behind it
    return supervised(draw, model, digits(), optimizer, class_loss, shows=below(0.7), place=place)


@case("F09", "learning rate too high, regression", *EXPLODING)
def high_rate(draw: Draw) -> Program:
    model = chain(10, draw.pick("width", 64, 48, 96), 2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.8, 1.3), momentum=0.9)
    shows = either(not_finite, below(0.0))
    return supervised(draw, model, diabetes(), optimizer, square_loss, batch=32, r2=True, shows=shows)


@case("F10", "inputs and targets not scaled", *EXPLODING)
def raw_inputs(draw: Draw) -> Program:
    model = chain(10, draw.pick("width", 64, 48, 96), 2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.01, 2))
    shows = either(not_finite, below(0.0))
    return supervised(draw, model, diabetes(raw=True), optimizer, square_loss, batch=32, r2=True, shows=shows)


class Scaled(nn.Module):
    """x times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@case("G01", "one layer of a tanh chain scaled by a wrong constant", VANISHING)
def one_weak_layer(draw: Draw) -> Program:
    depth = draw.pick("depth", 8, 7, 9)
    model = chain(64, draw.pick("width", 48, 32, 64), depth, 10, nn.Tanh)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    weak = 2 * draw.pick("layer", 3, 1, 2, 4, 5)
    scale = Scaled(draw.factor("gain", 1e-4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    model[weak] = nn.Sequential(model[weak], scale)
    place = names(str(weak), str(weak + 1))
    return supervised(draw, model, digits(), optimizer, class_loss, steps=200, shows=below(0.5), place=place)


class Plain(nn.Module):
    """A hidden layer with its activation, and a residual add where asked."""

    def __init__(self, width: int, *, residual: bool, gain: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc, self.residual, self.gain = nn.Linear(width, width), residual, gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.gain * torch.tanh(self.fc(self.norm(x)))
        return x + branch if self.residual else branch


class ResidualChain(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(64, width), nn.Sequential(*blocks), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))


@case("G02", "the add is missing in one residual block whose branch is scaled down", VANISHING)
def forgotten_add(draw: Draw) -> Program:
    depth = draw.pick("depth", 10, 8, 12)
    bad = draw.pick("block", 4, 2, 3, 5)
    width = draw.pick("width", 48, 32, 64)
    gain = draw.factor("gain", 1e-5, 2)
    blocks: list[nn.Module] = [Plain(width, residual=k != bad, gain=gain if k == bad else 1.0) for k in range(depth)]
    for block in blocks[bad + 1 :]:
        block.norm = nn.Identity()  # a norm behind it would undo the scale
    model = ResidualChain(width, blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    place = names(f"blocks.{bad}")
    return supervised(draw, model, digits(), optimizer, class_loss, steps=200, shows=below(0.9), place=place)


healthy = Catalogue("controls: plain networks", healthy=True)


@healthy("G91", "residual blocks of which one starts at a tenth of the gain")
def slightly_uneven(draw: Draw) -> Program:
    width, depth = draw.pick("width", 48, 32, 64), draw.pick("depth", 10, 8, 12)
    blocks = [Plain(width, residual=True, gain=0.1 if k == 4 else 1.0) for k in range(depth)]
    model = ResidualChain(width, list(blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.02, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, steps=300, shows=above(0.9))
