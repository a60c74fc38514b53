"""Parameters that no optimizer moves and gradients that do not arrive (F31-F33, F44)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import flowscope
from benchmarks.faults.case import Catalogue, Draw, Program, below, names, plain_step, supervised
from benchmarks.faults.data import digits, images, markov
from benchmarks.faults.models import Decoder, chain, class_loss, convnet, word_loss
from benchmarks.faults.transformers import decoder

case = Catalogue("wiring")


@case("F31", "everything but the norms frozen by mistake, the head too", "no_gradient")
def frozen(draw: Draw) -> Program:
    model = convnet(draw.pick("channels", 8, 6, 12))
    for module in model:
        if not isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=draw.factor("lr", 0.05, 2))
    return supervised(draw, model, images(), optimizer, class_loss, shows=below(0.75))


@case("F32", "the optimizer holds the model before the copy", "stale_parameters")
def stale(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3, 4), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    model = copy.deepcopy(model)
    return stale_step(draw, model, optimizer)


def stale_step(draw: Draw, model: nn.Module, optimizer: torch.optim.Optimizer) -> Program:
    """The usual loop; it calls the model's zero_grad, as the optimizer's does not reach it."""
    program = supervised(draw, model, digits(), optimizer, class_loss, shows=below(0.4))
    optimizer.zero_grad = lambda *args, **kw: model.zero_grad()
    return program


@case("W01", "the optimizer was built before load_state_dict(assign=True)", "stale_parameters")
def assigned(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3, 4), 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-3, 2))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return stale_step(draw, model, optimizer)


class Cut(nn.Module):
    """Passes its input on without its graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@case("F33", "detached after the second layer", "no_gradient")
def detached(draw: Draw) -> Program:
    depth = draw.pick("depth", 4, 3, 5)
    model = chain(64, draw.pick("width", 64, 48, 96), depth, 10)
    cut = draw.pick("cut", 2, 1)
    layers = list(model)
    model = nn.Sequential(*layers[: 2 * cut], Cut(), *layers[2 * cut :])
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    # the last module that gets none: the layer before the cut, or its activation
    place = names(str(2 * cut - 2), str(2 * cut - 1), str(2 * cut))
    return supervised(draw, model, digits(), optimizer, class_loss, steps=200, place=place)


@case("W02", "a decoder detached between two blocks", "no_gradient")
def detached_decoder(draw: Draw) -> Program:
    depth = draw.pick("depth", 6, 4, 8)
    model = Decoder(draw.pick("norm", "pre", "post"), depth)
    cut = draw.pick("cut", 2, 1)
    model.blocks[cut].register_forward_hook(lambda module, args, output: output.detach())
    return decoder(draw, model, draw.factor("lr", 2e-3, 1.5), 80, place=names(rf"blocks\.{cut}"))


class TwoPart(nn.Module):
    """Encoder and decoder; the encoder runs under no_grad where it is `cut`."""

    def __init__(self, width: int, depth: int, *, cut: bool) -> None:
        super().__init__()
        body = list(chain(64, width, depth, width))
        self.encoder = nn.Sequential(*body, nn.ReLU())
        self.decoder = chain(width, width, 2, 10)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        if self.cut:
            with torch.no_grad():
                code = self.encoder(x)
        else:
            code = self.encoder(x)
        return self.decoder(code)


@case("W03", "the encoder runs under no_grad, and is in the optimizer", "no_gradient")
def unlearning_encoder(draw: Draw) -> Program:
    model = TwoPart(draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), cut=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.05, 2))
    return supervised(draw, model, digits(), optimizer, class_loss, steps=200, place=names("encoder"))


@case("W04", "gates added after the optimizer was made", "parameters_not_optimized")
def forgotten_gates(draw: Draw) -> Program:
    model = Decoder(draw.pick("norm", "post", "pre"), draw.pick("depth", 6, 4, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-3, 2))
    flowscope.wrap(model, mode=draw.pick("mode", "keel", "dhc", "highway"))
    step = plain_step(model, optimizer, markov(16, 16, draw.seed), word_loss)
    return Program(model, optimizer, step, 60, place=r".*connection.*")


@case("W05", "a new head that is in no optimizer", "parameters_not_optimized")
def forgotten_head(draw: Draw) -> Program:
    model = chain(64, draw.pick("width", 64, 48, 96), draw.pick("depth", 2, 3), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    head = model[-1]
    model[-1] = nn.Linear(head.in_features, 10)
    return supervised(draw, model, digits(), optimizer, class_loss, steps=200, place=names(str(len(model) - 1)))


class Spare(nn.Module):
    """A model with a layer that is never called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body, self.spare = model, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@case("F44", "a layer that is never called (info only)", "no_gradient", score="apart", varied=False)
def unused(draw: Draw) -> Program:
    model = Spare(chain(64, draw.pick("width", 64, 48, 96), 2, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 2))
    return supervised(draw, model, digits(), optimizer, class_loss, place=names("spare"))
