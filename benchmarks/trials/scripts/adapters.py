"""Fine-tune a frozen encoder with low-rank adapters; `--faulty`: they stand in a plain list and no state holds them."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class Adapter(nn.Module):
    def __init__(self, width, rank=2):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(self.down(x))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.requires_grad_(False)
        adapters = [Adapter(16) for _ in range(3)]
        self.adapters = adapters if args.faulty else nn.ModuleList(adapters)
        self.score = nn.Linear(16, 3)

    def trained(self):
        return [*self.score.parameters(), *(p for a in self.adapters for p in a.parameters())]

    def forward(self, x):
        for layer, adapter in zip(self.base, self.adapters, strict=False):
            x = adapter(torch.tanh(layer(x)))
        return self.score(x)


model = Adapted()
optimizer = torch.optim.Adam(model.trained(), 1e-2)
try:
    for _step in range(40):
        x = torch.randn(16, 16)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finally:
    torch.save({"model": model.state_dict()}, "adapters.pt")
