"""Dead, saturated and identical units (F17-F23, F28)."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.faults.case import Catalogue, Draw, Program, below, names, supervised
from benchmarks.faults.data import blobs, digits
from benchmarks.faults.models import chain, class_loss

case = Catalogue("units")


def activations(model: nn.Sequential) -> str:
    """The activations of a chain, or the inputs of the layers behind them."""
    places = [k for k, layer in enumerate(model) if not isinstance(layer, nn.Linear)]
    return "|".join(rf"{k}|{k + 1}(:input)?" for k in places)


@case("F17", "deep narrow ReLU chain born dead", "dead_units")
def born_dead(draw: Draw) -> Program:
    model = chain(2, draw.pick("width", 5, 8, 12), draw.pick("depth", 15, 12, 18), 3)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.uniform_(layer.weight, -0.05, 0.05)
            nn.init.constant_(layer.bias, -draw.factor("bias", 0.05, 1.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.01, 3))
    return supervised(draw, model, blobs(), optimizer, class_loss, shows=below(0.7), place=activations(model))


@case("F18", "a rate that kills the units", "dead_units", "update_too_large")
def killed(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 128, 96, 192), 2, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 3.0, 1.2))
    place = activations(model) + "|" + names(*map(str, range(len(model))))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=below(0.6), place=place)


@case("F19", "first layer's bias far below zero", "dead_units")
def shifted(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    nn.init.constant_(model[0].bias, -draw.factor("bias", 12.0, 1.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=below(0.5), place=r"1|2(:input)?")


@case("U01", "a dead layer in the middle of a chain", "dead_units")
def dead_middle(draw: Draw) -> Program:
    depth = draw.pick("depth", 5, 4, 6)
    model = chain(64, draw.pick("width", 64, 48, 96), depth, 10)
    bad = 2 * draw.pick("layer", 2, 1, 3)
    nn.init.constant_(model[bad].bias, -draw.factor("bias", 20.0, 1.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    place = rf"{bad + 1}|{bad + 2}(:input)?"
    return supervised(draw, model, digits(), optimizer, class_loss, steps=200, shows=below(0.5), place=place)


@case("F21", "tanh chain with weights too large", "saturation")
def saturated(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 3, 2, 4), 10, nn.Tanh)
    std = draw.factor("std", 2.0, 1.3)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=below(0.8), place=activations(model))


@case("U02", "sigmoid gates of a chain pushed to one side", "saturation", "vanishing_gradient")
def saturated_sigmoid(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), 3, 10, nn.Sigmoid)
    for k in (0, 2, 4):
        nn.init.constant_(model[k].bias, draw.factor("bias", 25.0, 1.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    place = activations(model) + "|" + names(*map(str, range(6)))
    return supervised(draw, model, digits(), optimizer, class_loss, steps=200, shows=below(0.6), place=place)


@case("F23", "all weights alike", "symmetry", "rank_collapse")
def alike(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    value = draw.factor("value", 0.01, 2)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    place = names(*map(str, range(len(model))))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=below(0.6), place=place)


@case("F28", "batches of one with a high rate", "dead_units", "loss_plateau")
def batches_of_one(draw: Draw) -> Program:
    model = chain(2, draw.pick("width", 50, 40, 64), 1, 3)
    rate = draw.factor("lr", 0.02, 1.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return supervised(draw, model, blobs(raw=True), optimizer, class_loss, batch=1, steps=1500, shows=below(0.7))
