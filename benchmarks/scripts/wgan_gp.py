"""After eriklindernoren/PyTorch-GAN wgan_gp.py: five critic steps a generator step, a penalty on the gradient."""

import torch
from torch import nn


def net(*widths, last=None):
    layers = []
    for into, out in zip(widths, widths[1:]):
        layers += [nn.Linear(into, out), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers[:-1], *([last] if last else []))


def ring(size):
    angle = torch.randint(0, 8, (size,)) * (torch.pi / 4)
    return torch.stack((angle.cos(), angle.sin()), 1) + 0.05 * torch.randn(size, 2)


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(len(real), 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    validity = critic(between)
    (gradient,) = torch.autograd.grad(
        validity, between, torch.ones_like(validity), create_graph=True, retain_graph=True, only_inputs=True
    )
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


def main():
    torch.manual_seed(0)
    generator, critic = net(4, 32, 32, 2), net(2, 32, 32, 1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for i in range(500):
        real, noise = ring(64), torch.randn(64, 4)
        optimizer_d.zero_grad()
        fake = generator(noise)
        d_loss = -critic(real).mean() + critic(fake).mean() + 10 * gradient_penalty(critic, real, fake.data)
        d_loss.backward()
        optimizer_d.step()
        print("critic", d_loss.item())
        optimizer_g.zero_grad()
        if i % 5 == 0:
            g_loss = -critic(generator(noise)).mean()
            g_loss.backward()
            optimizer_g.step()
            print("generator", g_loss.item())
    print("figure", fake.norm(dim=1).mean().item())


if __name__ == "__main__":
    main()
