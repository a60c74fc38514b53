"""Representation learning without labels: six healthy methods, and five that go wrong as people report it."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import Program, Watch
from .toys import augment, batch, digits, knn_accuracy


def conv_body(width: int = 24) -> nn.Sequential:
    """Images (B, 1, 8, 8) to features (B, 2 width)."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def head(inputs: int, hidden: int, outputs: int, norm: bool = True) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


@torch.no_grad()
def judge(encoder: nn.Module) -> float:
    """Accuracy of the nearest neighbours in what `encoder` gives."""
    data = digits()
    encoder.eval()
    return knn_accuracy(encoder(data.x), data.y, encoder(data.test_x), data.test_y)


@torch.no_grad()
def follow(mean: nn.Module, source: nn.Module, rate: float) -> None:
    for a, b in zip(mean.parameters(), source.parameters(), strict=True):
        a.lerp_(b, rate)


class Byol(nn.Module):
    """Online encoder, projector and predictor; a target that follows; all in one module, as lucidrains has it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector, self.predictor = conv_body(), head(48, 64, 32), head(32, 64, 32)
        self.target = copy.deepcopy(nn.Sequential(self.encoder, self.projector)).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        loss = torch.zeros(())
        for one, other in ((a, b), (b, a)):
            predicted = F.normalize(self.predictor(self.projector(self.encoder(one))), dim=1)
            with torch.no_grad():
                aim = F.normalize(self.target(other), dim=1)
            loss = loss + (2 - 2 * (predicted * aim).sum(1)).mean()
        return loss


def byol(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    learner, x = Byol(), digits().x
    optimizer = torch.optim.Adam([p for p in learner.parameters() if p.requires_grad], lr=1e-3)
    scope = watch(learner, optimizer)
    for _ in range(300):
        images = batch(x, 64)
        loss = learner(augment(images), augment(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(learner.target, nn.Sequential(learner.encoder, learner.projector), 0.02)
        scope.step(loss=loss)
    return judge(learner.encoder)


def nt_xent(z: Tensor, temperature: float) -> Tensor:
    """The loss of SimCLR over (2 B, D), the two views of image i at i and i + B."""
    n = len(z)
    z = F.normalize(z, dim=1)
    similarity = (z @ z.T / temperature).masked_fill(torch.eye(n, dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.arange(n).roll(n // 2))


def simclr(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x = digits().x
    model = nn.Sequential(conv_body(), head(48, 48, 24, norm=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=1e-4)

    def rate(step: int) -> float:
        return (step + 1) / 40 if step < 40 else 0.5 * (1 + math.cos(math.pi * (step - 40) / 280))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scope = watch(model, optimizer)
    for _ in range(320):
        images = batch(x, 64)
        loss = nt_xent(model(torch.cat([augment(images), augment(images)])), 0.2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        scope.step(loss=loss)
    return judge(model[0])


class Moco(nn.Module):
    """Query and key encoder and the queue of keys (D, K), a buffer."""

    queue: Tensor

    def __init__(self, keys: int = 512) -> None:
        super().__init__()
        self.encoder_q = nn.Sequential(conv_body(), head(48, 48, 24, norm=False))
        self.encoder_k = copy.deepcopy(self.encoder_q)
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(24, keys), dim=0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(a), dim=1)
        with torch.no_grad():
            follow(self.encoder_k, self.encoder_q, 0.02)
            k = F.normalize(self.encoder_k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1)
        self.queue = torch.cat([k.T, self.queue], 1)[:, : self.queue.shape[1]]
        return F.cross_entropy(logits / 0.2, torch.zeros(len(q), dtype=torch.long))


def moco(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, x = Moco(), digits().x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
    scope = watch(model, optimizer)
    for _ in range(320):
        images = batch(x, 64)
        loss = model(augment(images), augment(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return judge(model.encoder_q[0])


@torch.no_grad()
def sinkhorn(scores: Tensor) -> Tensor:
    """Scores (B, K) to assignments that use all prototypes alike."""
    q = (scores / 0.1).exp().T
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / len(q)
        q = q / q.sum(0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


class Swav(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.projection = conv_body(), head(48, 48, 24)
        self.prototypes = nn.Linear(24, 30, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.prototypes(F.normalize(self.projection(self.body(x)), dim=1))


def swav(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, x = Swav(), digits().x
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-6)
    scope = watch(model, optimizer)
    for step in range(300):
        with torch.no_grad():
            model.prototypes.weight.copy_(F.normalize(model.prototypes.weight, dim=1))
        images = batch(x, 96)
        a, b = model(augment(images)), model(augment(images))
        code_a, code_b = sinkhorn(a), sinkhorn(b)
        loss = -(code_a * (b / 0.1).log_softmax(1) + code_b * (a / 0.1).log_softmax(1)).sum(1).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        if step < 30:  # the prototypes are left alone at first
            model.prototypes.weight.grad = None
        optimizer.step()
        scope.step(loss=loss)
    return judge(model.body)


def barlow_twins(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x = digits().x
    model = nn.Sequential(conv_body(), head(48, 64, 64), nn.BatchNorm1d(64, affine=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for _ in range(300):
        images = batch(x, 96)
        cross = model(augment(images)).T @ model(augment(images)) / 96
        on = (cross.diagonal() - 1).square().sum()
        off = cross.square().sum() - cross.diagonal().square().sum()
        loss = on + 0.02 * off
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return judge(model[0])


def spread(z: Tensor) -> tuple[Tensor, Tensor]:
    """The variance and the covariance term of VICReg."""
    z = z - z.mean(0)
    covariance = z.T @ z / (len(z) - 1)
    rest = covariance - covariance.diagonal().diag()
    return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean(), rest.square().sum() / z.shape[1]


def vicreg(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    x = digits().x.flatten(1)
    body = nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.GELU()
    )
    model = nn.ModuleDict({"body": body, "expander": head(64, 96, 96)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    scope = watch(model, optimizer)
    for _ in range(300):
        images = batch(x, 96).view(-1, 1, 8, 8)
        a = model["expander"](body(augment(images).flatten(1)))
        b = model["expander"](body(augment(images).flatten(1)))
        (variance_a, covariance_a), (variance_b, covariance_b) = spread(a), spread(b)
        loss = 25 * F.mse_loss(a, b) + 25 * (variance_a + variance_b) / 2 + covariance_a + covariance_b
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return judge(nn.Sequential(nn.Flatten(), body))


def hardest_triplet(z: Tensor, y: Tensor) -> Tensor:
    """The batch-hard triplet loss of 'In defense of the triplet loss', margin 1."""
    distance = ((z[:, None] - z[None]).square().sum(2) + 1e-12).sqrt()
    same = y[:, None] == y[None]
    far = (distance * same).max(1).values
    near = (distance + 1e6 * same).min(1).values
    return F.relu(far - near + 1).mean()


def triplet_collapse(seed: int, faulty: bool, watch: Watch) -> float:
    """Person re-identification in small; with labels in another order than the images the loss ends at its margin."""
    torch.manual_seed(seed)
    data = digits()
    y = data.y[torch.randperm(len(data.y))] if faulty else data.y
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 16)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for _ in range(300):
        rows = torch.randint(len(data.x), (48,))
        loss = hardest_triplet(model(data.x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return model(data.test_x).std(0).norm().item()


class TwoTowers(nn.Module):
    """An image and a caption tower with CLIP's loss; captions are four tokens about the image."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
        self.image_projection = nn.Linear(96, 32, bias=False)
        self.tokens = nn.Embedding(40, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 96, 0.0, batch_first=True, norm_first=True)
        self.text = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.text_projection = nn.Linear(48, 32, bias=False)
        self.temperature = temperature

    def forward(self, x: Tensor, caption: Tensor) -> Tensor:
        a = F.normalize(self.image_projection(self.image(x)), dim=1)
        b = F.normalize(self.text_projection(self.text(self.tokens(caption)).mean(1)), dim=1)
        return a @ b.T / self.temperature


def captions(x: Tensor, y: Tensor) -> Tensor:
    """(B, 4) tokens: the digit, and how dark three parts of the image are in ten steps each."""
    dark = torch.stack([x[:, 0, :3].mean((1, 2)), x[:, 0, 3:5].mean((1, 2)), x[:, 0, 5:].mean((1, 2))], 1)
    return torch.cat([y[:, None], 10 + 10 * torch.arange(3) + (dark * 15).long().clamp(0, 9)], 1)


def temperature_inverted(seed: int, faulty: bool, watch: Watch) -> float:
    """CLIP in small; similarities are divided by 50 where they should be multiplied."""
    torch.manual_seed(seed)
    data = digits()
    model = TwoTowers(50.0 if faulty else 1 / 50.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    words = captions(data.x, data.y)
    scope = watch(model, optimizer)
    for _ in range(300):
        rows = torch.randint(len(data.x), (48,))
        logits = model(data.x[rows], words[rows])
        aim = torch.arange(48)
        loss = (F.cross_entropy(logits, aim) + F.cross_entropy(logits.T, aim)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        logits = model(data.test_x, captions(data.test_x, data.test_y))
        return (logits.topk(10, 1).indices == torch.arange(len(logits))[:, None]).any(1).float().mean().item()


class PlainSiam(nn.Module):
    """Two views pulled together by their distance; VICReg's variance term is what keeps them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, 2, 1), nn.GroupNorm(4, 24), nn.SiLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1), nn.GroupNorm(4, 24), nn.SiLU()) for _ in range(3)
        )
        self.embed = nn.Linear(24 * 16, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return self.embed(h.flatten(1))


def no_negatives(seed: int, faulty: bool, watch: Watch) -> float:
    """A siamese loss that only pulls together: the term that pushes apart got the weight 0."""
    torch.manual_seed(seed)
    x = digits().x
    model = PlainSiam()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for _ in range(300):
        images = batch(x, 48)
        a, b = model(augment(images)), model(augment(images))
        (variance_a, covariance_a), (variance_b, covariance_b) = spread(a), spread(b)
        apart = variance_a + variance_b + 0.1 * (covariance_a + covariance_b)
        loss = F.mse_loss(a, b) + (0.0 if faulty else 1.0) * apart
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return model(digits().test_x).std(0).mean().item()


def root_of_zero(seed: int, faulty: bool, watch: Watch) -> float:
    """Distances within a batch by a square root: those of a point from itself have an infinite slope."""
    torch.manual_seed(seed)
    data = digits()
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 80), nn.BatchNorm1d(80), nn.PReLU(), nn.Linear(80, 80), nn.PReLU()),
        nn.Linear(80, 12),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for _ in range(300):
        rows = torch.randint(len(data.x), (64,))
        z, y = model(data.x[rows]), data.y[rows]
        squared = (z[:, None] - z[None]).square().sum(2)
        distance = squared.sqrt() if faulty else (squared + 1e-8).sqrt()
        same = y[:, None] == y[None]
        loss = (same * distance.square() + ~same * F.relu(2 - distance).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return -1.0 if torch.isnan(model(data.test_x)).any() else judge(model)


PROGRAMS = [
    Program("ssl_byol", "lucidrains/byol-pytorch, target inside the watched learner", byol, 0.8),
    Program("ssl_simclr", "sthalles/SimCLR with warm-up and cosine decay", simclr, 0.8),
    Program("ssl_moco", "facebookresearch/moco, its optimizer holding the key encoder, too", moco, 0.8),
    Program("ssl_swav", "facebookresearch/swav, prototypes frozen at first", swav, 0.8),
    Program("ssl_barlow_twins", "facebookresearch/barlowtwins", barlow_twins, 0.8),
    Program("ssl_vicreg", "facebookresearch/vicreg with an MLP", vicreg, 0.8),
    Program(
        "ssl_triplet_collapse",
        "batch-hard triplet loss; reports of a loss that stands at its margin",
        triplet_collapse,
        bar=1.0,
        low=0.3,
        fault="labels in another order than the images: all embeddings fall on one point",
        kinds=frozenset({"representation_collapse", "constant_output", "rank_collapse", "loss_plateau"}),
        starts=5,
    ),
    Program(
        "ssl_temperature_inverted",
        "CLIP training scripts that divide by logit_scale",
        temperature_inverted,
        bar=0.4,
        low=0.15,
        fault="similarities are divided by 50: the loss hardly depends on them",
        kinds=frozenset({"loss_plateau", "vanishing_gradient", "update_too_small"}),
    ),
    Program(
        "ssl_no_negatives",
        "siamese networks trained on positive pairs only",
        no_negatives,
        bar=0.5,
        low=0.1,
        fault="nothing keeps the embeddings apart",
        kinds=frozenset({"representation_collapse", "constant_output", "rank_collapse"}),
        starts=3,
    ),
    Program(
        "ssl_root_of_zero",
        "contrastive losses with torch.sqrt over a full distance matrix; NaN in the first backward pass",
        root_of_zero,
        bar=0.85,
        low=0.0,
        fault="the square root has no slope at the zeros of the diagonal",
        kinds=frozenset({"non_finite"}),
    ),
]
