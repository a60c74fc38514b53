"""One rank of the matrix: `torchrun tests/matrix_ranks.py ddp|fsdp2`; the first rank prints a JSON line per mode."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from matrix_model import BATCH, MODES, batch, make
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import flowscope


def main(strategy: str) -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    rank, size = distributed.get_rank(), distributed.get_world_size()
    rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    for mode in MODES:
        model: nn.Module = make(mode)
        if strategy == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
            for _ in range(2):
                model(**{name: ids[rows] for name, ids in batch().items()})["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            record = scope.records[0]
        if rank == 0:
            labels = record.labels("gradient_product")
            print(
                json.dumps({"mode": mode, "product": record["gradient_product"].tolist(), "labels": labels}), flush=True
            )
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
