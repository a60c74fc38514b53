"""A small adversarial pair; `--faulty`: the discriminator's gradients of the generator's step are never cleared."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.999))
for _step in range(40):
    angle = 6.2832 * torch.rand(64, 1)
    real = torch.cat([angle.cos(), angle.sin()], 1)
    fake = G(torch.randn(64, 8))
    if not args.faulty:
        opt_d.zero_grad()
    loss_d = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
    loss_d.backward()
    opt_d.step()
    if args.faulty:
        opt_d.zero_grad()
    opt_g.zero_grad()
    loss_g = F.softplus(-D(fake)).mean()
    loss_g.backward()
    opt_g.step()
