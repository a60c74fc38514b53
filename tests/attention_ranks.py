"""What two ranks say of attention in tests/test_attention.py: each sees its half of the batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from attention_models import BY_HEAD, NAMES, Stack, data
from torch.nn.parallel import DistributedDataParallel
from watch_models import watched

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Stack())
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
half = data(batch=6)[3 * dist.get_rank() :][:3]
with watched(model, optimizer) as scope:
    for _ in range(3):
        model(half).square().mean().backward()
        optimizer.step()
records = [{name: record[name].tolist() for name in (*NAMES, BY_HEAD)} for record in scope.records]
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(records))
dist.destroy_process_group()
