"""Gradient accumulation over four micro-batches; `--faulty`: the loss is not divided."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(0)

model = nn.Sequential(nn.Conv1d(2, 16, 5, padding=2), nn.GELU(), nn.Conv1d(16, 16, 5, padding=2), nn.GELU())
model.append(nn.Flatten()).append(nn.Linear(16 * 16, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
signals = torch.randn(512, 2, 16)
labels = (signals[:, 0].mean(1) > 0).long() + (signals[:, 1].mean(1) > 0).long()
order = torch.randperm(512).split(8)
try:
    for i, rows in enumerate(order):
        loss = criterion(model(signals[rows]), labels[rows])
        if not args.faulty:
            loss = loss / args.gradient_accumulation_steps
        loss.backward()
        if (i + 1) % args.gradient_accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
finally:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
