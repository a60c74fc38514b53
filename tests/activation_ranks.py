"""What two ranks say of hidden states and updates in tests/test_activation_shape.py: each sees a batch of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from watch_models import Stack, data, loss_of, sgd, watched

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Stack())
optimizer = sgd(model)
with watched(model, optimizer) as scope:
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, data(dist.get_rank())).backward()
        optimizer.step()
record = scope.records[0]
names = ("act_absmax", "act_kurtosis", "top_channel_share", "top_channel", "act_headroom", "update_rms")
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps({name: record[name].tolist() for name in names}))
dist.destroy_process_group()
