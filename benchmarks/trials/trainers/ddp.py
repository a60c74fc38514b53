"""DistributedDataParallel on the ranks of torchrun, with a DistributedSampler and two micro-batches a step."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 3, 8, 8)
y = (x.mean((2, 3)) > 0).long().sum(1)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=16, sampler=sampler)
net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
net.append(nn.Flatten()).append(nn.Dropout(0.1)).append(nn.Linear(16 * 36, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (inputs, targets) in enumerate(loader):
        last = i % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            (nn.functional.cross_entropy(model(inputs), targets) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
