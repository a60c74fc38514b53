"""Which ranks train one model together, and what each of them holds of it: DDP, FSDP2, tensor parallel (DTensor).

Nothing here communicates; everything is read from the modules, parameters and process groups as they are.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flowscope.sinks.stages import STAGE
from flowscope.sums.payload import Sharing
from flowscope.torch_internals import fsdp_states, is_flattened, is_joined, world_size


@dataclass(frozen=True)
class Group:
    """The ranks whose numbers add up.

    Attributes:
        ranks: their numbers among all, in order; this one alone for a stage of a pipeline.
        kind: "DDP", "FSDP2", "FSDP1", "tensor parallel" or "" (nothing shows that the processes train together).
        replicas: how many ranks see batches (or tokens) of their own.
        averaged: over how many ranks gradients are averaged.
        states: whether this rank's hidden states count (of ranks that see the same batch, the first one's).
        wrapper: the DDP module, where there is one.
        clocks: the process groups whose collectives tell that a step was made.
    """

    ranks: tuple[int, ...]
    kind: str
    replicas: int
    averaged: float
    states: bool
    wrapper: weakref.ref[nn.Module] | None = None
    clocks: tuple[Any, ...] = ()

    @cached_property
    def place(self) -> int:
        """This rank's place among them; kept, as the groups may be destroyed before the scope is closed."""
        return self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def first(self) -> bool:
        """Whether this rank is the first of them."""
        return self.place == 0

    @property
    def uneven(self) -> bool:
        """Whether ranks may run out of batches one by one: torch's `Join` shadows the wrapper's collectives only."""
        wrapper = self.wrapper() if self.wrapper is not None else None
        return is_joined(wrapper)

    def sharing(self, device: torch.device) -> Sharing:
        """This rank's share in the sum."""
        ranks, place = self.ranks, self.place
        return Sharing(len(ranks), device, self.states, self.replicas, self.averaged, place == 0, ranks[0], place)


def several_processes() -> bool:
    """Whether torch.distributed runs with more than one rank."""
    return world_size() > 1


def is_first_process() -> bool:
    """Whether this process writes: rank 0, also where a launcher has set ranks and the group is not made yet."""
    if dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return int(os.environ.get("WORLD_SIZE", "1")) < 2 or int(os.environ.get("RANK", "0")) == 0


def stage_of(model: nn.Module) -> int | None:
    """Which stage of a pipeline (torch.distributed.pipelining) a model is, from 0; None where no stage holds it."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return None
    mine = {id(p) for p in model.parameters()}
    for found in gc.get_objects():  # the model does not know its stage; once a scope
        if pipelining._PipelineStageBase in type(found).__mro__ and any(
            id(p) in mine for p in found.submod.parameters()
        ):
            return int(found.stage_index)
    return None


def files_of(model: nn.Module, log_dir: str | Path | None) -> tuple[bool, str | Path | None]:
    """Whether this process writes files, and into which folder: of each stage of a pipeline the first rank, its own."""
    stage = stage_of(model) if several_processes() else None
    if stage is None:
        return is_first_process(), log_dir
    group = find_group(model)
    return group is None or group.first, None if log_dir is None else Path(log_dir) / f"{STAGE}{stage}"


def find_group(model: nn.Module) -> Group | None:
    """Return the ranks that train `model` together; None where they hold it in a way that is not known.

    With DDP (around the model, inside it, or found among the living objects) they are DDP's; with sharded or tensor
    parallel parameters those of their mesh, or all where DDP and tensor parallelism are combined.
    """
    if any(is_flattened(p) for p in model.parameters()):
        return _flattened_group(model)
    meshes: list[Any] = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
    replicas = _ddp_of(model)
    wrapper = weakref.ref(replicas) if replicas is not None else None
    if not meshes and replicas is None and stage_of(model) is not None:
        return Group((dist.get_rank(),), "", 1, 1.0, True)
    if not meshes:
        group = dist.group.WORLD if replicas is None else replicas.process_group
        ranks = _ranks_of(group)
        return Group(ranks, "" if replicas is None else "DDP", len(ranks), float(len(ranks)), True, wrapper, (group,))
    mesh = max(meshes, key=lambda mesh: mesh.size())
    sharded = _fsdp_state(model)
    averaging = _ranks_of(replicas.process_group) if replicas is not None else ()
    if replicas is None and sharded is not None:
        averaging = _ranks_on(sharded.mesh_info.mesh)
    everyone = _together(_ranks_on(mesh), averaging)
    if everyone is None:
        return None
    clocks = (*mesh.get_all_groups(), *([replicas.process_group] if replicas is not None else []))
    if not averaging:
        return Group(everyone, "tensor parallel", 1, 1.0, dist.get_rank() == everyone[0], None, clocks)
    # FSDP2's own division of the summed gradients, where it was set
    divisor = getattr(sharded, "gradient_divide_factor", None) if replicas is None else None
    kind, averaged = "DDP" if replicas is not None else "FSDP2", float(divisor or len(averaging))
    return Group(everyone, kind, len(averaging), averaged, everyone[0] in averaging, wrapper, clocks)


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _ranks_on(mesh: Any) -> tuple[int, ...]:
    """The ranks of this rank's part of a mesh, in order."""
    return tuple(sorted(mesh.mesh.reshape(-1).tolist()))


def _together(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """All ranks of a mesh and of those that average: each rank of one may have others of its own in the other."""
    larger, smaller = sorted(({*one}, {*other}), key=len, reverse=True)
    if smaller <= larger:
        return tuple(sorted(larger))
    world = dist.get_world_size()
    return tuple(range(world)) if len(larger) * len(smaller) == world else None


def _flattened_group(model: nn.Module) -> Group | None:
    """The ranks of FullyShardedDataParallel (FSDP1), None for groups of groups: shards add up as those of FSDP2."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = _wrapper_of(model, FullyShardedDataParallel)
    group = getattr(found, "process_group", None)
    if not isinstance(group, dist.ProcessGroup):
        return None
    ranks = _ranks_of(group)
    return Group(ranks, "FSDP1", len(ranks), float(len(ranks)), True, None, (group,))


def _ddp_of(model: nn.Module) -> Any:
    """The DDP module around the model or in it, None where there is none."""
    return _wrapper_of(model, nn.parallel.DistributedDataParallel)


def _wrapper_of(model: nn.Module, kind: type[nn.Module]) -> Any:
    """The module of this kind around the model or in it, None where there is none."""
    for module in model.modules():
        if isinstance(module, kind):
            return module
    mine = {id(p) for p in model.parameters()}
    # the inner module does not know its wrapper; once a scope
    for found in gc.get_objects():
        if kind in type(found).__mro__ and any(id(p) in mine for p in found.parameters()):
            return found
    return None


def _fsdp_state(model: nn.Module) -> Any:
    """What FSDP2 keeps of the parameters on its largest mesh (experts may have one of their own), None without."""
    return max(fsdp_states(model), key=lambda state: state.mesh_info.mesh.size(), default=None)
