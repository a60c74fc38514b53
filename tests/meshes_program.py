"""What many ranks do in tests/test_meshes.py: `meshes_program.py FOLDER`. Each scenario returns its records plainly.

Axis letters: T tokens of a rank, N tokens of all ranks, D features, E experts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import forked_ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks_models import batches, build, share, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from watch_models import D, Stack, data

import flowscope

EXPERTS, CHOSEN = 8, 2
TOKENS, SAMPLES, STEPS = 6, 4, 3


# -- meshes of three dimensions ----------------------------------------------------------------------------------------


def sharded_on(model: nn.Module, mesh: Any, data_axes: Any) -> nn.Module:
    """Tensor parallel inside of the blocks, and FSDP2 over the other axes."""
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        fully_shard(block, mesh=mesh[data_axes])
    return fully_shard(model, mesh=mesh[data_axes])


def three_axes() -> Any:
    """Replicas, shards and tensor parallel: 2 x 2 x 2, one sample for each of the four that see their own."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = sharded_on(build(2), mesh, ("replicate", "shard"))
    replica, shard, _ = mesh.get_coordinate()
    own = slice(2 * replica + shard, 2 * replica + shard + 1)
    return train(model, [(x[own], y[own]) for x, y in batches(2)], foreach=False)


def three_axes_of_a_stage() -> Any:
    """Two stages, each sharded and tensor parallel on four of the eight ranks, trained apart here."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "shard", "tp"))
    stage, place, _ = mesh.get_coordinate()
    model = sharded_on(build(1 + stage), mesh, ("shard",))
    return train(model, share(batches(2), place), foreach=False)


# -- context parallel: each rank has some of the tokens of each sample ------------------------------------------------


class Gathered(torch.autograd.Function):
    """The parts of all ranks behind each other along an axis; each rank's own part of the summed gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None


class Added(torch.autograd.Function):
    """The sum of all ranks' tensors; the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Added.apply(gradient)


class Mixing(nn.Module):
    """Attention of a rank's own tokens to all: keys and values are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if dist.is_initialized():
            k, v = Gathered.apply(k.contiguous(), 1), Gathered.apply(v.contiguous(), 1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


def attention() -> Stack:
    torch.manual_seed(0)
    return Stack(3, Mixing)


def sequences() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [data_of(generator) for _ in range(STEPS)]


def data_of(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = data(0, SAMPLES)
    shape = (SAMPLES, TOKENS)
    return (
        torch.randn(*shape, x.shape[-1], generator=generator),
        torch.randn(*shape, y.shape[-1], generator=generator),
    )


def context_parallel() -> Any:
    place = dist.get_rank()
    own = [(x.chunk(2, dim=1)[place], y.chunk(2, dim=1)[place]) for x, y in sequences()]
    return train(DistributedDataParallel(attention()), own)


# -- expert parallel: each rank has some of the experts ---------------------------------------------------------------


class Mixture(nn.Module):
    """Tokens of all ranks meet the experts of this one; `names` says how they are named."""

    def __init__(self, names: str) -> None:
        super().__init__()
        count = dist.get_world_size() if dist.is_initialized() else 1
        place = dist.get_rank() if dist.is_initialized() else 0
        self.norm, self.gate = nn.LayerNorm(D), nn.Linear(D, EXPERTS, bias=False)
        every = [nn.Linear(D, D) for _ in range(EXPERTS)]
        self.top_k = CHOSEN
        self.first, here = place * EXPERTS // count, EXPERTS // count
        mine = range(self.first, self.first + here)
        if names == "own":
            self.experts = nn.ModuleList(every[at] for at in mine)
        else:  # by their numbers among all
            self.experts = nn.ModuleList([every[at] if at in mine else None for at in range(EXPERTS)])  # type: ignore[list-item]
        self.held = [self.experts[at if names != "own" else at - self.first] for at in mine]
        self.logits: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        logits = self.gate(normed)
        self.logits.append(logits.detach())
        weights, chosen = logits.softmax(-1).topk(CHOSEN, dim=-1)
        spread = torch.zeros_like(logits).scatter(-1, chosen, weights)
        if not dist.is_initialized():
            return x + self.mine(normed, spread)
        tokens, weights = Gathered.apply(normed, 0), Gathered.apply(spread, 0)
        return x + Added.apply(self.mine(tokens, weights)).chunk(dist.get_world_size())[dist.get_rank()]

    def mine(self, tokens: Tensor, weights: Tensor) -> Tensor:
        given = [weights[..., [self.first + at]] * expert(tokens) for at, expert in enumerate(self.held)]
        return torch.stack(given).sum(0)


def experts(names: str) -> Stack:
    torch.manual_seed(0)
    return Stack(2, lambda: Mixture(names))


def expert_parallel(names: str) -> Any:
    """DDP averages all but the experts, whose gradients of all ranks' tokens are there already."""
    model = experts(names)
    own = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    place = dist.get_rank()
    alerts: list[str] = []
    result = train(
        DistributedDataParallel(model),
        [(x.chunk(2)[place], y.chunk(2)[place]) for x, y in sequences()],
        before_step=lambda module: [p.grad.div_(2) for n, p in module.named_parameters() if ".experts." in n],
        desync_every=1,
        on_alert=[lambda alert: alerts.append(alert.kind)],
    )
    return {**result, "alerts": alerts}


SCENARIOS = {
    "three_axes": (8, three_axes),
    "three_axes_of_a_stage": (8, three_axes_of_a_stage),
    "context_parallel": (2, context_parallel),
    "experts_by_own_numbers": (2, lambda: expert_parallel("own")),
    "experts_by_all_numbers": (2, lambda: expert_parallel("all")),
}

if __name__ == "__main__":
    flowscope.watch  # noqa: B018 (loads what watching needs, before the ranks are forked)
    chosen = {name: SCENARIOS[name] for name in sys.argv[2:] or SCENARIOS}
    forked_ranks.run(chosen, Path(sys.argv[1]))
