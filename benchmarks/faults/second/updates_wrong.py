"""Programs whose updates are wrong in size, order or content, each beside its healthy twin."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from .healthy_images import BasicBlock, discs, double_conv
from .healthy_language import GPT, CharLSTM
from .healthy_rates import Mixer
from .material import ALPHABET, accuracy, digits, minibatches, text, windows
from .program import Program, Watch

V = len(ALPHABET)


class Sentiment(nn.Module):
    """A GRU over eight rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 32, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.gru(x.squeeze(1))[0][:, -1]))


def whole_number_warmup(seed: int, faulty: bool, watch: Watch) -> float:
    """A warm-up over 1,000 steps that is computed with //: the rate is 0 until the 1,000th."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = Sentiment()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    warmup = 1000
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) // warmup if faulty else (step + 1) / warmup)
    )
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 32, 500, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


class SmallResNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            BasicBlock(1, 8), BasicBlock(8, 16, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
        )


def decay_each_batch(seed: int, faulty: bool, watch: Watch) -> float:
    """A decay of 0.8 that is meant for each epoch is applied after each batch."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = SmallResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    scope = watch(model, optimizer)
    for step, rows in enumerate(minibatches(len(y), 32, 400, seed)):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if faulty or step % 43 == 42:
            scheduler.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


def gradients_kept(seed: int, faulty: bool, watch: Watch) -> float:
    """`zero_grad` is missing: each step is taken along the sum of all gradients so far."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 32, 400, seed):
        if not faulty:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


class Wide(nn.Module):
    """Wide and deep: a linear part beside an embedding net."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(20, 1)
        self.table = nn.Embedding(30, 8)
        self.deep = nn.Sequential(nn.Linear(28, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return (self.wide(x) + self.deep(torch.cat([x, self.table(kind)], dim=1))).squeeze(1)


def zeroed_before_step(seed: int, faulty: bool, watch: Watch) -> float:
    """`zero_grad` stands between `backward` and `step`."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 20, generator=generator)
    kind = torch.randint(0, 30, (3000,), generator=generator)
    y = x[:, 0] - x[:, 1] + torch.randn(30, generator=generator)[kind]
    model = Wide()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(2600, 64, 500, seed):
        loss = F.mse_loss(model(x[rows], kind[rows]), y[rows])
        if not faulty:
            optimizer.zero_grad()
        loss.backward()
        if faulty:
            optimizer.zero_grad()
        optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        return 1 - (F.mse_loss(model(x[2600:], kind[2600:]), y[2600:]) / y[2600:].var()).item()


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(192, 12))
        self.decoder = nn.Sequential(
            nn.Linear(12, 192), nn.ELU(), nn.Unflatten(1, (12, 4, 4)), nn.ConvTranspose2d(12, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def step_not_called(seed: int, faulty: bool, watch: Watch) -> float:
    """`optimizer.step` without its parentheses."""
    torch.manual_seed(seed)
    x, _, xt, _ = digits()
    model = Autoencoder()
    optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(x), 48, 400, seed):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), x[rows])
        loss.backward()
        if faulty:
            optimizer.step  # noqa: B018
        else:
            optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        return 1 - (F.mse_loss(model(xt), xt) / xt.var()).item()


def clipped_to_nothing(seed: int, faulty: bool, watch: Watch) -> float:
    """A clip of 1e-6 where 1.0 was meant, with SGD: a character LSTM."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = CharLSTM(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    scope = watch(model, optimizer)
    losses = []
    for _ in range(300):
        ids = windows(25, 16, generator).t()
        output, _ = model(ids[:-1], (torch.zeros(2, 16, 32), torch.zeros(2, 16, 32)))
        loss = F.cross_entropy(output.flatten(0, 1), ids[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6 if faulty else 1.0)
        optimizer.step()
        scope.step(loss)
        losses.append(loss.item())
    return -sum(losses[-30:]) / 30


def clipped_while_scaled(seed: int, faulty: bool, watch: Watch) -> float:
    """The gradients are clipped to 1 while they still carry the scaler's 65,536; `unscale_` was left out."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = Mixer(24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 24, 300, seed):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if not faulty:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scope.step(loss)
    return accuracy(model, xt, yt)


def underflow(seed: int, faulty: bool, watch: Watch) -> float:
    """Float16 autocast without a scaler; the loss is averaged twice, over pixels and tiles, so gradients round to 0."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(double_conv(1, 8), nn.Conv2d(8, 1, 3, padding=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-16)
    scaler = torch.amp.GradScaler("cpu", enabled=not faulty)
    scope = watch(model, optimizer)
    recent = []
    for _ in range(120):
        image, mask = discs(4, 16, 0.2, generator)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(image)
            loss = F.binary_cross_entropy_with_logits(logits, mask) / mask.numel() / 64
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scope.step(loss)
        found = logits > 0
        union = (found | mask.bool()).sum().clamp(min=1)
        recent.append(((found & mask.bool()).sum() / union).item())
    return sum(recent[-30:]) / 30


def rate_too_high(seed: int, faulty: bool, watch: Watch) -> float:
    """AdamW at 0.3 instead of 0.003 on a small decoder."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(V, 32, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3 if faulty else 0.003)
    scope = watch(model, optimizer)
    losses = []
    for _ in range(200):
        ids = windows(33, 12, generator)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        losses.append(loss.item())
    return -sum(losses[-30:]) / 30


def rate_too_low(seed: int, faulty: bool, watch: Watch) -> float:
    """A rate for Adam, and a thousandth of it: 3e-6 from a scheduler's table in percent, on an audio-like convnet."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 16, 9, 2, 4),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Conv1d(16, 24, 9, 4, 4),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-6 if faulty else 3e-3)
    scope = watch(model, optimizer)
    right = []
    for _ in range(350):
        label = torch.randint(0, 5, (32,), generator=generator)
        phase = 6.3 * torch.rand(32, 1, generator=generator)
        wave = torch.sin(torch.arange(96) * (0.15 + 0.1 * label[:, None]) + phase)
        wave = wave + 0.6 * torch.randn(32, 96, generator=generator)
        logits = model(wave.unsqueeze(1))
        loss = F.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        right.append((logits.argmax(1) == label).float().mean().item())
    return sum(right[-40:]) / 40


def decay_of_ten(seed: int, faulty: bool, watch: Watch) -> float:
    """Adam with weight_decay=10 instead of 1e-4: the weights are pulled to 0 faster than anything is learned."""
    torch.manual_seed(seed)
    bunch = load_breast_cancer()
    x = torch.tensor(bunch.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(bunch.target)
    model = nn.Sequential(nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=10.0 if faulty else 1e-4)
    scope = watch(model, optimizer)
    for rows in minibatches(450, 45, 500, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, x[450:], y[450:])


def broken_record(seed: int, faulty: bool, watch: Watch) -> float:
    """One batch in the middle of the run has its targets in another unit, a thousand times too large; no clip."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scope = watch(model, optimizer)
    for step in range(400):
        x = torch.randn(48, 8, generator=generator)
        y = x[:, 0].sin() + x[:, 1] * x[:, 2]
        if faulty and step == 300:
            y = y * 1000
        loss = F.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    x = torch.randn(1000, 8, generator=generator)
    y = x[:, 0].sin() + x[:, 1] * x[:, 2]
    with torch.no_grad():
        return 1 - (F.mse_loss(model(x).squeeze(1), y) / y.var()).item()


class Mixture(nn.Module):
    """Top-1 mixture of four linear experts, Switch style."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)) for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probability = self.router(x).softmax(-1)
        best, chosen = probability.max(-1)
        out = x.new_zeros(len(x))
        for i, expert in enumerate(self.experts):
            rows = chosen == i
            if rows.any():
                out[rows] = best[rows] * expert(x[rows]).squeeze(-1)
        balance = 4 * (F.one_hot(chosen, 4).float().mean(0) * probability.mean(0)).sum()
        return out, balance


def balance_turned(seed: int, faulty: bool, watch: Watch) -> float:
    """The load-balancing loss is subtracted instead of added; the figure is the smallest expert's share."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for _ in range(500):
        x = torch.randn(64, 6, generator=generator)
        y = torch.where(x[:, 0] > 0, x[:, 1], -x[:, 1]) * torch.where(x[:, 2] > 0, 1.0, 0.3)
        out, balance = model(x)
        loss = F.mse_loss(out, y) + (-0.3 if faulty else 0.3) * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        chosen = model.router(torch.randn(4000, 6, generator=generator)).argmax(-1)
    return torch.bincount(chosen, minlength=4).min().item() / 4000


def worker_not_heard(seed: int, faulty: bool, watch: Watch) -> float:
    """Steps on `model` while a worker's copy makes the gradients; the loop forgets to hand them over."""
    torch.manual_seed(seed)
    data = text()
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Embedding(V, 16), nn.Flatten(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, V))
    worker = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    losses = []
    for _ in range(500):
        starts = torch.randint(0, len(data) - 7, (48, 1), generator=generator) + torch.arange(7)
        worker.load_state_dict(model.state_dict())
        rows = data[starts]
        half = rows[:24]
        if faulty:
            loss = F.cross_entropy(worker(rows[:, :6]), rows[:, 6])
            loss.backward()
        else:
            loss = F.cross_entropy(worker(rows[24:, :6]), rows[24:, 6])
            loss.backward()
            for mine, theirs in zip(model.parameters(), worker.parameters(), strict=True):
                mine.grad = theirs.grad
            F.cross_entropy(model(half[:, :6]), half[:, 6]).backward()
        optimizer.step()
        optimizer.zero_grad()
        worker.zero_grad()
        scope.step(loss)
        losses.append(loss.item())
    return -sum(losses[-40:]) / 40


STILL = frozenset({"update_too_small", "stale_parameters"})
PROGRAMS = [
    Program(
        "whole_number_warmup",
        "LambdaLR with integer division",
        whole_number_warmup,
        bar=0.85,
        low=0.3,
        fault="the rate is 0 in every step of the run",
        kinds=STILL,
    ),
    Program(
        "decay_each_batch",
        "ExponentialLR stepped per batch instead of per epoch",
        decay_each_batch,
        bar=0.85,
        low=0.6,
        fault="after 60 steps the rate is a millionth of what it was",
        kinds=STILL,
        starts=30,
    ),
    Program(
        "gradients_kept",
        "forum classic: zero_grad forgotten",
        gradients_kept,
        bar=0.85,
        low=0.8,
        fault="gradients add up over all steps",
        kinds=frozenset({"gradient_accumulates"}),
    ),
    Program(
        "zeroed_before_step",
        "wide-and-deep tables: zero_grad after backward, before step",
        zeroed_before_step,
        bar=0.8,
        low=0.3,
        fault="the optimizer never sees a gradient",
        kinds=STILL | {"no_gradient"},
    ),
    Program(
        "step_not_called",
        "optimizer.step without parentheses, autoencoder",
        step_not_called,
        bar=0.6,
        low=0.1,
        fault="no step is ever taken",
        kinds=STILL,
    ),
    Program(
        "clipped_to_nothing",
        "character LSTM with a clip of 1e-6",
        clipped_to_nothing,
        bar=-1.8,
        low=-2.5,
        fault="every gradient is cut to a norm of a millionth",
        kinds=frozenset({"over_clipped", "update_too_small"}),
    ),
    Program(
        "clipped_while_scaled",
        "GradScaler: clip_grad_norm_ without unscale_",
        clipped_while_scaled,
        bar=0.75,
        low=0.4,
        fault="the clip acts on gradients 65,536 times too large, the step is that much too small",
        kinds=frozenset({"over_clipped", "update_too_small"}),
    ),
    Program(
        "underflow",
        "float16 autocast without GradScaler, loss averaged twice",
        underflow,
        bar=0.45,
        low=0.35,
        fault="gradients below float16's smallest number are 0",
        kinds=frozenset({"no_gradient", "vanishing_gradient", "stale_parameters", "update_too_small"}),
    ),
    Program(
        "rate_too_high",
        "AdamW at a hundred times its rate, decoder",
        rate_too_high,
        bar=-1.5,
        low=-2.0,
        fault="every update is as large as the weights",
        kinds=frozenset({"update_too_large", "loss_spike"}),
    ),
    Program(
        "rate_too_low",
        "Adam at a thousandth of its rate, convolutions over waves",
        rate_too_low,
        bar=0.85,
        low=0.5,
        fault="updates a thousand times too small",
        kinds=frozenset({"update_too_small"}),
    ),
    Program(
        "decay_of_ten",
        "Adam's weight_decay as if it were a coefficient of something else",
        decay_of_ten,
        bar=0.92,
        low=0.85,
        fault="weights decay to 0: one answer for every input",
        kinds=frozenset({"constant_output", "representation_collapse", "loss_plateau", "vanishing_gradient"}),
    ),
    Program(
        "broken_record",
        "one batch in another unit",
        broken_record,
        bar=0.6,
        low=0.3,
        fault="targets a thousand times too large at step 300 throw the weights away",
        kinds=frozenset({"loss_spike", "exploding_gradient", "gradient_spike", "update_too_large", "non_finite"}),
        starts=300,
    ),
    Program(
        "balance_turned",
        "Switch-like mixture, balance loss with the wrong sign",
        balance_turned,
        bar=0.1,
        low=0.05,
        fault="the router sends everything to one expert",
        kinds=frozenset({"expert_collapse"}),
    ),
    Program(
        "worker_not_heard",
        "parameter server by hand (A3C): gradients of the worker's copy are not handed over",
        worker_not_heard,
        bar=-1.2,
        low=-2.5,
        fault="the model that is stepped never gets a gradient",
        kinds=STILL | {"no_gradient", "parameters_not_optimized"},
    ),
]
