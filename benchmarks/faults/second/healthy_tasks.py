"""Healthy programs of other tasks: fields and equations, graphs and sets, metric, count and ranked targets, tables."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes, make_moons
from torch import Tensor, nn

from .material import accuracy, digits, minibatches
from .program import Program, Watch


class Sine(nn.Module):
    def __init__(self, inputs: int, outputs: int, first: bool = False, omega: float = 30.0) -> None:
        super().__init__()
        self.omega = omega
        self.linear = nn.Linear(inputs, outputs)
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega * self.linear(x))


def siren(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    axis = torch.linspace(-1, 1, 32)
    grid = torch.cartesian_prod(axis, axis)
    image = torch.sin(9 * grid[:, :1]) * torch.cos(14 * grid[:, 1:]) + (grid.norm(dim=1, keepdim=True) < 0.5).float()
    net = nn.Sequential(Sine(2, 48, first=True), Sine(48, 48), Sine(48, 48), nn.Linear(48, 1))
    bound = math.sqrt(6 / 48) / 30
    nn.init.uniform_(net[-1].weight, -bound, bound)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-4)
    scope = watch(net, optimizer)
    for _ in range(400):
        loss = ((net(grid) - image) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        return 10 * math.log10(image.var().item() / F.mse_loss(net(grid), image).item())


def physics_informed(seed: int, faulty: bool, watch: Watch) -> float:
    """Solves u'' = -pi^2 sin(pi x), u(0) = u(1) = 0: residual by autograd.grad, boundary as a second term."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    edge = torch.tensor([[0.0], [1.0]])
    scope = watch(net, optimizer)
    for _ in range(1500):
        x = torch.rand(32, 1, generator=generator).requires_grad_()
        u = net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        loss = ((ddu + math.pi**2 * torch.sin(math.pi * x)) ** 2).mean() + 10 * (net(edge) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        scope.step(loss)
    x = torch.linspace(0, 1, 50).unsqueeze(1)
    with torch.no_grad():
        return -(net(x) - torch.sin(math.pi * x)).abs().max().item()


class EulerODE(nn.Module):
    def __init__(self, dim: int = 16, steps: int = 12) -> None:
        super().__init__()
        self.lift = nn.Linear(2, dim)
        self.field = nn.Sequential(nn.Linear(dim + 1, 32), nn.Tanh(), nn.Linear(32, dim))
        self.readout = nn.Linear(dim, 2)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        for i in range(self.steps):
            time = h.new_full((len(h), 1), i / self.steps)
            h = h + self.field(torch.cat([h, time], dim=1)) / self.steps
        return self.readout(h)


def neural_ode(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    points, labels = make_moons(600, noise=0.1, random_state=seed)
    x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
    model = EulerODE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(400, 50, 500, seed):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, x[400:], y[400:])


class SetBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mab = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ln0 = nn.LayerNorm(dim)
        self.fc_o = nn.Linear(dim, dim)
        self.ln1 = nn.LayerNorm(dim)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        h = self.ln0(query + self.mab(query, keys, keys, need_weights=False)[0])
        return self.ln1(h + F.relu(self.fc_o(h)))


class SetTransformer(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(1, dim)
        self.enc = nn.ModuleList([SetBlock(dim), SetBlock(dim)])
        self.seed = nn.Parameter(torch.randn(1, 1, dim))
        self.pool = SetBlock(dim)
        self.dec = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.enc:
            h = block(h, h)
        return self.dec(self.pool(self.seed.expand(len(h), -1, -1), h)[:, 0])


def set_transformer(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = SetTransformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    recent = []
    for _ in range(320):
        n = int(torch.randint(3, 10, (), generator=generator))
        x = torch.rand(32, n, 1, generator=generator) * 10
        loss = (model(x) - x.amax(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
        recent.append(loss.item())
    return -sum(recent[-50:]) / 50


class GCN(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gc1 = nn.Linear(features, hidden, bias=False)
        self.gc2 = nn.Linear(hidden, classes, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.relu(torch.sparse.mm(adjacency, self.gc1(x)))
        x = F.dropout(x, 0.5, self.training)
        return torch.sparse.mm(adjacency, self.gc2(x))


def graph(seed: int, faulty: bool, watch: Watch) -> float:
    """Four communities of 100 nodes, weak features, 20 labels a community, the whole graph in each step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(400) % 4
    same = y[:, None] == y[None]
    edges = torch.rand(400, 400, generator=generator) < torch.where(same, 0.06, 0.006)
    edges = (edges | edges.t()).float().fill_diagonal_(1)
    scale = edges.sum(1).rsqrt()
    adjacency = (scale[:, None] * edges * scale[None]).to_sparse()
    x = torch.randn(400, 50, generator=generator) + 0.5 * torch.randn(4, 50, generator=generator)[y]
    model = GCN(50, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    scope = watch(model, optimizer)
    for _ in range(300):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(model(x, adjacency)[:80], dim=1), y[:80])
        loss.backward()
        optimizer.step()
        scope.step(loss)
    model.eval()
    with torch.no_grad():
        return (model(x, adjacency)[80:].argmax(1) == y[80:]).float().mean().item()


class Embedder(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, 32), nn.PReLU())
        self.fc = nn.Linear(32, dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.fc(self.features(x)), dim=1)


def triplet_hard(seed: int, faulty: bool, watch: Watch) -> float:
    """In defence of the triplet loss: batch-hard mining; once every triplet is good the loss is 0 for many batches."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 40, 500, seed):
        z, label = model(x[rows]), y[rows]
        distance = torch.cdist(z, z)
        same = label[:, None] == label[None]
        furthest = distance.masked_fill(~same, -1).amax(1)
        nearest = distance.masked_fill(same, 9).amin(1)
        loss = F.relu(furthest - nearest + 0.2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        nearest = torch.cdist(model(xt), model(x)).argmin(1)
    return (y[nearest] == yt).float().mean().item()


def rare_labels(seed: int, faulty: bool, watch: Watch) -> float:
    """Thirty labels of which each is on in about 2 % of the rows; focal loss, bias at the prior."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 40, generator=generator)
    score = x @ torch.randn(40, 30, generator=generator) / 40**0.5
    y = (score > 2.05).float()
    model = nn.Sequential(
        nn.Linear(40, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 30)
    )
    nn.init.constant_(model[-1].bias, -math.log(0.98 / 0.02))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(2500, 64, 600, seed):
        logits = model(x[rows])
        bce = F.binary_cross_entropy_with_logits(logits, y[rows], reduction="none")
        missed = (logits.sigmoid() - y[rows]).abs()
        loss = (missed**2 * bce).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    model.eval()
    with torch.no_grad():
        found = model(x[2500:])
    cut = found.flatten().topk(int(y[2500:].sum())).values[-1]
    return y[2500:][found >= cut].mean().item()


def quantiles(seed: int, faulty: bool, watch: Watch) -> float:
    """Pinball loss at three levels; Student-t targets with two degrees of freedom, so single targets are huge."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(4000, 3, generator=generator) * 2 - 1
    tail = torch.randn(4000, generator=generator) / (-torch.rand(4000, generator=generator).log()).sqrt()
    y = 2 * torch.sin(3 * x[:, 0]) + x[:, 1] + 0.5 * tail
    levels = torch.tensor([0.1, 0.5, 0.9])
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 800)
    scope = watch(model, optimizer)
    for rows in minibatches(3500, 64, 800, seed):
        error = y[rows, None] - model(x[rows])
        loss = torch.maximum(levels * error, (levels - 1) * error).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        scope.step(loss)
    with torch.no_grad():
        below = (y[3500:, None] < model(x[3500:])).float().mean(0)
    return -(below - levels).abs().max().item()


class MixtureDensity(nn.Module):
    def __init__(self, components: int = 4) -> None:
        super().__init__()
        self.z_h = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.z_pi = nn.Linear(32, components)
        self.z_mu = nn.Linear(32, components)
        self.z_sigma = nn.Linear(32, components)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.z_h(x)
        return F.log_softmax(self.z_pi(h), -1), self.z_mu(h), self.z_sigma(h).clamp(-4, 4)


def mixture_density(seed: int, faulty: bool, watch: Watch) -> float:
    """The inverse sine: several answers for one input; the spread depends on the input."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    y = torch.rand(2000, 1, generator=generator) * 4 - 2
    x = y + torch.sin(4 * y) * 0.9 + 0.1 * torch.randn(2000, 1, generator=generator)
    model = MixtureDensity()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scope = watch(model, optimizer)

    def negative_log_likelihood(x: Tensor, y: Tensor) -> Tensor:
        log_pi, mu, log_sigma = model(x)
        inside = log_pi - 0.5 * ((y - mu) / log_sigma.exp()) ** 2 - log_sigma - 0.5 * math.log(2 * math.pi)
        return -inside.logsumexp(-1).mean()

    for rows in minibatches(1800, 100, 700, seed):
        loss = negative_log_likelihood(x[rows], y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    with torch.no_grad():
        return -negative_log_likelihood(x[1800:], y[1800:]).item()


def heteroscedastic(seed: int, faulty: bool, watch: Watch) -> float:
    """Mean and log variance of the diabetes set's target, beta-NLL; the variance sits at the noise of the data."""
    torch.manual_seed(seed)
    bunch = load_diabetes()
    x = torch.tensor(bunch.data, dtype=torch.float32) * 20
    y = torch.tensor((bunch.target - 152) / 77, dtype=torch.float32)
    trunk = nn.Sequential(nn.Linear(10, 32), nn.ELU(), nn.Dropout(0.2))
    model = nn.ModuleDict({"trunk": trunk, "mean": nn.Linear(32, 1), "log_var": nn.Linear(32, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scope = watch(model, optimizer)

    def heads(x: Tensor) -> tuple[Tensor, Tensor]:
        h = model["trunk"](x)
        return model["mean"](h).squeeze(-1), model["log_var"](h).squeeze(-1)

    for rows in minibatches(360, 36, 700, seed):
        mean, log_var = heads(x[rows])
        nll = 0.5 * (log_var + (y[rows] - mean) ** 2 / log_var.exp())
        loss = (nll * log_var.exp().detach() ** 0.5).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    model.eval()
    with torch.no_grad():
        mean, _ = heads(x[360:])
    return 1 - (F.mse_loss(mean, y[360:]) / y[360:].var()).item()


def ordinal(seed: int, faulty: bool, watch: Watch) -> float:
    """CORAL: one shared score and ordered thresholds; five grades."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2000, 12, generator=generator)
    score = x[:, 0] + x[:, 1] * x[:, 2] + 0.3 * torch.randn(2000, generator=generator)
    y = torch.bucketize(score, torch.tensor([-1.5, -0.5, 0.5, 1.5]))
    model = nn.Sequential(
        nn.Linear(12, 64),
        nn.BatchNorm1d(64),
        nn.LeakyReLU(),
        nn.Linear(64, 64),
        nn.LeakyReLU(),
        nn.Linear(64, 1, bias=False),
    )
    cuts = nn.Parameter(torch.tensor([1.5, 0.5, -0.5, -1.5]))
    model.register_parameter("cuts", cuts)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
    scope = watch(model, optimizer)
    for rows in minibatches(1700, 50, 500, seed):
        above = (y[rows, None] > torch.arange(4)).float()
        loss = F.binary_cross_entropy_with_logits(model(x[rows]) + cuts, above)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    model.eval()
    with torch.no_grad():
        grade = (model(x[1700:]) + cuts > 0).sum(1)
    return -(grade - y[1700:]).abs().float().mean().item()


def probabilities(seed: int, faulty: bool, watch: Watch) -> float:
    """A softmax as the last module and the log likelihood by hand, with an epsilon in the logarithm."""
    torch.manual_seed(seed)
    x, y, xt, yt = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10), nn.Softmax(dim=1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for rows in minibatches(len(y), 32, 500, seed):
        probability = model(x[rows])
        loss = -(probability[torch.arange(len(rows)), y[rows]] + 1e-8).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss)
    return accuracy(model, xt, yt)


class Tabular(nn.Module):
    def __init__(self, sizes: list[int], numbers: int) -> None:
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(size, min(8, (size + 1) // 2)) for size in sizes])
        self.bn_cont = nn.BatchNorm1d(numbers)
        width = sum(embed.embedding_dim for embed in self.embeds) + numbers
        self.layers = nn.Sequential(
            nn.Linear(width, 64),
            nn.ReLU(),
            nn.BatchNorm1d(64),
            nn.Dropout(0.1),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        parts = [embed(categories[:, i]) for i, embed in enumerate(self.embeds)]
        return self.layers(torch.cat([*parts, self.bn_cont(numbers)], dim=1)).squeeze(-1)


class Lookahead:
    """Slow weights: every k steps of the inner optimizer half way towards the fast ones (arXiv 1907.08610)."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for group in self.inner.param_groups for p in group["params"]]
            with torch.no_grad():
                for p, slow in zip(fast, self.slow, strict=True):
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)


def tabular(seed: int, faulty: bool, watch: Watch) -> float:
    """The tabular model of fastai; the categories are skewed so that many rows of the tables are rarely seen."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    n = 3000
    categories = torch.stack([(torch.rand(n, generator=generator) ** 3 * size).long() for size in (3, 40, 400)], dim=1)
    numbers = torch.randn(n, 4, generator=generator) * torch.tensor([1.0, 100.0, 0.01, 5.0])
    effects = [torch.randn(size, generator=generator) for size in (3, 40, 400)]
    y = sum(effect[categories[:, i]] for i, effect in enumerate(effects)) + numbers[:, 0] * numbers[:, 3] / 5
    model = Tabular([3, 40, 400], 4)
    optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
    ahead = Lookahead(optimizer)
    scope = watch(model, optimizer)
    for rows in minibatches(2600, 100, 500, seed):
        loss = F.mse_loss(model(categories[rows], numbers[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        ahead.step()
        scope.step(loss)
    model.eval()
    with torch.no_grad():
        return 1 - (F.mse_loss(model(categories[2600:], numbers[2600:]), y[2600:]) / y[2600:].var()).item()


class TwoTower(nn.Module):
    def __init__(self, users: int, items: int, dim: int = 8) -> None:
        super().__init__()
        self.user = nn.Embedding(users, dim, sparse=True)
        self.item = nn.Embedding(items, dim, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, 1))
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        u, i = self.user(users), self.item(items)
        return (u * i).sum(1) + self.mlp(torch.cat([u, i], dim=1)).squeeze(1)


def recommender(seed: int, faulty: bool, watch: Watch) -> float:
    """A hundred thousand users with sparse gradients; only 300 of them are ever active."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    users = torch.randint(0, 300, (12_000,), generator=generator) * 331
    items = (torch.rand(12_000, generator=generator) ** 2 * 200).long()
    taste = torch.randn(100_000, 2, generator=generator)
    kind = torch.randn(200, 2, generator=generator)
    y = ((taste[users] * kind[items]).sum(1) > 0).float()
    model = TwoTower(100_000, 5000)
    sparse = torch.optim.SparseAdam([model.user.weight, model.item.weight], lr=1e-2)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=3e-3)
    scope = watch(model, [sparse, dense])
    for rows in minibatches(11_000, 128, 500, seed):
        loss = F.binary_cross_entropy_with_logits(model(users[rows], items[rows]), y[rows])
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        scope.step(loss)
    with torch.no_grad():
        return ((model(users[11_000:], items[11_000:]) > 0) == (y[11_000:] > 0)).float().mean().item()


def lbfgs(seed: int, faulty: bool, watch: Watch) -> float:
    """Full-batch LBFGS with a strong Wolfe search: several evaluations of the closure a step."""
    torch.manual_seed(seed)
    bunch = load_breast_cancer()
    x = torch.tensor(bunch.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(bunch.target, dtype=torch.float32)
    model = nn.Sequential(nn.Linear(30, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    scope = watch(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = 1e-3 * sum((p**2).sum() for p in model.parameters())
        loss = F.binary_cross_entropy_with_logits(model(x[:450]).squeeze(1), y[:450]) + penalty
        loss.backward()
        return loss

    for _ in range(60):
        loss = optimizer.step(closure)
        scope.step(loss)
    with torch.no_grad():
        return ((model(x[450:]).squeeze(1) > 0) == (y[450:] > 0)).float().mean().item()


PROGRAMS = [
    Program("siren", "vsitzmann/siren: fits an image", siren, bar=15.0),
    Program(
        "physics_informed",
        "PINN of Poisson's equation, second derivatives by autograd.grad",
        physics_informed,
        bar=-0.05,
    ),
    Program("neural_ode", "neural ODE by Euler steps, half moons", neural_ode, bar=0.95),
    Program("set_transformer", "juho-lee/set_transformer: max of a set", set_transformer, bar=-1.0),
    Program("graph", "tkipf/pygcn: semi-supervised, whole graph a step", graph, bar=0.8),
    Program("triplet_hard", "batch-hard triplet loss whose triplets run out", triplet_hard, bar=0.9),
    Program("rare_labels", "multi-label with rare positives, focal loss", rare_labels, bar=0.5),
    Program("quantiles", "quantile regression of heavy-tailed targets", quantiles, bar=-0.08),
    Program("mixture_density", "hardmaru's mixture density network", mixture_density, bar=0.0),
    Program("heteroscedastic", "mean and variance heads, beta-NLL", heteroscedastic, bar=0.3),
    Program("ordinal", "CORAL ordinal regression, Adagrad", ordinal, bar=-0.5),
    Program("probabilities", "softmax module and likelihood by hand", probabilities, bar=0.85),
    Program("tabular", "fastai tabular: embeddings and numbers, RAdam with Lookahead", tabular, bar=0.6),
    Program("recommender", "two towers, sparse embeddings, SparseAdam and Adam", recommender, bar=0.75),
    Program("lbfgs", "LBFGS with a closure on a small classifier", lbfgs, bar=0.93),
]
