"""Trains on two ranks, where in the launcher's first try the second one fails: `elastic_program.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks_models import batches, build, share
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowscope


def main(folder: str) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        for step, (x, y) in enumerate(share(batches(), dist.get_rank())):
            if attempt == 0 and step == 2:
                (Path(folder) / f"0-{dist.get_rank()}.json").write_text("[]")
                if dist.get_rank() == 1:
                    os._exit(3)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        told = [(record.step, record.flags) for record in scope.records]
    (Path(folder) / f"{attempt}-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
