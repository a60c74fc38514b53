"""Healthy networks, the listed ones and more: each must be silent above info."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.faults.case import (
    Batch,
    Catalogue,
    Draw,
    Program,
    above,
    batches,
    plain_step,
    r2_of,
    supervised,
)
from benchmarks.faults.data import adding, blobs, circles, diabetes, digits, images
from benchmarks.faults.gradients import ResidualChain
from benchmarks.faults.models import LastState, chain, class_loss, convnet, square_loss
from benchmarks.faults.wiring import TwoPart

case = Catalogue("controls: plain networks", healthy=True)


@case("H01", "digits, MLP, SGD")
def plain(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=above(0.9))


@case("H02", "digits, GELU, AdamW")
def gelu(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10, nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 2e-3, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=above(0.93))


@case("H03", "digits, convnet, momentum")
def conv(draw: Draw) -> Program:
    model = convnet(draw.pick("channels", 8, 6, 12), norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 1.5), momentum=0.9)
    return supervised(draw, model, images(), optimizer, class_loss, shows=above(0.93))


@case("H04", "digits, convnet, BatchNorm, dropout, AdamW")
def conv_norm(draw: Draw) -> Program:
    model = convnet(draw.pick("channels", 8, 6, 12), dropout=draw.pick("dropout", 0.3, 0.2, 0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 3e-3, 1.5))
    return supervised(draw, model, images(), optimizer, class_loss, shows=above(0.93))


@case("H05", "circles, ReLU, AdamW")
def rings(draw: Draw) -> Program:
    model = chain(2, draw.pick("width", 32, 24, 48), draw.pick("depth", 2, 3), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-2, 1.5))
    return supervised(draw, model, circles(), optimizer, class_loss, shows=above(0.8))


@case("H07", "diabetes, small, weight decay")
def regression(draw: Draw) -> Program:
    model = chain(10, draw.pick("width", 16, 12, 24), 1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 3e-3, 1.3), weight_decay=0.3)
    return supervised(draw, model, diabetes(), optimizer, square_loss, batch=32, r2=True, shows=above(0.15))


class PreNorm(nn.Module):
    """x + fc2(relu(fc1(norm(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


@case("H10", "twelve pre-norm residual blocks")
def residual(draw: Draw) -> Program:
    width = draw.pick("width", 48, 32, 64)
    model = ResidualChain(width, [PreNorm(width) for _ in range(draw.pick("depth", 12, 8, 16))])
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=above(0.9))


@case("H13", "body frozen on purpose, head trained")
def frozen_body(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 96, 128), 2, 10)
    model[:-1].requires_grad_(False)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=draw.factor("lr", 0.1, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=above(0.8))


@case("H15", "gradient accumulation over four batches")
def accumulation(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 1.5))
    program = supervised(draw, model, digits(), optimizer, class_loss, steps=300, shows=above(0.9))
    data, parts = batches(digits()[0], 16, draw.seed), draw.pick("parts", 4, 2, 8)

    def step(k: int) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for _ in range(parts):
            loss = class_loss(model, next(data)) / parts
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return sum(losses)

    program.step = step
    return program


@case("H17", "loss summed instead of averaged")
def summed(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 1.5) / 64)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return supervised(draw, model, digits(), optimizer, loss_of, shows=above(0.9))


@case("H18", "loss times 1e-5, Adam")
def tiny_loss(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    scale = draw.factor("scale", 1e-5, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=draw.factor("lr", 2e-3, 1.5), eps=1e-12)
    return supervised(draw, model, digits(), optimizer, lambda m, b: scale * class_loss(m, b), shows=above(0.9))


class Bag(nn.Module):
    """Rounded pixels as words of their own place: an embedding of which a step sees a part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64 * 17, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        bright = x.topk(4, dim=1).indices
        words = bright * 17 + (16 * x.gather(1, bright)).round().long()
        return self.head(torch.relu(self.embed(words).sum(1)))


@case("H19", "embedding of which most rows get no gradient")
def embedding(draw: Draw) -> Program:
    model = Bag(draw.pick("width", 32, 24, 48))
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-2, 1.3))
    return supervised(draw, model, digits(), optimizer, class_loss, batch=16, steps=600, shows=above(0.45))


@case("K01", "LSTM on the adding problem")
def lstm(draw: Draw) -> Program:
    model = LastState(draw.pick("width", 24, 16, 32), "lstm")
    length = draw.pick("length", 12, 10, 14)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-2, 1.3))
    step = plain_step(model, optimizer, adding(32, length, draw.seed), square_loss)
    return Program(model, optimizer, step, 300, r2_of(model, next(adding(200, length, 99))), accuracy=False)


@case("K02", "large batch")
def large_batch(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 3e-3, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, batch=700, steps=150, shows=above(0.9))


@case("K03", "batches of four, noisy")
def small_batch(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.02, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, batch=4, steps=800, shows=above(0.85))


@case("K04", "encoder and decoder, both trained")
def two_parts(draw: Draw) -> Program:
    model = TwoPart(draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), cut=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=above(0.9))


@case("K05", "clipped to 1, momentum, weight decay")
def clipped(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=draw.factor("lr", 0.05, 1.5), momentum=0.9, weight_decay=draw.pick("decay", 1e-3, 1e-2)
    )

    def clip(k: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return supervised(draw, model, digits(), optimizer, class_loss, after_backward=clip, shows=above(0.9))


@case("K06", "trained until nothing is left to learn")
def converged(draw: Draw) -> Program:
    model = chain(2, draw.pick("width", 32, 24, 48), draw.pick("depth", 1, 2), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-2, 1.5))
    return supervised(draw, model, blobs(), optimizer, class_loss, steps=1000, shows=above(0.85))


@case("K07", "bfloat16 autocast")
def autocast(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 2e-3, 1.5))

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        return F.cross_entropy(out.float(), batch[1])

    return supervised(draw, model, digits(), optimizer, loss_of, shows=above(0.9))


@case("K08", "tanh chain, Xavier")
def tanh(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 48, 32, 64), draw.pick("depth", 4, 3, 5), 10, nn.Tanh)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 1.5))
    return supervised(draw, model, digits(), optimizer, class_loss, shows=above(0.9))


@case("K09", "rare positives")
def imbalanced(draw: Draw) -> Program:
    (x, y), (xt, yt) = digits()
    split = (x, (y == 8).float().view(-1, 1)), (xt, (yt == 8).float().view(-1, 1))
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 2e-3, 1.5))
    return supervised(draw, model, split, optimizer, class_loss, shows=above(0.93))


@case("K10", "frozen BatchNorm in evaluation mode, fine-tuned")
def frozen_norm(draw: Draw) -> Program:
    model = convnet(draw.pick("channels", 8, 6, 12))
    first = torch.optim.SGD(model.parameters(), lr=0.05)
    step = plain_step(model, first, batches(images()[0], 64, draw.seed + 50), class_loss)
    for k in range(40):
        step(k)
    model.zero_grad()
    norms = [module for module in model if isinstance(module, nn.BatchNorm2d)]
    for module in norms:
        module.eval().requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=draw.factor("lr", 0.05, 1.5))
    program = supervised(draw, model, images(), optimizer, class_loss, steps=200, shows=above(0.85))
    measure = program.quality

    def quality() -> float:
        value = measure()
        for module in norms:
            module.eval()
        return value

    program.quality = quality
    return program


@case("K11", "wide ReLU layer, half of it off")
def wide(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 512, 256, 384), draw.pick("depth", 2, 1), 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-3, 1.5), weight_decay=0.1)
    return supervised(draw, model, digits(), optimizer, class_loss, steps=250, shows=above(0.93))
