"""A pipeline of blocks on two ranks: `pipeline_program.py SCHEDULE FOLDER`, one run of each stage in a folder below."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from pipeline_models import MICRO, STEPS, batch, blocks
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import flowscope


def main(name: str, folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, device = dist.get_rank(), torch.device("cpu")
    count = 4 if name == "interleaved" else 2
    every = blocks()
    width = len(every) // count
    # a rank has the stages rank, rank + 2, ...
    models = {at: nn.Sequential(*every[at * width : (at + 1) * width]) for at in range(rank, count, 2)}
    stages = [PipelineStage(model, at, count, device) for at, model in models.items()]
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}[name]
    schedule = kind(
        stages if name == "interleaved" else stages[0], n_microbatches=MICRO, loss_fn=nn.functional.mse_loss
    )
    optimizers = {at: torch.optim.SGD(model.parameters(), 0.1) for at, model in models.items()}
    scopes = [
        flowscope.watch(model, optimizers[at], every=1, log_dir=folder, config={"console": "off"})
        for at, model in models.items()
    ]
    for step in range(STEPS):
        x, y = batch(step)
        losses: list[torch.Tensor] = []
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        last = {"target": y, "losses": losses} if rank == 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last)
        for optimizer in optimizers.values():
            optimizer.step()
        for scope in scopes:
            scope.step(loss=torch.stack(losses).mean() if losses else None)
    for scope in scopes:
        scope.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
