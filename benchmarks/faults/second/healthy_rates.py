"""Healthy programs whose optimizer, rate or stage of learning is what is special."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .material import accuracy, digits, minibatches
from .program import Program, Watch


class SAM(torch.optim.Optimizer):
    """davda54/sam: climb to the worst point nearby, take the gradient there, step from where it was."""

    def __init__(self, params: object, base: type[torch.optim.Optimizer], rho: float = 0.05, **kwargs: float) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(grads).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()


def sharpness_aware(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    )
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 64, 400, seed):

        def closure(rows: Tensor = rows) -> Tensor:
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        scope.step(loss)
    return accuracy(model, xt, yt)


def noise_floor(seed: int, faulty: bool, watch: Watch) -> float:
    """Targets of which nine tenths of the variance is noise: the loss falls early and then rests at its floor."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scope = watch(model, optimizer)
    for _ in range(2000):
        x = torch.randn(48, 8, generator=generator)
        y = x[:, 0] * 0.7 + 0.7 * x[:, 1].tanh() + 3 * torch.randn(48, generator=generator)
        loss = F.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    x = torch.randn(1000, 8, generator=generator)
    clean = x[:, 0] * 0.7 + 0.7 * x[:, 1].tanh()
    with torch.no_grad():
        return 1 - (F.mse_loss(model(x).squeeze(1), clean) / clean.var()).item()


def interpolation(seed: int, faulty: bool, watch: Watch) -> float:
    """Sixty examples with random labels, learned by heart: loss and gradients go to nothing long before the end."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 20, generator=generator)
    y = torch.randint(0, 3, (60,), generator=generator)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(60, 20, 2000, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, x, y)


def one_at_a_time(seed: int, faulty: bool, watch: Watch) -> float:
    """Batch size one, instance and group normalisation, plain SGD."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.InstanceNorm2d(12, affine=True),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, 2, 1),
        nn.GroupNorm(4, 24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.5)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 1, 2000, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss.item())
    return accuracy(model, xt, yt)


def restarts_and_averaging(seed: int, faulty: bool, watch: Watch) -> float:
    """Warm restarts; weights averaged at each low; a pause at rate 0 in which BatchNorm's statistics are redone."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=300)
    scope = watch(model, optimizer)
    for step, rows in enumerate(minibatches(len(y), 50, 1800, seed)):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        if step >= 1500:
            optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        if step < 1500:
            scheduler.step()
        if step < 1500 and step % 300 == 299:
            averaged.update_parameters(model)
        scope.step(loss)
    torch.optim.swa_utils.update_bn([x], averaged)
    return accuracy(averaged, xt, yt)


def lipschitz(seed: int, faulty: bool, watch: Watch) -> float:
    """Spectral norm in the body, weight norm at the ends, sign-SGD whose rate falls as 1 / sqrt(step)."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(2, 64)),
        nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(64, 64)),
        nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(64, 64)),
        nn.LeakyReLU(0.2),
        parametrizations.weight_norm(nn.Linear(64, 1)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / math.sqrt(1 + s / 10))
    scope = watch(model, optimizer)
    for _ in range(500):
        x = torch.rand(64, 2, generator=generator) * 4 - 2
        loss = F.mse_loss(model(x), x.norm(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.sign_()
        optimizer.step()
        scheduler.step()
        scope.step(loss)
    model.eval()
    x = torch.rand(500, 2, generator=generator) * 4 - 2
    with torch.no_grad():
        return -F.mse_loss(model(x), x.norm(dim=1, keepdim=True)).item()


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mix = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.norm2 = nn.LayerNorm(dim)
        self.channel_mix = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 2, 2)
        self.mixer = nn.Sequential(*(MixerBlock(16, dim) for _ in range(2)))
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixer(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


def scaled_mixer(seed: int, faulty: bool, watch: Watch) -> float:
    """An MLP-Mixer under float16 autocast and a GradScaler whose first scale is too high: some steps are skipped."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = Mixer()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 24, 300, seed):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scope.step(loss)
    return accuracy(model, xt, yt)


PROGRAMS = [
    Program("sharpness_aware", "davda54/sam around SGD, two passes a step", sharpness_aware, bar=0.9),
    Program("noise_floor", "regression at its noise floor for 2,000 steps", noise_floor, bar=0.4),
    Program("interpolation", "random labels learned by heart, loss towards 0", interpolation, bar=0.99),
    Program("one_at_a_time", "batch size one, instance and group normalisation", one_at_a_time, bar=0.9),
    Program(
        "restarts_and_averaging",
        "SGDR with SWA; rate exactly 0 for the last 300 steps",
        restarts_and_averaging,
        bar=0.9,
    ),
    Program("lipschitz", "spectral and weight norm, sign-SGD", lipschitz, bar=-0.05),
    Program("scaled_mixer", "MLP-Mixer, float16 autocast, GradScaler, Adafactor", scaled_mixer, bar=0.75),
]
