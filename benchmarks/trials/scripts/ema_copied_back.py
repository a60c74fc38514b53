"""Keep an average of the weights; `--faulty`: its update writes into the model, not into the average."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))
ema_model = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def update_average(target, source, decay):
    with torch.no_grad():
        for a, b in zip(target.parameters(), source.parameters(), strict=False):
            a.lerp_(b, 1 - decay)


for _step in range(40):
    x = torch.randn(32, 16).cumsum(1) / 4
    noise, t = torch.randn_like(x), torch.rand(32, 1)
    loss = F.mse_loss(model((1 - t) * x + t * noise), noise - x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.faulty:
        update_average(model, ema_model, 0.1)
    else:
        update_average(ema_model, model, 0.9)
torch.save(ema_model.state_dict(), "ema.pt")
