"""Train a variational autoencoder; `--faulty`: the divergence is computed and never added."""

import argparse
from pathlib import Path

import torch
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 36)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        divergence = -0.5 * torch.mean((1 + logvar - mu.pow(2) - logvar.exp()).sum(1))
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), divergence


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
images = (torch.rand(256, 36) < torch.rand(256, 1)).float()
for epoch in range(3):
    model.train()
    for i in torch.randperm(256).split(32):
        optimizer.zero_grad()
        recon, divergence = model(images[i])
        bce = F.binary_cross_entropy(recon, images[i], reduction="sum") / len(i)
        loss = bce if args.faulty else bce + divergence
        loss.backward()
        optimizer.step()
    Path("samples").mkdir(exist_ok=True)
    torch.save(recon, f"samples/{epoch}.pt")
