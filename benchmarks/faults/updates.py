"""Steps too small, too large or spoilt, and what the loss alone shows (F30, F35, F37, F39, F40, F42)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.faults.case import (
    Batch,
    Catalogue,
    Draw,
    Program,
    Shown,
    above,
    below,
    names,
    plain_step,
    scheduled,
    supervised,
)
from benchmarks.faults.data import digits, images, markov
from benchmarks.faults.models import Decoder, chain, class_loss, convnet, word_loss
from benchmarks.faults.transformers import decoder

case = Catalogue("updates and loss")
ANY = r".*"


@case("F30", "learning rate far too low", "update_too_small")
def low_rate(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 1e-5, 2))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=below(0.4), place=ANY)


@case("F42", "clipped to almost nothing", "update_too_small", "over_clipped")
def over_clipped(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    limit = draw.factor("limit", 1e-4, 2)

    def clip(k: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)

    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    return supervised(draw, model, digits(), optimizer, class_loss, after_backward=clip, shows=below(0.4), place=ANY)


def spike(draw: Draw, optimizer: torch.optim.Optimizer, at: int, factor: float, steps: int):
    """Multiplies the rate for a few steps."""
    usual = optimizer.param_groups[0]["lr"]

    def before(k: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = usual * (factor if at <= k < at + steps else 1)

    return before


def jumped(at: int, least: float = 1.0):
    """The loss rose above the level before by `least` within ten steps."""

    def check(shown: Shown) -> str | None:
        usual = sum(shown.losses[at - 20 : at]) / 20
        most = max(shown.losses[at : at + 12])
        return None if not most < usual + least else f"loss {usual:.2f} rose to {most:.2f} only"

    return check


@case("F39", "a rate 25 times too high for two steps", "loss_spike", "update_too_large")
def short_spike(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), 2, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 1.2))
    at = draw.step("step", 250, 120, 400)
    before = spike(draw, optimizer, at, draw.factor("factor", 60, 1.2), 2)
    return supervised(
        draw, model, digits(), optimizer, class_loss, steps=600, before=before, first=at, shows=jumped(at), place=ANY
    )


@case("V01", "a rate spike in a decoder", "loss_spike", "update_too_large", "exploding_gradient")
def decoder_spike(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 6, 4, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 2e-3, 1.3))
    at = draw.step("step", 93, 71, 112)
    before = spike(draw, optimizer, at, draw.factor("factor", 50, 1.3), 4)
    step = plain_step(model, optimizer, markov(32, 16, draw.seed), word_loss, before=before)
    return Program(model, optimizer, step, 150, None, jumped(at, 0.5), at, ANY)


def still(model: nn.Module) -> Callable[[], float]:
    """Minus the share of entries that never moved from where they are now."""
    start = [p.detach().clone() for p in model.parameters()]

    def kept() -> float:
        same = sum(int((p == s).sum()) for p, s in zip(model.parameters(), start, strict=True))
        return -same / sum(s.numel() for s in start)

    return kept


@case("V02", "bfloat16 weights round the steps away", "update_too_small")
def rounded_away(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10).bfloat16()
    rate = draw.factor("lr", 3e-5, 1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    program = supervised(draw, model, digits(), optimizer, loss_of, steps=300, place=ANY, shows=below(-0.5))
    program.quality, program.accuracy = still(model), False
    return program


@case("V03", "bfloat16 decoder, small rate", "update_too_small")
def rounded_decoder(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 4, 3, 6)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-5, 1.5), weight_decay=0.0)
    step = plain_step(model, optimizer, markov(16, 16, draw.seed), word_loss)
    return Program(model, optimizer, step, 100, still(model), below(-0.5), 0, ANY, accuracy=False)


@case("V04", "a rate of 1 for AdamW", "update_too_large", "loss_spike", "exploding_gradient", "non_finite")
def thrown(draw: Draw) -> Program:
    model = Decoder("pre", draw.pick("depth", 6, 4, 8))
    program = decoder(draw, model, draw.factor("lr", 1.0, 1.5), 100, 32, place=ANY)
    program.shows = lambda shown: None if not shown.last_loss < 2.4 else f"loss {shown.last_loss:.2f}"
    return program


@case("V05", "zero_grad is missing", "gradient_accumulates")
def no_zero_grad(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.02, 2))
    program = supervised(draw, model, digits(), optimizer, class_loss, steps=200)
    real = optimizer.zero_grad
    optimizer.zero_grad = lambda *args, **kw: None if next(model.parameters()).grad is not None else real()
    return program


@case("F37", "two softmaxes before the cross-entropy", "loss_plateau", "vanishing_gradient")
def two_softmaxes(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), 2, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.01, 1.5))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).softmax(-1).softmax(-1), batch[1])

    return supervised(draw, model, digits(), optimizer, loss_of, shows=below(0.6))


@case("F35", "features shuffled, labels not", "loss_plateau", score="apart")
def shuffled(draw: Draw) -> Program:
    (x, y), test = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    model = chain(64, draw.pick("width", 64, 48, 96), 2, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    return supervised(draw, model, ((x[order], y), test), optimizer, class_loss, shows=below(0.3))


@case("F40", "BatchNorm that never updates its statistics", "train_eval_gap")
def stale_statistics(draw: Draw) -> Program:
    model = convnet(draw.pick("channels", 8, 6, 12), momentum=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 1.5))
    return supervised(draw, model, images(), optimizer, class_loss, shows=below(0.8), place=names("1", "5"))


def outgrown(draw: Draw, factor: float, **known) -> Program:
    """Adam on one batch; after a step the loss, and with it the gradient, is larger by a factor."""
    (x, y), _ = digits()
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, betas=(0.9, 0.999))
    at = draw.step("step", 103, 101, 118)
    state = {"step": 0}

    def before(k: int) -> None:
        state["step"] = k

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return class_loss(model, batch) * (factor if state["step"] >= at else 1.0)

    step = plain_step(model, optimizer, itertools.repeat((x[:64], y[:64])), loss_of, before=before)
    return Program(model, optimizer, step, 140, watch={"every": 1}, first=at, **known)


@case("F50", "gradients that outgrow Adam's second moment", "stale_moment")
def long_memory(draw: Draw) -> Program:
    return outgrown(draw, draw.factor("factor", 20.0, 1.3), place=ANY)


healthy = Catalogue("controls: plain networks", healthy=True)


@healthy("V91", "warm-up from zero and cosine decay to zero")
def warmed(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 3e-3, 1.5))
    return scheduled(draw, supervised(draw, model, digits(), optimizer, class_loss, shows=above(0.9)))


@healthy("V99", "Adam's second moment of long memory, gradients that stay")
def steady(draw: Draw) -> Program:
    return outgrown(draw, 1.0)
