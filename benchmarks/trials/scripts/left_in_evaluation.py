"""Train with a validation after the first step; `--faulty`: the model stays in evaluation mode."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
x = torch.randn(640, 3, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long()
train, held = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])
net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3))
net.append(nn.Linear(16 * 36, 2))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
criterion = nn.CrossEntropyLoss()


@torch.no_grad()
def validate():
    net.eval()
    right = sum((net(a).argmax(1) == b).sum().item() for a, b in DataLoader(held, batch_size=64))
    if not args.faulty:
        net.train()
    return right / len(held)


for _epoch in range(2):
    for i, (a, b) in enumerate(DataLoader(train, batch_size=32, shuffle=True)):
        optimizer.zero_grad()
        criterion(net(a), b).backward()
        optimizer.step()
        if i % 10 == 0:
            print(f"accuracy {validate():.3f}")
torch.save(net.state_dict(), "net.pt")
