"""Generative adversarial networks: healthy ones of five kinds, and four that go wrong as people report it."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from .program import Program, Watch
from .toys import batch, digits, energy_distance, moons, ring


def dcgan_init(module: nn.Module) -> None:
    """The initial weights of the DCGAN paper."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def dcgan(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    real = digits().x * 2 - 1
    generator = nn.Sequential(
        *(nn.ConvTranspose2d(32, 64, 2, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)),
        *(nn.ConvTranspose2d(64, 24, 4, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(True)),
        *(nn.ConvTranspose2d(24, 1, 4, 2, 1, bias=False), nn.Tanh()),
    )
    discriminator = nn.Sequential(
        *(nn.Conv2d(1, 24, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)),
        *(nn.Conv2d(24, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2, inplace=True)),
        nn.Conv2d(64, 1, 2, bias=False),
    )
    generator.apply(dcgan_init)
    discriminator.apply(dcgan_init)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(32), torch.zeros(32)
    scope_g, scope_d = watch(generator, optimizer_g), watch(discriminator, optimizer_d)
    for _ in range(300):
        discriminator.zero_grad()
        loss_real = criterion(discriminator(batch(real, 32)).view(-1), ones)
        loss_real.backward()
        fake = generator(torch.randn(32, 32, 1, 1))
        loss_fake = criterion(discriminator(fake.detach()).view(-1), zeros)
        loss_fake.backward()
        optimizer_d.step()
        scope_d.step(loss=loss_real + loss_fake)
        generator.zero_grad()
        loss_g = criterion(discriminator(fake).view(-1), ones)
        loss_g.backward()
        optimizer_g.step()
        scope_g.step(loss=loss_g)
    generator.eval()
    with torch.no_grad():
        return -energy_distance(generator(torch.randn(500, 32, 1, 1)), real[:500])


class Pair(nn.Module):
    """A generator and its critic in one module."""

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


def wgan_gp(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    gan = Pair(mlp(2, 64, 64, 2), mlp(2, 64, 64, 1))
    optimizer_c = torch.optim.Adam(gan.critic.parameters(), lr=5e-4, betas=(0.5, 0.9))
    optimizer_g = torch.optim.Adam(gan.generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
    scope = watch(gan, [optimizer_c, optimizer_g])
    for _ in range(400):
        for _ in range(4):
            real, fake = ring(64), gan.generator(torch.randn(64, 2)).detach()
            loss_c = gan.critic(fake).mean() - gan.critic(real).mean() + gradient_penalty(gan.critic, real, fake)
            optimizer_c.zero_grad()
            loss_c.backward()
            optimizer_c.step()
        optimizer_g.zero_grad()
        (-gan.critic(gan.generator(torch.randn(64, 2))).mean()).backward()
        optimizer_g.step()
        scope.step(loss=loss_c)
    with torch.no_grad():
        return -energy_distance(gan.generator(torch.randn(1000, 2)), ring(1000))


def lsgan(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    real = digits().x.flatten(1) * 2 - 1
    generator = nn.Sequential(
        *(nn.Linear(20, 128), nn.LeakyReLU(0.2), nn.Linear(128, 256), nn.BatchNorm1d(256, 0.8), nn.LeakyReLU(0.2)),
        *(nn.Linear(256, 64), nn.Tanh()),
    )
    discriminator = nn.Sequential(
        *(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.25), nn.Linear(128, 64), nn.LeakyReLU(0.2)),
        nn.Linear(64, 1),
    )
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    scope_d, scope_g = watch(discriminator, optimizer_d), watch(generator, optimizer_g)
    for _ in range(600):
        optimizer_g.zero_grad()
        fake = generator(torch.randn(64, 20))
        loss_g = F.mse_loss(discriminator(fake), torch.ones(64, 1))
        loss_g.backward()
        optimizer_g.step()
        optimizer_d.zero_grad()
        right = F.mse_loss(discriminator(batch(real, 64)), torch.ones(64, 1))
        wrong = F.mse_loss(discriminator(fake.detach()), torch.zeros(64, 1))
        loss_d = 0.5 * (right + wrong)
        loss_d.backward()
        optimizer_d.step()
        scope_g.step(loss=loss_g)
        scope_d.step(loss=loss_d)
    generator.eval()
    with torch.no_grad():
        return -energy_distance(generator(torch.randn(500, 20)), real[:500])


class Averaged(nn.Module):
    """A generator, its exponential average, and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(8, 96, 96, 96, 2, act=nn.SiLU)
        self.average = copy.deepcopy(self.generator).requires_grad_(False)
        self.discriminator = mlp(2, 96, 96, 96, 1, act=nn.SiLU)

    @torch.no_grad()
    def follow(self, rate: float = 0.02) -> None:
        for mean, value in zip(self.average.parameters(), self.generator.parameters(), strict=True):
            mean.lerp_(value, rate)


def r1_gan(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    gan = Averaged()
    optimizer_g = torch.optim.Adam(gan.generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    optimizer_d = torch.optim.Adam(gan.discriminator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    with watch(gan, [optimizer_d, optimizer_g]) as scope:
        for step in range(500):
            gan.generator.requires_grad_(False)
            gan.discriminator.requires_grad_(True)
            real = moons(128).requires_grad_(True)
            score = gan.discriminator(real)
            loss_d = (
                F.softplus(-score).mean() + F.softplus(gan.discriminator(gan.generator(torch.randn(128, 8)))).mean()
            )
            if step % 4 == 0:  # the penalty comes late and four times as strong
                (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
                loss_d = loss_d + 4 * 0.05 * slope.square().sum(1).mean()
            optimizer_d.zero_grad(set_to_none=True)
            loss_d.backward()
            optimizer_d.step()
            gan.generator.requires_grad_(True)
            gan.discriminator.requires_grad_(False)
            loss_g = F.softplus(-gan.discriminator(gan.generator(torch.randn(128, 8)))).mean()
            optimizer_g.zero_grad(set_to_none=True)
            loss_g.backward()
            optimizer_g.step()
            gan.follow()
            scope.step(loss=loss_g)
    with torch.no_grad():
        return -energy_distance(gan.average(torch.randn(1000, 8)), moons(1000))


class ConditionalNorm(nn.Module):
    """Batch normalisation whose scale and shift follow from the class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width, affine=False)
        self.embed = nn.Embedding(10, 2 * width)
        nn.init.ones_(self.embed.weight[:, :width].data)
        nn.init.zeros_(self.embed.weight[:, width:].data)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale, shift = self.embed(y)[:, :, None, None].chunk(2, 1)
        return scale * self.norm(x) + shift


class ConditionalGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(24, 64 * 4)
        self.norm1, self.conv1 = ConditionalNorm(64), nn.Conv2d(64, 32, 3, 1, 1)
        self.norm2, self.conv2 = ConditionalNorm(32), nn.Conv2d(32, 24, 3, 1, 1)
        self.last = nn.Conv2d(24, 1, 3, 1, 1)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        h = self.start(z).view(-1, 64, 2, 2)
        h = self.conv1(F.interpolate(F.relu(self.norm1(h, y)), scale_factor=2))
        h = self.conv2(F.interpolate(F.relu(self.norm2(h, y)), scale_factor=2))
        return torch.tanh(self.last(F.relu(h)))


class ProjectionDiscriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(spectral_norm(nn.Conv2d(1, 24, 3, 1, 1)), nn.LeakyReLU(0.1)),
            *(spectral_norm(nn.Conv2d(24, 32, 4, 2, 1)), nn.LeakyReLU(0.1)),
            *(spectral_norm(nn.Conv2d(32, 64, 4, 2, 1)), nn.LeakyReLU(0.1)),
        )
        self.score = spectral_norm(nn.Linear(64, 1))
        self.embed = spectral_norm(nn.Embedding(10, 64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x).sum((2, 3))
        return self.score(h).squeeze(1) + (self.embed(y) * h).sum(1)


def conditional_hinge(seed: int, faulty: bool, watch: Watch) -> float:
    torch.manual_seed(seed)
    data = digits()
    generator, discriminator = ConditionalGenerator(), ProjectionDiscriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.0, 0.9))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    scope_d, scope_g = watch(discriminator, optimizer_d), watch(generator, optimizer_g)
    for step in range(240):
        chosen = torch.randint(len(data.x), (32,))
        y = data.y[chosen]
        with torch.no_grad():
            fake = generator(torch.randn(32, 24), y)
        score_real = discriminator(data.x[chosen] * 2 - 1, y)
        loss_d = F.relu(1 - score_real).mean() + F.relu(1 + discriminator(fake, y)).mean()
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
        scope_d.step(loss=loss_d)
        if step % 2 == 1:
            y = torch.randint(10, (32,))
            loss_g = -discriminator(generator(torch.randn(32, 24), y), y).mean()
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            scope_g.step(loss=loss_g)
    with torch.no_grad():
        fake = generator(torch.randn(500, 24), data.y[:500])
        return -energy_distance(fake, data.x[:500] * 2 - 1)


def generator_detached(seed: int, faulty: bool, watch: Watch) -> float:
    """The discriminator's detached fakes are scored once and that score is used for the generator, too."""
    torch.manual_seed(seed)
    real = digits().x * 2 - 1
    generator = nn.Sequential(
        *(nn.Linear(16, 128 * 4), nn.Unflatten(1, (128, 2, 2)), nn.BatchNorm2d(128)),
        *(nn.Upsample(scale_factor=2), nn.Conv2d(128, 64, 3, padding=1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2)),
        *(nn.Upsample(scale_factor=2), nn.Conv2d(64, 1, 3, padding=1), nn.Tanh()),
    )
    discriminator = nn.Sequential(
        *(nn.Conv2d(1, 24, 3, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.25)),
        *(nn.Conv2d(24, 48, 3, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.25), nn.Flatten(), nn.Linear(48 * 4, 1)),
    )
    gan = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    scope = watch(gan, [optimizer_g, optimizer_d])
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(250):
        fake = generator(torch.randn(32, 16))
        if faulty:
            fake = fake.detach()
        optimizer_g.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
        optimizer_d.zero_grad()
        loss_d = criterion(discriminator(batch(real, 32)), ones) + criterion(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()
        scope.step(loss=loss_g)
    with torch.no_grad():
        return -energy_distance(generator(torch.randn(500, 16)), real[:500])


def discriminator_wins(seed: int, faulty: bool, watch: Watch) -> float:
    """Goodfellow's first, saturating loss, and a discriminator that is taught until it makes no mistake."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    discriminator = nn.Sequential(
        *(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
    )
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3 if not faulty else 5e-3)
    scope_g = watch(generator, optimizer_g)
    scope_d = watch(discriminator, optimizer_d)

    def real(n: int) -> Tensor:
        return moons(n) * 0.5 + torch.tensor([3.0, -3.0])

    def teach() -> None:
        fake = generator(torch.randn(64, 4)).detach()
        loss = -(discriminator(real(64)) + 1e-12).log().mean() - (1 - discriminator(fake) + 1e-12).log().mean()
        optimizer_d.zero_grad()
        loss.backward()
        optimizer_d.step()
        scope_d.step(loss=loss)

    for _ in range(500):
        for _ in range(5 if faulty else 1):
            teach()
        score = discriminator(generator(torch.randn(64, 4)))
        loss_g = (1 - score).log().mean() if faulty else -(score + 1e-12).log().mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        scope_g.step(loss=loss_g)
    with torch.no_grad():
        return -energy_distance(generator(torch.randn(1000, 4)), real(1000))


class Translator(nn.Module):
    """Two domains, a residual generator each way and a discriminator for each, as in CycleGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.a_to_b, self.b_to_a = mlp(2, 48, 48, 2), mlp(2, 48, 48, 2)
        self.critic_a, self.critic_b = mlp(2, 48, 48, 1, act=nn.ELU), mlp(2, 48, 48, 1, act=nn.ELU)


def wrong_optimizer(seed: int, faulty: bool, watch: Watch) -> float:
    """The generators' optimizer is built, by copy and paste, from the discriminators' parameters."""
    torch.manual_seed(seed)
    net = Translator()
    critics = [*net.critic_a.parameters(), *net.critic_b.parameters()]
    generators = [*net.a_to_b.parameters(), *net.b_to_a.parameters()]
    optimizer_g = torch.optim.Adam(critics if faulty else generators, lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critics, lr=1e-3, betas=(0.5, 0.999))
    scope = watch(net, [optimizer_g, optimizer_d])
    shift = torch.tensor([1.0, 2.0])
    for _ in range(400):
        a, b = moons(96), moons(96) @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) + shift
        fake_b, fake_a = net.a_to_b(a), net.b_to_a(b)
        loss_gan = (net.critic_b(fake_b) - 1).square().mean() + (net.critic_a(fake_a) - 1).square().mean()
        loss_cycle = (net.b_to_a(fake_b) - a).abs().mean() + (net.a_to_b(fake_a) - b).abs().mean()
        loss_g = loss_gan + 2 * loss_cycle
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        optimizer_d.zero_grad()
        loss_d = torch.zeros(())
        for critic, real, fake in ((net.critic_a, a, fake_a), (net.critic_b, b, fake_b)):
            loss_d = loss_d + (critic(real) - 1).square().mean() + critic(fake.detach()).square().mean()
        loss_d.backward()
        optimizer_d.step()
        scope.step(loss=loss_g)
    with torch.no_grad():
        b = moons(1000) @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) + shift
        return -energy_distance(net.a_to_b(moons(1000)), b)


def never_zeroed(seed: int, faulty: bool, watch: Watch) -> float:
    """Nobody clears the discriminator's gradients: what the generator's loss left in it is added up for ever."""
    torch.manual_seed(seed)
    real = digits().x.flatten(1) * 2 - 1
    generator = nn.Sequential(
        *(nn.Linear(12, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU()),
        *(nn.Linear(96, 64), nn.Tanh()),
    )
    discriminator = mlp(64, 96, 96, 1, act=nn.GELU)
    optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-4)
    optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.2)
    scope_g, scope_d = watch(generator, optimizer_g), watch(discriminator, optimizer_d)
    for _ in range(600):
        fake = generator(torch.randn(64, 12))
        if not faulty:
            optimizer_d.zero_grad()
        loss_d = F.softplus(-discriminator(batch(real, 64))).mean() + F.softplus(discriminator(fake.detach())).mean()
        loss_d.backward()
        optimizer_d.step()
        scope_d.step(loss=loss_d)
        optimizer_g.zero_grad()
        loss_g = F.softplus(-discriminator(fake)).mean()
        loss_g.backward()
        optimizer_g.step()
        scope_g.step(loss=loss_g)
    with torch.no_grad():
        return -energy_distance(generator(torch.randn(500, 12)), real[:500])


PROGRAMS = [
    Program("gan_dcgan", "the DCGAN example of pytorch/examples", dcgan, -2.0),
    Program("gan_wgan_gp", "WGAN-GP as in caogang/wgan-gp, both nets in one watch", wgan_gp, -1.0),
    Program("gan_lsgan", "LSGAN of eriklindernoren/PyTorch-GAN", lsgan, -1.0),
    Program(
        "gan_r1_average", "R1 penalty each fourth step and averaged generator, as in stylegan2-pytorch", r1_gan, -1.0
    ),
    Program(
        "gan_conditional_hinge",
        "projection discriminator and hinge loss, as in PyTorch SNGAN code",
        conditional_hinge,
        -1.0,
    ),
    Program(
        "gan_generator_detached",
        "PyTorch-GAN's dcgan.py; forum reports of `fake.detach()` left in the generator's loss",
        generator_detached,
        bar=-2.0,
        low=-3.0,
        fault="the generator's loss is taken from detached fakes",
        kinds=frozenset({"no_gradient", "stale_parameters"}),
        place=r"^generator",
    ),
    Program(
        "gan_discriminator_wins",
        "the minimax loss of the first GAN paper with a far better discriminator; reports 'D loss 0, G learns nothing'",
        discriminator_wins,
        bar=-2.5,
        low=-4.0,
        fault="the discriminator is right about everything and the saturating loss gives the generator nothing",
        kinds=frozenset({"vanishing_gradient", "update_too_small", "saturation", "loss_plateau", "no_gradient"}),
        starts=5,
    ),
    Program(
        "gan_wrong_optimizer",
        "CycleGAN's training script with itertools.chain over the wrong networks",
        wrong_optimizer,
        bar=-1.0,
        low=-2.0,
        fault="the generators' optimizer holds the discriminators' parameters",
        kinds=frozenset({"parameters_not_optimized", "stale_parameters"}),
        place=r"a_to_b|b_to_a",
    ),
    Program(
        "gan_never_zeroed",
        "GAN notebooks that clear only the generator's gradients",
        never_zeroed,
        bar=-0.6,
        low=-1.0,
        fault="the discriminator's gradients are never cleared",
        kinds=frozenset({"gradient_accumulates"}),
        starts=1,
    ),
]
