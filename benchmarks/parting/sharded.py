"""The same programs under FSDP2 on two ranks: each has half of a batch, and half of every parameter."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import fully_shard

RANKS = 2


def on_two_ranks(train: Callable[..., None], *arguments: Any) -> None:
    """Call `train(*arguments)` on both ranks of a group over the loopback."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (str(Path(folder) / "store"), train, arguments), nprocs=RANKS)


def _rank(rank: int, store: str, train: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        train(*arguments)
    finally:
        dist.destroy_process_group()


def sharded(model: Any, fault: str, at: int) -> None:
    """Shard block by block, then the rest."""
    left_out = {model.stack[at].up.weight} if fault == "parameter left out" else set()
    for module in (*model.stack, model):
        fully_shard(module, ignored_params=left_out)


def own_part(x: Tensor, fault: str) -> Tensor:
    """The samples of this rank; without a sampler every rank takes the first."""
    return x.chunk(RANKS)[0 if fault == "no sampler" else dist.get_rank()]
