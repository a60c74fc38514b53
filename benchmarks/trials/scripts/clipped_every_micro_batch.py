"""Accumulate four micro-batches and clip; `--faulty`: clips after each of them, the sum so far."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
table = torch.randn(2000, 20)
classes = (table[:, :5] * 3).argmax(1)
for _step in range(20):
    optimizer.zero_grad()
    for _micro in range(4):
        rows = torch.randint(0, 2000, (16,))
        loss = criterion(model(table[rows]), classes[rows]) / 4
        loss.backward()
        if args.faulty:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if not args.faulty:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
