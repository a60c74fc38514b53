"""What each of two ranks does in tests/test_flows_ranks.py: `flows_ranks_program.py FOLDER`, RANK set outside."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from flows_models import Implicit, MixtureStack, T, inputs, weight_of_radius
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowscope


def models() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {"mixture": MixtureStack(), "implicit": Implicit(weight_of_radius(0.7))}


def batches(name: str) -> list[torch.Tensor]:
    return inputs(2, batch=6, tokens=(T,) if name == "mixture" else ())


def train(model: nn.Module, data: list[torch.Tensor]) -> list[dict[str, list[float]]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off", "slow_every": 1}) as scope:
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    wanted = ("route_", "solver_", "jacobian_")
    return [{n: v.tolist() for n, v in r.metrics.items() if n.startswith(wanted)} for r in scope.records]


def main(folder: str) -> None:
    rank = int(os.environ["RANK"])
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    told = {
        name: train(DistributedDataParallel(model), [x[3 * rank : 3 * rank + 3] for x in batches(name)])
        for name, model in models().items()
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
