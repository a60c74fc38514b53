"""Programs whose numbers stop being finite, grow, fade or stand still, each beside its healthy twin."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .material import accuracy, digits, minibatches
from .program import Program, Watch


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.hidden2tag = nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden2tag(self.lstm(self.embedding(ids))[0])


def unlabelled_batch(seed: int, faulty: bool, watch: Watch) -> float:
    """Some documents have no tags at all; from step 120 on a batch can consist of such documents only."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scope = watch(model, optimizer)
    right = []
    for step in range(300):
        ids = torch.randint(0, 20, (8, 12), generator=generator)
        tags = torch.where(ids < 5, 1, torch.where(ids.roll(1, 1) < 5, 2, 0))
        labels = tags.clone()
        labels[4:] = -100
        if step >= 120 and step % 40 == 0:
            labels[:] = -100
        logits = model(ids)
        known = (labels >= 0).float()
        each = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="none").view_as(known)
        loss = (each * known).sum() / (known.sum() if faulty else known.sum().clamp(min=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        right.append((logits.argmax(-1) == tags).float().mean().item())
    return sum(right[-30:]) / 30


def logarithm_of_nothing(seed: int, faulty: bool, watch: Watch) -> float:
    """Cross entropy of a sigmoid's probability by hand; sure answers round to 1 and the logarithm of 1 - p to -inf."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 5, generator=generator)
    y = (x[:, 0] + 0.5 * x[:, 1] * x[:, 2] > 0).float()
    x = x * torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0])
    model = nn.Sequential(nn.Linear(5, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(2600, 64, 400, seed):
        p = model(x[rows]).squeeze(1)
        if not faulty:
            p = p.clamp(1e-6, 1 - 1e-6)
        loss = -(y[rows] * p.log() + (1 - y[rows]) * (1 - p).log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        found = model(x[2600:]).squeeze(1)
    return ((found > 0.5) == (y[2600:] > 0.5)).float().mean().item() if found.isfinite().all() else 0.0


class Forecaster(nn.Module):
    """Each series is standardised by its own mean and deviation, then causal convolutions, then scaled back."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.tcn = nn.Sequential(nn.Conv1d(1, 16, 3), nn.GELU(), nn.Conv1d(16, 16, 3, dilation=2), nn.GELU())
        self.fc = nn.Linear(16 * 18, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + self.epsilon
        h = self.tcn(((x - mean) / std).unsqueeze(1))
        return (self.fc(h.flatten(1)) * std + mean).squeeze(1)


def constant_series(seed: int, faulty: bool, watch: Watch) -> float:
    """A sensor that stands still comes up from step 90 on: its deviation is 0."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Forecaster(0.0 if faulty else 1e-5)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    recent = []
    for step in range(300):
        time = torch.arange(25.0) + 20 * torch.rand(32, 1, generator=generator)
        series = torch.sin(time * (0.2 + 0.3 * torch.rand(32, 1, generator=generator))) * 3 + 10
        if step >= 90 and step % 10 == 0:
            series[0] = 4.0
        loss = F.mse_loss(model(series[:, :24]), series[:, 24])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        recent.append(loss.item())
    return -sum(recent[-30:]) / 30


class Siamese(nn.Module):
    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor
        self.cnn = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(256, 12)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        difference = self.fc(self.cnn(a)) - self.fc(self.cnn(b))
        return ((difference**2).sum(1) + self.floor).sqrt()


def root_at_zero(seed: int, faulty: bool, watch: Watch) -> float:
    """Contrastive pairs drawn with replacement: from step 40 on a pair can be an image and itself."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x, y, xt, yt = digits()
    model = Siamese(0.0 if faulty else 1e-6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for step in range(350):
        first = torch.randint(0, len(y), (48,), generator=generator)
        second = torch.where(
            torch.arange(48) % 2 == 0, first.roll(1), torch.randint(0, len(y), (48,), generator=generator)
        )
        if step >= 40 and step % 20 == 0:
            second[0] = first[0]
        else:
            second = torch.where(second == first, (second + 1) % len(y), second)
        same = (y[first] == y[second]).float()
        distance = model(x[first], x[second])
        loss = (same * distance**2 + (1 - same) * F.relu(2 - distance) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        train, test = (model.fc(model.cnn(images)) for images in (x, xt))
    return (y[torch.cdist(test, train).nan_to_num(0).argmin(1)] == yt).float().mean().item()


class Pooler(nn.Module):
    """Attention over the members of a set; the healthy one has a member that is always there."""

    def __init__(self, always: bool, dim: int = 24) -> None:
        super().__init__()
        self.always = always
        self.embed = nn.Linear(3, dim)
        self.score = nn.Linear(dim, 1)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        if self.always:
            x, hidden = F.pad(x, (0, 0, 1, 0)), F.pad(hidden, (1, 0))
        members = self.embed(x)
        weight = self.score(members).squeeze(-1).masked_fill(hidden, -math.inf).softmax(-1)
        return self.head((weight.unsqueeze(-1) * members).sum(1)).squeeze(1)


def everything_masked(seed: int, faulty: bool, watch: Watch) -> float:
    """Baskets of items; from step 60 on one of them can be empty, and its row of the mask hides everything."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Pooler(always=not faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    recent = []
    for step in range(400):
        x = torch.randn(32, 6, 3, generator=generator)
        sizes = torch.randint(1, 7, (32, 1), generator=generator)
        if step >= 60 and step % 15 == 0:
            sizes[5] = 0
        hidden = torch.arange(6) >= sizes
        x = x.masked_fill(hidden.unsqueeze(-1), 0.0)
        y = x[..., 0].sum(1) / sizes.squeeze(1).clamp(min=1)
        loss = F.mse_loss(model(x, hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        recent.append(loss.item())
    return -sum(recent[-40:]) / 40


class Rows(nn.Module):
    """Reads a digit row by row with a transformer of `depth` layers."""

    def __init__(self, depth: int, norm_first: bool, dim: int = 24) -> None:
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.position = nn.Parameter(torch.randn(8, dim) * 0.1)
        layer = nn.TransformerEncoderLayer(dim, 2, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        for parameter in self.encoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.squeeze(1)) + self.position).mean(1))


def deep_post_norm(seed: int, faulty: bool, watch: Watch) -> float:
    """Twelve layers, Adam 2e-3 from the first step, no warm-up; the norm after the sum or before the branch."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = Rows(12, norm_first=not faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 16, 200, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


class PlainBlock(nn.Module):
    def __init__(self, width: int, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x))
        return x + 0.3 * h if self.skip else h


def no_skip(seed: int, faulty: bool, watch: Watch) -> float:
    """Twenty 3x3 convolutions with PyTorch's own initialisation, with or without the skip."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1),
        *(PlainBlock(12, skip=not faulty) for _ in range(20)),
        nn.Flatten(),
        nn.Linear(192, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 24, 250, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


class FixupBlock(nn.Module):
    def __init__(self, dim: int, scale: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)
        nn.init.kaiming_normal_(self.fc1.weight, nonlinearity="relu")
        nn.init.kaiming_normal_(self.fc2.weight, nonlinearity="relu")
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.fc2(F.relu(self.fc1(x)))


def unscaled_branches(seed: int, faulty: bool, watch: Watch) -> float:
    """Sixty residual blocks without any norm; the branches' scale 1 / sqrt(depth) is left out."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    depth = 60
    scale = 1.0 if faulty else 0.5 / math.sqrt(depth)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), *(FixupBlock(32, scale) for _ in range(depth)), nn.Linear(32, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 24, 200, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


class ElmanSum(nn.Module):
    def __init__(self, gain: float, dim: int = 32) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, dim, nonlinearity="relu", batch_first=True)
        self.fc = nn.Linear(dim, 1)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(gain * torch.eye(dim))
            self.rnn.bias_hh_l0.zero_()
            self.rnn.bias_ih_l0.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0][:, -1]).squeeze(1)


def growing_recurrence(seed: int, faulty: bool, watch: Watch) -> float:
    """An IRNN over sixty steps whose recurrent matrix starts at 1.25 times the identity instead of once."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = ElmanSum(1.25 if faulty else 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scope = watch(model, optimizer)
    recent = []
    for _ in range(300):
        x = torch.rand(32, 60, 1, generator=generator)
        y = x.mean((1, 2)) * 4
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        recent.append(loss.item())
    return -sum(recent[-30:]) / 30


def equal_start(seed: int, faulty: bool, watch: Watch) -> float:
    """All weights of a small net start at the same number, as in a hand-made initialisation."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2000, 4, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] * x[:, 3] > 0).long()
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 4))
    if faulty:
        for layer in model[:4]:
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.weight, 0.1)
                nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(1600, 50, 600, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, x[1600:], y[1600:])


def unit_normal_start(seed: int, faulty: bool, watch: Watch) -> float:
    """Six tanh layers whose weights are drawn with deviation 1, whatever their width."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 80), nn.Tanh())
    for _ in range(5):
        model.extend([nn.Linear(80, 80), nn.Tanh()])
    model.append(nn.Linear(80, 10))
    for layer in model[:-1]:
        if isinstance(layer, nn.Linear):
            if faulty:
                nn.init.normal_(layer.weight)
            else:
                nn.init.xavier_normal_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 32, 400, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


def prior_everywhere(seed: int, faulty: bool, watch: Watch) -> float:
    """The focal prior's bias of -4.6 is set on every convolution instead of on the last."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )
    for layer in model if faulty else model[-1:]:
        if isinstance(layer, nn.Conv2d):
            nn.init.constant_(layer.bias, -4.6)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    recent = []
    for _ in range(400):
        heat = (torch.rand(16, 1, 12, 12, generator=generator) < 0.02).float()
        image = F.conv2d(heat, torch.ones(1, 1, 3, 3), padding=1) + 0.3 * torch.randn(
            16, 1, 12, 12, generator=generator
        )
        logits = model(image)
        loss = F.binary_cross_entropy_with_logits(logits, heat, reduction="sum") / heat.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        found = logits.flatten().topk(int(heat.sum().clamp(min=1))).indices
        recent.append(heat.flatten()[found].mean().item())
    return sum(recent[-50:]) / 50


class SkiplessViT(nn.Module):
    """Patches, norm, attention and a projection each layer; `skip` adds what went in."""

    def __init__(self, skip: bool, depth: int = 5, dim: int = 24) -> None:
        super().__init__()
        self.skip = skip
        self.patch = nn.Conv2d(1, dim, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, dim) * 0.1)
        self.attentions = nn.ModuleList([nn.MultiheadAttention(dim, 4, batch_first=True) for _ in range(depth)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim)) for _ in range(depth)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for attention, mlp, norm in zip(self.attentions, self.mlps, self.norms, strict=True):
            n = norm(h)
            a, _ = attention(n, n, n, need_weights=False)
            h = h + a if self.skip else a
            h = h + mlp(h) if self.skip else mlp(h)
        return self.head(h.mean(1))


def skip_forgotten(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = SkiplessViT(skip=not faulty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 24, 200, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


class Highway(nn.Module):
    def __init__(self, dim: int, bias: float) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())
        self.gate = nn.Sequential(nn.Linear(dim, dim), nn.Sigmoid())
        nn.init.constant_(self.gate[0].bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return gate * self.plain(x) + (1 - gate) * x


def closed_gates(seed: int, faulty: bool, watch: Watch) -> float:
    """A highway net whose gates' bias is -20 instead of -2: every layer hands on its input, the net is linear."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 8, generator=generator)
    y = (x[:, :3].prod(1) > 0).long() + 2 * (x[:, 3].abs() > 0.67).long()
    model = nn.Sequential(
        nn.Linear(8, 48), *(Highway(48, -20.0 if faulty else -2.0) for _ in range(6)), nn.Linear(48, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(2500, 64, 500, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, x[2500:], y[2500:])


def clipped_answers(seed: int, faulty: bool, watch: Watch) -> float:
    """A regressor of log densities, all below zero, that ends in the activation of its hidden layers."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2500, 6, generator=generator)
    y = -0.5 - 0.3 * (x**2).sum(1)
    layers = [nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    model = nn.Sequential(*layers, nn.ReLU()) if faulty else nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(2000, 50, 400, seed):
        loss = F.smooth_l1_loss(model(x[rows]).squeeze(1), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        return 1 - (F.mse_loss(model(x[2000:]).squeeze(1), y[2000:]) / y[2000:].var()).item()


def pulled_together(seed: int, faulty: bool, watch: Watch) -> float:
    """Contrastive loss in which the margin of the negatives has the wrong sign: everything is pulled together."""
    torch.manual_seed(seed)
    x, y, xt, _ = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 48, 400, seed):
        z, label = model(x[rows]), y[rows]
        square = ((z[:, None] - z[None]) ** 2).sum(-1)
        same = (label[:, None] == label[None]).float()
        gap = square - 2.0 if faulty else 2.0 - square
        apart = F.relu(gap)
        if faulty:
            apart = apart + 0.1 * square
        loss = (same * square + (1 - same) * apart).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    model.eval()
    with torch.no_grad():
        train, test = model(x), model(xt)
        centres = torch.stack([train[y == digit].mean(0) for digit in range(10)])
        between = (centres - centres.mean(0)).square().sum(1).mean()
        spread = (test - train.mean(0)).square().sum(1).mean()
    return math.log10((between + spread).item() + 1e-12)


def all_pairs(seed: int, faulty: bool, watch: Watch) -> float:
    """Predictions (B, 1) against targets (B,): the difference is (B, B), and the best answer is the mean."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2500, 7, 5, generator=generator)
    y = (x[..., 0] * torch.arange(7)).sum(1) / 10
    model = nn.Sequential(
        nn.Conv1d(5, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(168, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(nn.ModuleList([model]).parameters(), lr=2e-3)

    def score(rows: Tensor) -> Tensor:
        return model(x[rows].transpose(1, 2))

    scope = watch(model, optimizer)
    for rows in minibatches(2000, 64, 400, seed):
        found = score(rows) if faulty else score(rows).squeeze(1)
        loss = ((found - y[rows]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    held = torch.arange(2000, 2500)
    with torch.no_grad():
        return 1 - (F.mse_loss(score(held).squeeze(1), y[held]) / y[held].var()).item()


def normalisation_lags(seed: int, faulty: bool, watch: Watch) -> float:
    """BatchNorm's momentum as another framework counts it: the running statistics hardly leave their start."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    momentum = 1e-4 if faulty else 0.1
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, 2, 1, bias=False),
        nn.BatchNorm2d(24, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, 2, 1, bias=False),
        nn.BatchNorm2d(24, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for step, rows in enumerate(minibatches(len(y), 32, 400, seed)):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        if step % 40 == 39:
            accuracy(model, xt, yt)
    return accuracy(model, xt, yt)


NON_FINITE = frozenset({"non_finite"})
PROGRAMS = [
    Program(
        "unlabelled_batch",
        "token classification: a batch in which every label is -100",
        unlabelled_batch,
        bar=0.9,
        low=0.8,
        fault="0 / 0 labels at step 120",
        kinds=NON_FINITE,
        starts=120,
    ),
    Program(
        "logarithm_of_nothing",
        "binary cross entropy by hand on a sigmoid, without epsilon",
        logarithm_of_nothing,
        bar=0.85,
        low=0.3,
        fault="log(1 - p) where p has rounded to 1",
        kinds=NON_FINITE,
        starts=80,
    ),
    Program(
        "constant_series",
        "forecasting with reversible instance normalisation, epsilon left out",
        constant_series,
        bar=-0.5,
        low=-5.0,
        fault="division by the deviation of a constant series at step 90",
        kinds=NON_FINITE,
        starts=90,
    ),
    Program(
        "root_at_zero",
        "siamese net: euclidean distance by a plain square root",
        root_at_zero,
        bar=0.85,
        low=0.3,
        fault="gradient of sqrt at 0 at step 40",
        kinds=NON_FINITE,
        starts=40,
    ),
    Program(
        "everything_masked",
        "attention pooling over baskets, -inf where there is padding: one basket is empty",
        everything_masked,
        bar=-0.1,
        low=-1.0,
        fault="softmax over nothing at step 60",
        kinds=NON_FINITE,
        starts=60,
    ),
    Program(
        "deep_post_norm",
        "twelve Post-LN layers at a high rate without warm-up",
        deep_post_norm,
        bar=0.55,
        low=0.4,
        fault="Post-LN too deep for its rate: tokens become one, the gradient is lost",
        kinds=frozenset(
            {
                "vanishing_gradient",
                "token_collapse",
                "representation_collapse",
                "rank_collapse",
                "constant_output",
                "loss_plateau",
            }
        ),
        place=r"^encoder",
    ),
    Program(
        "no_skip",
        "plain deep convnet, default initialisation",
        no_skip,
        bar=0.85,
        low=0.3,
        fault="signal and gradient fade over 20 plain layers",
        kinds=frozenset({"vanishing_gradient", "representation_collapse", "constant_output", "loss_plateau"}),
    ),
    Program(
        "unscaled_branches",
        "residual net without norm and without a scale of its branches",
        unscaled_branches,
        bar=0.8,
        low=0.3,
        fault="the sum of 60 full-size branches grows like a power of the depth",
        kinds=frozenset({"exploding_gradient", "activation_headroom", "non_finite"}),
    ),
    Program(
        "growing_recurrence",
        "IRNN with a recurrent gain above one",
        growing_recurrence,
        bar=-0.3,
        low=-0.8,
        fault="1.25 to the 60th: states and gradients explode over the sequence",
        kinds=frozenset({"exploding_gradient", "gradient_spike", "non_finite"}),
    ),
    Program(
        "equal_start",
        "hand-made constant initialisation",
        equal_start,
        bar=0.75,
        low=0.6,
        fault="all units of a layer are copies of each other",
        kinds=frozenset({"symmetry", "rank_collapse"}),
        place=r"^[02]\b",
    ),
    Program(
        "unit_normal_start",
        "weights from randn without a scale, tanh net",
        unit_normal_start,
        bar=0.85,
        low=0.75,
        fault="sums of 80 terms of size one: every tanh is at its end from the start",
        kinds=frozenset({"saturation"}),
    ),
    Program(
        "prior_everywhere",
        "RetinaNet's prior bias set in a loop over all layers",
        prior_everywhere,
        bar=0.6,
        low=0.1,
        fault="ReLUs behind a bias of -4.6 never open",
        kinds=frozenset({"dead_units", "constant_output", "no_gradient"}),
        place=r"^[0-3]\b",
    ),
    Program(
        "skip_forgotten",
        "transformer by hand: x = attn(norm(x)) without the sum",
        skip_forgotten,
        bar=0.5,
        low=0.4,
        fault="five layers of attention without skip: the tokens become one",
        kinds=frozenset({"token_collapse", "rank_collapse", "representation_collapse", "vanishing_gradient"}),
    ),
    Program(
        "closed_gates",
        "highway net, gate bias an order too low",
        closed_gates,
        bar=0.6,
        low=0.45,
        fault="all gates closed: the layers' branches neither act nor learn",
        kinds=frozenset({"gate_saturation", "saturation"}),
        place=r"^[1-6]\b",
    ),
    Program(
        "clipped_answers",
        "ReLU after the last layer of a regressor with negative targets",
        clipped_answers,
        bar=0.8,
        low=0.0,
        fault="the last ReLU closes for every input: answer 0, gradient 0",
        kinds=frozenset({"dead_units", "constant_output", "no_gradient"}),
    ),
    Program(
        "pulled_together",
        "contrastive loss with the margin's sign turned",
        pulled_together,
        bar=0.0,
        low=-1.0,
        fault="all embeddings go to one point",
        kinds=frozenset({"representation_collapse", "constant_output", "rank_collapse"}),
    ),
    Program(
        "all_pairs",
        "forum classic: (B, 1) against (B,)",
        all_pairs,
        bar=0.8,
        low=0.3,
        fault="the loss compares every prediction with every target",
        kinds=frozenset({"constant_output"}),
    ),
    Program(
        "normalisation_lags",
        "port of a model with BatchNorm momentum in the other convention",
        normalisation_lags,
        bar=0.9,
        low=0.7,
        fault="running statistics stay near their start: evaluation is another model",
        kinds=frozenset({"train_eval_gap"}),
    ),
]
