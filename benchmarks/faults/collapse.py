"""Representations and tokens that cannot be told apart (F24-F26), and outputs that do not depend on the input (F41)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.faults.case import Batch, Catalogue, Draw, Program, Shown, batches, names, plain_step, supervised
from benchmarks.faults.data import diabetes, digits
from benchmarks.faults.models import Decoder, chain, he, square_loss
from benchmarks.faults.transformers import decoder

case = Catalogue("collapse")
REPRESENTATION = ("representation_collapse", "rank_collapse", "constant_output")


class Twin(nn.Module):
    """SimSiam on vectors: encoder with BatchNorm, predictor; returns the loss of two views."""

    def __init__(self, width: int, code: int, *, stop: bool, predictor: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, code),
        )  # fmt: skip
        self.predictor = (
            nn.Sequential(nn.Linear(code, code), nn.ReLU(), nn.Linear(code, code)) if predictor else nn.Identity()
        )
        if stop:
            self.encoder.append(nn.BatchNorm1d(code, affine=False))
        self.stop = stop
        he(self)

    def forward(self, views: tuple[Tensor, Tensor]) -> Tensor:
        z = [self.encoder(view) for view in views]
        p = [self.predictor(one) for one in z]
        target = [one.detach() if self.stop else one for one in z]
        return -(F.cosine_similarity(p[0], target[1]).mean() + F.cosine_similarity(p[1], target[0]).mean()) / 2


def spread(model: Twin) -> float:
    """Mean over features of the standard deviation of normalised codes, times sqrt(D): 1 spread out, 0 collapsed."""
    with torch.no_grad():
        model.eval()
        z = F.normalize(model.encoder(digits()[1][0]), dim=-1)
        model.train()
        return float(z.std(0).mean()) * z.shape[1] ** 0.5


def twin(draw: Draw, *, stop: bool, predictor: bool, steps: int = 300) -> Program:
    """Two noisy views of each digit."""
    model = Twin(draw.pick("width", 64, 48, 96), draw.pick("code", 32, 24, 48), stop=stop, predictor=predictor)
    optimizer = torch.optim.SGD(model.parameters(), lr=draw.factor("lr", 0.1, 1.5), momentum=0.9)
    noise = torch.Generator().manual_seed(draw.seed)
    (x, y), _ = digits()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        views = [batch[0] + 0.2 * torch.randn(batch[0].shape, generator=noise) for _ in range(2)]
        return model(tuple(views))

    step = plain_step(model, optimizer, batches((x, y), 64, draw.seed), loss_of)
    return Program(model, optimizer, step, steps, lambda: spread(model), accuracy=False)


def collapsed(shown: Shown) -> str | None:
    return None if shown.quality < 0.35 else f"codes are spread by {shown.quality:.2f}"


def spread_out(shown: Shown) -> str | None:
    return None if shown.quality > 0.5 else f"codes are spread by {shown.quality:.2f} only"


@case("F24", "self-supervised twin without stop-gradient", *REPRESENTATION)
def twin_collapse(draw: Draw) -> Program:
    program = twin(draw, stop=False, predictor=True)
    program.shows, program.place = collapsed, names("encoder", "predictor") + "|"
    return program


class Auto(nn.Module):
    """Variational autoencoder; `forward(x, noise)` returns reconstruction and KL a sample."""

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))
        self.beta = 1.0
        self.kl = torch.zeros(())

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        out = self.decoder(mean + (log_variance / 2).exp() * noise)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        self.kl = kl.detach()
        return (out - x).square().sum(-1).mean() + self.beta * kl


def autoencoder(draw: Draw, beta: float) -> Program:
    code = draw.pick("code", 8, 6, 12)
    model = Auto(draw.pick("width", 64, 48, 96), code)
    model.beta = beta
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 1e-3, 1.5))
    noise = torch.Generator().manual_seed(draw.seed)

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0], torch.randn(len(batch[0]), code, generator=noise))

    step = plain_step(model, optimizer, batches(digits()[0], 64, draw.seed), loss_of)
    return Program(model, optimizer, step, 400, lambda: float(model.kl), accuracy=False)


@case("F25", "posterior of an autoencoder collapses (beta 30)", *REPRESENTATION)
def posterior_collapse(draw: Draw) -> Program:
    program = autoencoder(draw, draw.factor("beta", 30, 1.5))
    program.shows = lambda shown: None if shown.quality < 0.05 else f"KL {shown.quality:.2g}"
    program.place = names("encoder", "decoder") + "|"
    return program


@case("F26", "attention without residuals and norms", "token_collapse", "rank_collapse")
def bare_attention(draw: Draw) -> Program:
    depth = draw.pick("depth", 6, 5, 8)
    model = Decoder("bare", depth, draw.pick("width", 32, 48))
    std = draw.factor("std", 0.1, 1.2)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
    program = decoder(draw, model, draw.factor("lr", 1e-3, 1.5), 250, 32, place=names("blocks"))
    program.shows = lambda shown: None if shown.last_loss > 2.3 else f"loss {shown.last_loss:.2f}"
    return program


def broadcast_loss(model: nn.Module, batch: Batch) -> Tensor:
    """(B, 1) minus (B,): every prediction is compared with every target."""
    return (model(batch[0]) - batch[1].view(-1)).square().mean()


@case("F41", "targets of another shape are broadcast", "constant_output", score="apart")
def broadcast(draw: Draw) -> Program:
    model = chain(10, draw.pick("width", 64, 48, 96), 2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 3e-3, 1.5))
    program = supervised(
        draw, model, diabetes(), optimizer, broadcast_loss, batch=32, steps=600, r2=True, place=names("4") + "|"
    )
    program.shows = lambda shown: None if shown.quality < 0.15 else f"R2 {shown.quality:.2f}"
    return program


class Clipped(nn.Module):
    """A head that clamps what it returns."""

    def __init__(self, model: nn.Module, low: float) -> None:
        super().__init__()
        self.body, self.low = model, low

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).clamp(min=self.low)


@case("C01", "a clamp above every output", "constant_output", "no_gradient", "vanishing_gradient", "dead_units")
def clamped(draw: Draw) -> Program:
    model = Clipped(chain(10, draw.pick("width", 64, 48, 96), 2, 1), draw.factor("low", 12, 1.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=draw.factor("lr", 3e-3, 1.5))
    program = supervised(draw, model, diabetes(), optimizer, square_loss, batch=32, steps=300, r2=True)
    program.shows = lambda shown: None if shown.quality < 0.1 else f"R2 {shown.quality:.2f}"
    return program


healthy = Catalogue("controls: plain networks", healthy=True)


@healthy("H11", "self-supervised twin with stop-gradient, predictor and norm")
def twin_control(draw: Draw) -> Program:
    program = twin(draw, stop=True, predictor=True)
    program.shows = spread_out
    return program


@healthy("C91", "autoencoder, beta 1")
def autoencoder_control(draw: Draw) -> Program:
    program = autoencoder(draw, draw.factor("beta", 0.5, 1.5))
    program.shows = lambda shown: None if shown.quality > 1 else f"KL {shown.quality:.2g}"
    return program
