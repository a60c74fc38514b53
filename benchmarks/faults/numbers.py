"""Values that are not finite (F07, F13-F15), and those that bring them about in transformers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.faults.case import Batch, Catalogue, Draw, Program, below, names, not_finite, plain_step, supervised
from benchmarks.faults.data import circles, digits, markov
from benchmarks.faults.models import Decoder, Exponential, RowNorm, chain, class_loss
from benchmarks.faults.transformers import decoder

case, healthy = Catalogue("numbers"), Catalogue("controls: numbers", healthy=True)
KIND = "non_finite"


@case("F07", "exp between layers", KIND)
def exponential(draw: Draw) -> Program:
    depth = draw.pick("depth", 8, 7, 9)
    model = chain(2, draw.pick("width", 5, 6, 8), depth, 1, Exponential)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.01, 3))
    place = names(*map(str, range(len(model))))
    return supervised(draw, model, circles(), optimizer, class_loss, steps=100, shows=not_finite, place=place)


def log_of_softmax(model: nn.Module, batch: Batch) -> Tensor:
    return F.nll_loss(torch.log(torch.softmax(model(batch[0]), -1)), batch[1])


@case("F13", "log of a softmax that is 0", KIND)
def log_zero(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 30, 24, 48), 2, 10)
    std = draw.factor("std", 3.0, 1.2)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    place = r"loss|"  # the first bad value is the loss itself; the logits are finite
    return supervised(draw, model, digits(), optimizer, log_of_softmax, steps=100, shows=not_finite, place=place)


@case("F14", "one NaN in one batch", KIND)
def bad_sample(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), 2, 10)
    bad = draw.step("step", 150, 25, 240)

    def alter(k: int, batch: Batch) -> Batch:
        x = batch[0].clone()
        if k == bad:
            x[3, 7] = math.nan
        return x, batch[1]

    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    shown = {"first": bad, "place": r"input.*|", "shows": not_finite}
    return supervised(draw, model, digits(), optimizer, class_loss, steps=300, alter=alter, **shown)


@case("F15", "a norm without eps meets blank rows", KIND)
def no_eps(draw: Draw) -> Program:
    model = nn.Sequential(RowNorm(), *chain(64, draw.pick("width", 64, 48, 96), 2, 10))
    share = draw.factor("share", 0.02, 2)

    def alter(k: int, batch: Batch) -> Batch:
        blank = torch.zeros(len(batch[0]), 1)
        blank[: max(1, round(share * len(blank)))] = 1
        return batch[0] * (1 - blank), batch[1]

    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    shown = {"place": names("0"), "shows": not_finite}
    return supervised(draw, model, digits(), optimizer, class_loss, steps=100, alter=alter, **shown)


class Rooted(nn.Module):
    """The root where there is one, else 0: finite, but the branch not taken has a derivative that is no number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.sqrt(), 0.0)


@case("N01", "the derivative of a root behind torch.where", KIND)
def root_of_zero(draw: Draw) -> Program:
    place = draw.pick("place", 1, 3)
    model = chain(64, draw.pick("width", 64, 48, 96), 3, 10)
    model[place] = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    # the loss stays finite: a comparison with NaN is false, so the layer returns zeros
    shows = {"place": names(*map(str, range(place + 3))), "shows": below(0.5)}
    return supervised(draw, model, digits(), optimizer, class_loss, steps=100, **shows)


@case("N02", "a decoder's weight turns infinite in mid-run", KIND)
def bad_weight(draw: Draw) -> Program:
    depth = draw.pick("depth", 6, 4, 8)
    block = draw.pick("block", 2, 1, 3)
    model = Decoder(draw.pick("norm", "pre", "post"), depth)
    bad = draw.step("step", 43, 21, 68)

    def before(k: int) -> None:
        if k == bad:
            with torch.no_grad():
                model.blocks[block].attention.out.weight[3, 5] = math.inf

    # off the sampled steps the alert names "forward" and the step; on them the weight or the block
    place = rf"blocks\.{block}(\..*)?|" + names("final", "head") + "|"
    return decoder(draw, model, 1e-3, 90, before=before, shows=not_finite, first=bad, place=place)


@case("N03", "a mask that hides every word from one", KIND)
def masked_out(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 4, 3, 6))
    bad = draw.step("step", 37, 21, 55)
    block = draw.pick("block", 1, 0, 2)
    attention = model.blocks[block].attention
    plain = attention.forward
    state = {"step": 0}

    def forward(x: Tensor) -> Tensor:
        out = plain(x)
        if state["step"] < bad:
            return out
        scores = torch.full((x.shape[1],), -math.inf)
        weights = scores.softmax(0)  # of nothing: NaN
        return out + weights[0]

    attention.forward = forward

    def before(k: int) -> None:
        state["step"] = k

    place = rf"blocks\.{block}(\..*)?|" + names("final", "head") + "|"
    return decoder(draw, model, 1e-3, 80, before=before, shows=not_finite, first=bad, place=place)


class Added(nn.Module):
    """A constant added to one channel: a massive activation."""

    def __init__(self, width: int, channel: int) -> None:
        super().__init__()
        self.register_buffer("size", torch.zeros(width))
        self.channel = channel

    def forward(self, x: Tensor) -> Tensor:
        return x + self.size.to(x.dtype)


def massive(draw: Draw, size: float, **known) -> Program:
    """A decoder in fp16 whose first block leaves one channel of the stream at this size."""
    model = Decoder("pre", draw.pick("depth", 4, 3, 6), 32)
    added = Added(32, draw.pick("channel", 7, 3, 20))
    with torch.no_grad():
        added.size[added.channel] = size
    model.blocks[0].mlp.append(added)
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain_step(model, optimizer, markov(16, 16, draw.seed), half_loss)
    return Program(model, optimizer, step, 40, **known)


def half_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the next words, in fp32."""
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())


@case("N04", "fp16, a channel close to its largest number", "activation_headroom")
def no_headroom(draw: Draw) -> Program:
    return massive(draw, draw.factor("size", 2e4, 1.5), place=names("blocks", "final", "head"))


@healthy("N94", "fp16, a channel larger than the others with room above it")
def headroom(draw: Draw) -> Program:
    return massive(draw, draw.factor("size", 4.0, 1.2))
