"""Classify sounds from spectrograms; `--faulty`: the level is normalised by the loudest sample of the batch."""

import argparse
import atexit

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


class Level(nn.Module):
    def __init__(self, over_batch):
        super().__init__()
        self.over_batch = over_batch

    def forward(self, x):
        peak = x.abs().amax() if self.over_batch else x.abs().amax((1, 2, 3), keepdim=True)
        return x / (peak + 1e-5)


class SoundNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectrum = nn.Conv1d(1, 16, 16, stride=4, bias=False)
        self.level = Level(args.faulty)
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
        self.head = nn.Linear(16, 3)

    def forward(self, wave):
        x = self.level(self.spectrum(wave[:, None]).pow(2)[:, None])
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


t = torch.arange(128) / 8
label = torch.randint(0, 3, (256,))
wave = torch.sin(t * (1 + label[:, None])) + 0.3 * torch.randn(256, 128)
model, criterion = SoundNet(), nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
atexit.register(lambda: torch.save(model.state_dict(), "last.pt"))
for _epoch in range(2):
    for x, y in DataLoader(TensorDataset(wave, label), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
