"""After pytorch/examples dcgan: two backward passes for the discriminator, one through it for the generator."""

import torch
from data import patterns
from torch import nn


def weights_init(module):
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self, nz=16, ngf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, ndf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def main():
    torch.manual_seed(0)
    images = patterns(8000, 16)[0].div(2).tanh()
    net_g, net_d = Generator().apply(weights_init), Discriminator().apply(weights_init)
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for real in images.split(16):
        net_d.zero_grad()
        label = torch.ones(len(real))
        err_real = criterion(net_d(real), label)
        err_real.backward()
        fake = net_g(torch.randn(len(real), 16, 1, 1))
        label.fill_(0.0)
        err_fake = criterion(net_d(fake.detach()), label)
        err_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        err_g = criterion(net_d(fake), label)
        err_g.backward()
        optimizer_g.step()
        print("discriminator", (err_real.item() + err_fake.item()) / 2)
        print("generator", err_g.item())
    print("figure", fake.std().item())


if __name__ == "__main__":
    main()
