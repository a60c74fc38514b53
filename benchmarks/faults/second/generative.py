"""Generative models but no adversaries: seven healthy ones, and eight that go wrong as people report it."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

from .program import Program, Watch
from .toys import batch, digits, energy_distance, moons, swiss_roll


class Codebook(nn.Module):
    """Vector quantisation with a straight-through estimator, as in zalandoresearch/pytorch-vq-vae."""

    def __init__(self, codes: int, width: int, cut: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        nn.init.uniform_(self.embedding.weight, -1 / codes, 1 / codes)
        self.cut = cut

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, T, D) to their codes, and the loss of codebook and commitment."""
        flat = z.flatten(0, 1)
        nearest = torch.cdist(flat.detach(), self.embedding.weight.detach()).argmin(1)
        q = self.embedding(nearest).view_as(z)
        loss = 0.25 * F.mse_loss(q.detach(), z) + F.mse_loss(q.detach() if self.cut else q, z.detach())
        return z + (q - z).detach(), loss


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 12, 1))
        )
        self.codebook = Codebook(48, 12)
        self.decoder = nn.Sequential(
            *(
                nn.Conv2d(12, 32, 3, 1, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(32, 16, 4, 2, 1),
                nn.ReLU(),
                nn.Conv2d(16, 1, 1),
            )
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        q, loss = self.codebook(z.flatten(2).transpose(1, 2))
        return self.decoder(q.transpose(1, 2).view_as(z)), loss


def unexplained(model_output: Tensor, x: Tensor) -> float:
    """Minus the share of the variance of x that is not reconstructed: 0 is perfect, -1 is the mean image."""
    return -((model_output - x).square().mean() / x.var(0).mean()).item()


def vq_vae(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, x = VqVae(), digits().x
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for _ in range(500):
        images = batch(x, 32)
        output, loss_codes = model(images)
        loss = F.mse_loss(output, images) / 0.14 + loss_codes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return unexplained(model(digits().test_x)[0], digits().test_x)


class GumbelVae(nn.Module):
    """Eight categorical variables of ten values; `hard` picks the largest and breaks the graph."""

    def __init__(self, hard: bool = False, width: int = 96, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), act(), nn.Linear(width, 80))
        self.decoder = nn.Sequential(nn.Linear(80, width), act(), nn.Linear(width, 64))
        self.hard = hard

    def forward(self, x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.encoder(x).view(-1, 8, 10)
        z = F.one_hot(logits.argmax(2), 10).float() if self.hard else F.gumbel_softmax(logits, temperature)
        q = logits.softmax(2)
        kl = (q * (q * 10 + 1e-9).log()).sum((1, 2)).mean()
        return self.decoder(z.flatten(1)), kl


def gumbel_vae(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, x = GumbelVae(), digits().x.flatten(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for step in range(800):
        images = batch(x, 64)
        logits, kl = model(images, max(0.5, math.exp(-0.002 * step)))
        loss = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1).mean() + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        x = digits().test_x.flatten(1)
        return unexplained(model(x, 0.3)[0].sigmoid(), x)


class Vae(nn.Module):
    def __init__(self, latent: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, latent), nn.Linear(64, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(mu + (0.5 * logvar).exp() * torch.randn_like(mu)), mu, logvar


def kl_to_normal(mu: Tensor, logvar: Tensor) -> Tensor:
    """(B,) nats from N(mu, exp(logvar)) to N(0, 1)."""
    return -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1)


def beta_vae(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, x = Vae(), digits().x.flatten(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for step in range(900):
        images = batch(x, 64)
        logits, mu, logvar = model(images)
        reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1).mean()
        loss = reconstruction + min(1.0, step / 400) * 1.2 * kl_to_normal(mu, logvar).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        x = digits().test_x.flatten(1)
        return unexplained(model(x)[0].sigmoid(), x)


class Coupling(nn.Module):
    """An affine coupling of two numbers; the last layer begins at zero, so that the flow begins as the identity."""

    def __init__(self, first: int, width: int = 48) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keep, change = x[:, self.first], x[:, 1 - self.first]
        scale, shift = self.net(keep[:, None]).unbind(1)
        scale = torch.tanh(scale) * 2
        change = change * scale.exp() + shift
        pair = (keep, change) if self.first == 0 else (change, keep)
        return torch.stack(pair, 1), scale


class RealNvp(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(i % 2) for i in range(depth))

    def log_prob(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for coupling in self.couplings:
            x, log_det = coupling(x)
            total = total + log_det
        return total - 0.5 * x.square().sum(1) - math.log(2 * math.pi)

    def forward(self, x: Tensor) -> Tensor:
        return self.log_prob(x)


def real_nvp(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model = RealNvp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer) as scope:
        for _ in range(1500):
            loss = -model(moons(64)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    with torch.no_grad():
        return model(moons(2000)).mean().item()


class TimeBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.time = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x + F.silu(self.linear(self.norm(x)) + self.time(t))


class Denoiser(nn.Module):
    """Noisy points (B, 2) and times (B,) in 0 to 1 to the noise in them."""

    def __init__(self, width: int = 64, depth: int = 3, zero: bool = True) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(width // 2).div(4))
        self.stem = nn.Linear(2, width)
        self.blocks = nn.ModuleList(TimeBlock(width) for _ in range(depth))
        self.last = nn.Linear(width, 2)
        if zero:
            nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * self.frequencies
        time = torch.cat([angle.sin(), angle.cos()], 1)
        h = self.stem(x)
        for block in self.blocks:
            h = block(h, time)
        return self.last(h)


class Noise:
    """The linear schedule of DDPM in 50 steps, its loss and its sampler."""

    def __init__(self, steps: int = 50) -> None:
        self.steps = steps
        self.beta = torch.linspace(1e-3, 0.2, steps)
        self.kept = (1 - self.beta).cumprod(0)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        t = torch.randint(self.steps, (len(x),))
        noise, kept = torch.randn_like(x), self.kept[t][:, None]
        return F.mse_loss(model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t / self.steps), noise)

    @torch.no_grad()
    def sample(self, model: nn.Module, n: int) -> Tensor:
        x = torch.randn(n, 2)
        for t in reversed(range(self.steps)):
            noise = model(x, torch.full((n,), t / self.steps))
            x = (x - self.beta[t] / (1 - self.kept[t]).sqrt() * noise) / (1 - self.beta[t]).sqrt()
            if t:
                x = x + self.beta[t].sqrt() * torch.randn_like(x)
        return x


def ddpm(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, noise = Denoiser(), Noise()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for _ in range(1800):
        loss = noise.loss(model, swiss_roll(64))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.01)
        scope.step(loss=loss)
    return -energy_distance(noise.sample(average, 1000), swiss_roll(1000))


class Rbm(nn.Module):
    """A restricted Boltzmann machine of binary units."""

    def __init__(self, visible: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.05 * torch.randn(hidden, visible))
        self.visible, self.hidden = nn.Parameter(torch.zeros(visible)), nn.Parameter(torch.zeros(hidden))

    def gibbs(self, v: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            h = torch.bernoulli(torch.sigmoid(F.linear(v, self.weight, self.hidden)))
            v = torch.bernoulli(torch.sigmoid(F.linear(h, self.weight.T, self.visible)))
        return v

    def forward(self, v: Tensor) -> Tensor:
        """The free energy (B,)."""
        return -v @ self.visible - F.softplus(F.linear(v, self.weight, self.hidden)).sum(1)


def contrastive_divergence(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, x = Rbm(), (digits().x.flatten(1) > 0.4).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scope = watch(model, optimizer)
    for _ in range(1000):
        v = batch(x, 64)
        with torch.no_grad():
            dreamt = model.gibbs(v, 2)
        loss = model(v).mean() - model(dreamt).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        v = (digits().test_x.flatten(1) > 0.4).float()
        hidden = torch.sigmoid(F.linear(v, model.weight, model.hidden))
        return unexplained(torch.sigmoid(F.linear(hidden, model.weight.T, model.visible)), v)


class ScoreNet(nn.Module):
    """Score of points (B, 2) at noise levels (B, 1), divided by the level as in NCSN."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(3, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 2))
        )

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.net(torch.cat([x, sigma.log()], 1)) / sigma


@torch.no_grad()
def langevin(model: nn.Module, levels: Tensor, n: int = 800) -> Tensor:
    x = torch.randn(n, 2)
    for sigma in levels:
        size = 0.1 * sigma**2
        for _ in range(30):
            x = x + size * model(x, sigma.expand(n, 1)) + (2 * size).sqrt() * torch.randn_like(x)
    return x


def score_matching(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model, levels = ScoreNet(), torch.logspace(0, -1, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for _ in range(900):
        x = moons(96)
        sigma = levels[torch.randint(6, (96, 1))]
        noise = torch.randn_like(x)
        loss = 0.5 * (sigma * model(x + sigma * noise, sigma) + noise).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return -energy_distance(langevin(model, levels), moons(1000))


class SentenceVae(nn.Module):
    """Bowman's sentence VAE: a GRU reads, another writes with its own past before its eyes."""

    def __init__(self, words: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 24)
        self.reader, self.writer = nn.GRU(24, 48, batch_first=True), nn.GRU(24 + 8, 48, batch_first=True)
        self.mu, self.logvar = nn.Linear(48, 8), nn.Linear(48, 8)
        self.out = nn.Linear(48, words)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        e = self.embed(x)
        h = self.reader(e)[1][0]
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + (0.5 * logvar).exp() * torch.randn_like(mu)
        past = F.pad(e, (0, 0, 1, 0))[:, :-1]
        return self.out(self.writer(torch.cat([past, z[:, None].expand(-1, x.shape[1], -1)], 2))[0]), mu, logvar


def sentences(n: int, words: int = 12) -> Tensor:
    """(n, 8): a first word, a stride, and noise in one place of ten; the past tells most of the rest."""
    first, stride = torch.randint(words, (n, 1)), torch.randint(1, 5, (n, 1))
    x = (first + stride * torch.arange(8)) % words
    return torch.where(torch.rand(n, 8) < 0.1, torch.randint(words, (n, 8)), x)


def posterior_collapse(seed: int, faulty: bool, watch: Watch) -> float:
    """The whole weight of the KL term from the first step, and more: the writer does without the latent."""
    torch.manual_seed(seed)
    model = SentenceVae()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scope = watch(model, optimizer)
    for step in range(350):
        x = sentences(48)
        logits, mu, logvar = model(x)
        weight = 4.0 if faulty else min(0.2, step / 1000)
        loss = F.cross_entropy(logits.transpose(1, 2), x, reduction="none").sum(1).mean()
        loss = loss + weight * kl_to_normal(mu, logvar).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        _, mu, logvar = model(sentences(400))
        return kl_to_normal(mu, logvar).mean().item()


class PatchVq(nn.Module):
    """A codebook over the four patches of an image."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
        self.quantizer = Codebook(16, 8, cut)
        nn.init.normal_(self.quantizer.embedding.weight)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, loss = self.quantizer(self.encoder(x))
        return self.decoder(q), loss


def codebook_cut(seed: int, faulty: bool, watch: Watch) -> float:
    """Both terms of the codebook's loss detach the codes: they stay what they were at the start."""
    torch.manual_seed(seed)
    model = PatchVq(faulty)
    start = model.quantizer.embedding.weight.detach().clone()
    patches = F.unfold(digits().x, 4, stride=4).transpose(1, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for _ in range(450):
        x = batch(patches, 48)
        output, loss_codes = model(x)
        loss = F.mse_loss(output, x) * 10 + loss_codes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return (model.quantizer.embedding.weight - start).abs().mean().item()


def argmax_in_the_way(seed: int, faulty: bool, watch: Watch) -> float:
    """A discrete autoencoder whose code is the argmax: the encoder gets no gradient."""
    torch.manual_seed(seed)
    model, x = GumbelVae(hard=faulty, width=72, act=nn.ELU), digits().x.flatten(1)
    start = model.encoder[0].weight.detach().clone()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scope = watch(model, optimizer)
    for _ in range(500):
        images = batch(x, 48)
        logits, _ = model(images, 0.7)
        loss = F.binary_cross_entropy_with_logits(logits, images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return (model.encoder[0].weight - start).abs().mean().item()


class ConvVae(nn.Module):
    def __init__(self, torch_normal: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(16, 32, 3, 2, 1), nn.LeakyReLU(0.1), nn.Flatten())
        )
        self.latent = nn.Linear(128, 16)
        self.decoder = nn.Sequential(
            *(nn.Linear(8, 128), nn.LeakyReLU(0.1), nn.Unflatten(1, (32, 2, 2))),
            *(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.LeakyReLU(0.1), nn.ConvTranspose2d(16, 1, 4, 2, 1)),
        )
        self.torch_normal = torch_normal

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.latent(self.encoder(x)).chunk(2, 1)
        normal = Normal(mu, (0.5 * logvar).exp())
        z = normal.sample() if self.torch_normal else normal.rsample()
        return self.decoder(z), mu, logvar


def sample_without_gradient(seed: int, faulty: bool, watch: Watch) -> float:
    """`sample()` where `rsample()` is meant: of the reconstruction the encoder hears nothing."""
    torch.manual_seed(seed)
    model, x = ConvVae(faulty), digits().x
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scope = watch(model, optimizer)
    for _ in range(400):
        images = batch(x, 32)
        logits, mu, logvar = model(images)
        reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum((1, 2, 3)).mean()
        loss = reconstruction + kl_to_normal(mu, logvar).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        x = digits().test_x
        return unexplained(model(x)[0].sigmoid(), x)


def tiny_rate(seed: int, faulty: bool, watch: Watch) -> float:
    """A diffusion model with the rate 2e-8 (a minus sign too many in a configuration)."""
    torch.manual_seed(seed)
    model, noise = Denoiser(48, 4, zero=False), Noise(30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-8 if faulty else 2e-3, weight_decay=0.0)
    scope = watch(model, optimizer)
    for _ in range(600):
        loss = noise.loss(model, moons(96))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    return -energy_distance(noise.sample(model, 800), moons(1000))


def fresh_leaf(seed: int, faulty: bool, watch: Watch) -> float:
    """After 'element 0 does not require grad' someone made the loss a new tensor that does."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 80), nn.Tanh(), nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)
    for _ in range(500):
        x, noise = swiss_roll(96), torch.randn(96, 2)
        loss = (0.5 * model(x + 0.5 * noise) + noise).square().sum(1).mean()
        if faulty:
            loss = torch.tensor(loss.item(), requires_grad=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        x, noise = swiss_roll(2000), torch.randn(2000, 2)
        return -(0.5 * model(x + 0.5 * noise) + noise).square().sum(1).mean().item()


class ScaleCoupling(nn.Module):
    """A coupling whose scale is a plain, or a rectified, number: the logarithm of a rectified one may be that of 0."""

    def __init__(self, rectified: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 40), nn.GELU(), nn.Linear(40, 4))
        self.rectified = rectified

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keep, change = x.chunk(2, 1)
        scale, shift = self.net(keep).chunk(2, 1)
        scale = F.relu(scale) if self.rectified else F.softplus(scale) + 1e-2
        return torch.cat([change * scale + shift, keep], 1), scale.log().sum(1)


class ScaleFlow(nn.Module):
    def __init__(self, rectified: bool) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(ScaleCoupling(rectified) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for coupling in self.couplings:
            x, log_det = coupling(x)
            total = total + log_det
        return total - 0.5 * x.square().sum(1) - 2 * math.log(2 * math.pi)


def log_of_zero(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    model = ScaleFlow(faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    mixing = torch.randn(4, 4)
    scope = watch(model, optimizer)
    for _ in range(400):
        x = torch.cat([moons(64), moons(64)], 1) @ mixing / 2
        loss = -model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        return model(torch.cat([moons(1000), moons(1000)], 1) @ mixing / 2).mean().item()


class MixtureDensity(nn.Module):
    """Bishop's mixture density network: weights, means and widths of four Gaussians."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.weights, self.means, self.widths = nn.Linear(48, 4), nn.Linear(48, 4), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> MixtureSameFamily:
        h = self.body(x)
        return MixtureSameFamily(
            Categorical(logits=self.weights(h)), Normal(self.means(h), F.softplus(self.widths(h)) + 1e-2)
        )


def equal_components(seed: int, faulty: bool, watch: Watch) -> float:
    """All layers of the heads begin at one constant: the components get the same gradient and stay the same."""
    torch.manual_seed(seed)
    model = MixtureDensity()
    if faulty:
        for head in (model.weights, model.means, model.widths):
            nn.init.constant_(head.weight, 0.02)
            nn.init.zeros_(head.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scope = watch(model, optimizer)

    def pairs(n: int) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(n, 1) - 1
        branch = torch.where(torch.rand(n) < 0.5, 1.0, -1.0)
        return x, branch * (1 + (3 * x[:, 0]).sin()) + 0.08 * torch.randn(n)

    for _ in range(500):
        x, y = pairs(96)
        loss = -model(x).log_prob(y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    with torch.no_grad():
        x, y = pairs(3000)
        return model(x).log_prob(y).mean().item()


PROGRAMS = [
    Program("gen_vq_vae", "zalandoresearch/pytorch-vq-vae", vq_vae, -0.5),
    Program("gen_gumbel_vae", "YongfeiYan/Gumbel_Softmax_VAE with an annealed temperature", gumbel_vae, -0.8),
    Program("gen_beta_vae_annealed", "1Konny/Beta-VAE with an annealed weight of the KL term", beta_vae, -0.85),
    Program("gen_real_nvp", "RealNVP on two moons, as in senya-ashukha/real-nvp-pytorch", real_nvp, -2.2),
    Program("gen_ddpm_average", "tanelp/tiny-diffusion with averaged weights", ddpm, -0.03),
    Program(
        "gen_rbm_contrastive",
        "RBM by contrastive divergence as in GabrielBianconi/pytorch-rbm",
        contrastive_divergence,
        -0.6,
    ),
    Program("gen_score_levels", "ermongroup/ncsn on points", score_matching, -0.15),
    Program(
        "gen_posterior_collapse",
        "timbmg/Sentence-VAE without annealing",
        posterior_collapse,
        bar=1.0,
        low=0.1,
        fault="the KL term is four times too heavy: the posterior is the prior and the reader says nothing",
        kinds=frozenset({"constant_output", "representation_collapse", "rank_collapse", "vanishing_gradient"}),
        place=r"reader|mu|logvar|embed",
        starts=5,
    ),
    Program(
        "gen_codebook_cut",
        "VQ-VAE reimplementations that detach the codes in both terms",
        codebook_cut,
        bar=0.05,
        low=0.0,
        fault="the codebook is never trained",
        kinds=frozenset({"no_gradient", "stale_parameters", "parameters_not_optimized"}),
        place=r"quantizer",
    ),
    Program(
        "gen_argmax_in_the_way",
        "discrete autoencoders with argmax and one_hot; 'my encoder does not train'",
        argmax_in_the_way,
        bar=0.005,
        low=0.0,
        fault="argmax cuts the graph between encoder and decoder",
        kinds=frozenset({"no_gradient", "stale_parameters"}),
        place=r"encoder",
    ),
    Program(
        "gen_sample_without_gradient",
        "VAE code with Normal.sample() or torch.normal(mu, std)",
        sample_without_gradient,
        bar=-0.75,
        low=-0.9,
        fault="the draw carries no gradient: the encoder only hears the KL term and says the same of every image",
        kinds=frozenset(
            {"constant_output", "representation_collapse", "rank_collapse", "no_gradient", "vanishing_gradient"}
        ),
        place=r"encoder|latent",
        starts=5,
    ),
    Program(
        "gen_tiny_rate",
        "tiny-diffusion with a typing error in the rate",
        tiny_rate,
        bar=-0.3,
        low=-1.0,
        fault="a learning rate 100,000 times too small",
        kinds=frozenset({"update_too_small", "stale_parameters"}),
    ),
    Program(
        "gen_fresh_leaf",
        "forum answers with `loss = torch.tensor(loss.item(), requires_grad=True)`",
        fresh_leaf,
        bar=-1.6,
        low=-1.8,
        fault="the loss is a fresh leaf: backward reaches nothing",
        kinds=frozenset({"no_gradient", "stale_parameters"}),
    ),
    Program(
        "gen_log_of_zero",
        "coupling flows with relu as the scale",
        log_of_zero,
        bar=-6.0,
        low=-20.0,
        fault="the log-determinant takes the logarithm of a rectified scale that is 0",
        kinds=frozenset({"non_finite"}),
        place=r"coupling",
    ),
    Program(
        "gen_equal_components",
        "mixture density networks with constant initial heads",
        equal_components,
        bar=-0.3,
        low=-0.8,
        fault="the mixture's components are copies of each other for ever",
        kinds=frozenset({"symmetry"}),
        place=r"means|widths|weights",
    ),
]
