"""Two processes (gloo, CPU): ranks that fall apart without the loss showing it (D00-D03)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.faults.case import Case, Catalogue, Draw, Program, accuracy_of, batches
from benchmarks.faults.data import digits
from benchmarks.faults.models import chain, class_loss
from benchmarks.faults.scoring import Run

case = Catalogue("two processes")
healthy = Catalogue("controls: plain networks", healthy=True)
STEPS, SECONDS = 100, 180
KIND = "rank_desync"


def sharded(draw: Draw) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    """Equal models, each rank its own half of the digits."""
    rank = dist.get_rank()
    torch.manual_seed(draw.seed)
    model = chain(64, 48, 2, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), _ = digits()
    return model, optimizer, batches((x[rank::2], y[rank::2]), 32, draw.seed + rank)


def average(model: nn.Module) -> None:
    """All-reduce of each gradient."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def program(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, first: int, place: str | None) -> Program:
    return Program(model, optimizer, step, STEPS, accuracy_of(model, digits()[1]), first=first, place=place)


def ddp(draw: Draw, bypass: int) -> Program:
    """DDP, whose synchronisation each `bypass`-th step goes around; 0: never."""
    model, optimizer, data = sharded(draw)
    wrapped = DistributedDataParallel(model)

    def step(k: int) -> Tensor:
        optimizer.zero_grad()
        around = bypass and k % bypass == bypass - 1
        loss = class_loss(wrapped.module if around else wrapped, next(data))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return program(wrapped, optimizer, step, max(bypass - 1, 0), r".*" if bypass else None)


@case("D01", "every fifth step calls the module inside DDP", KIND, ranks=2)
def out_of_sync(draw: Draw) -> Program:
    return ddp(draw, 5)


@healthy("D00", "plain DDP", ranks=2)
def in_sync(draw: Draw) -> Program:
    return ddp(draw, 0)


@case("D02", "one rank loses a payload now and then", KIND, ranks=2)
def lost_payloads(draw: Draw) -> Program:
    model, optimizer, data = sharded(draw)
    chance = torch.Generator().manual_seed(draw.seed)

    def step(k: int) -> Tensor:
        optimizer.zero_grad()
        loss = class_loss(model, next(data))
        loss.backward()
        average(model)
        for parameter in model.parameters():
            # 1 % in the corpus; the third step loses one always, so that every seed shows it from there
            lost = float(torch.rand((), generator=chance)) < 0.01 or k == 2
            if lost and dist.get_rank() == 1:
                parameter.grad.zero_()
        optimizer.step()
        return loss.detach()

    return program(model, optimizer, step, 2, r".*")


@case("D03", "each rank clips by its own part of the norm", KIND, ranks=2)
def local_clip(draw: Draw) -> Program:
    model, optimizer, data = sharded(draw)

    def step(k: int) -> Tensor:
        optimizer.zero_grad()
        loss = class_loss(model, next(data))
        loss.backward()
        average(model)
        # the norm of "its" parameters only, as if they were sharded and its peers forgotten
        own = list(model.parameters())[dist.get_rank() :: 2]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.3 / float(norm))
        optimizer.step()
        return loss.detach()

    return program(model, optimizer, step, 0, r".*")


def run_ranks(chosen: Case, draw: Draw, root: Path | None) -> Run:
    """Run a case in two processes; rank 0 tells what it saw."""
    import subprocess

    from benchmarks.faults.runner import folder_of

    folder = folder_of(chosen, draw, root) if root is not None else Path(tempfile.mkdtemp())
    file = folder / "run.json"
    if file.exists():
        return json.loads(file.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    store = Path(tempfile.mkdtemp()) / "store"
    arguments = [chosen.id, str(draw.seed), str(folder.absolute()), str(store)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.faults.ranks"]
    workers = [subprocess.Popen([*command, str(rank), *arguments], env=environment) for rank in range(2)]
    codes = [worker.wait(timeout=SECONDS) for worker in workers]
    if any(codes) or not file.exists():
        raise RuntimeError(f"{chosen.id}: the processes ended with {codes}")
    return json.loads(file.read_text())


def worker(rank: int, name: str, seed: int, folder: Path, store: str) -> None:
    """One process of a run."""
    from benchmarks.faults.runner import describe, quiet_torch, train

    quiet_torch()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    started = time.perf_counter()
    chosen = next(one for one in (*case.cases, *healthy.cases) if one.id == name)
    draw = Draw(seed)
    built = chosen.build(draw)
    seen = train(built, folder if rank == 0 else None)
    if rank == 0:
        describe(chosen, draw, built, seen, time.perf_counter() - started, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    from benchmarks.faults.ranks import worker as work

    work(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
