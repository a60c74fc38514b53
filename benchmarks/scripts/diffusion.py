"""After tutorials on DDPM: a residual net predicts noise at random times, an exponential average is kept beside it."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.time = nn.LayerNorm(width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x, t):
        return x + self.ff(self.norm(x) + self.time(t))


class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.time, self.enter = nn.Sequential(nn.Linear(16, width), nn.SiLU()), nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.leave = nn.Linear(width, 2)

    def forward(self, x, t):
        waves = t[:, None] * torch.exp(torch.linspace(0, 5, 8))
        time = self.time(torch.cat((waves.sin(), waves.cos()), 1))
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, time)
        return self.leave(x)


def main():
    torch.manual_seed(0)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.2, 50), 0)
    model = Denoiser()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    for _ in range(500):
        angle = 3 * torch.rand(64)
        x, t, noise = torch.stack((angle.cos(), angle.sin()), 1), torch.randint(0, 50, (64,)), torch.randn(64, 2)
        share = kept[t][:, None]
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t / 50), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for average, now in zip(ema.parameters(), model.parameters()):
                average.lerp_(now, 0.01)
        print("net", loss.item())
    print("figure", loss.item())


if __name__ == "__main__":
    main()
