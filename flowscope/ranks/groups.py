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
from flowscope.torch_internals import fsdp_states, is_flattened, is_joined


@dataclass(frozen=True)
class Group:
    """The ranks whose numbers add up.

    Attributes:
        process_group: of these ranks; None where it is this one alone (a stage of a pipeline).
        kind: "DDP", "FSDP2", "FSDP1", "tensor parallel" or "" (nothing shows that the processes train together).
        replicas: how many ranks see batches of their own.
        averaged: over how many ranks gradients are averaged.
        states: whether this rank's hidden states count (of ranks that see the same batch, the first one's).
        wrapper: the DDP module, where there is one.
        clocks: the groups whose collectives tell that a step was made.
    """

    process_group: Any
    kind: str
    replicas: int
    averaged: float
    states: bool
    wrapper: weakref.ref[nn.Module] | None = None
    clocks: tuple[Any, ...] = ()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global numbers of all of them; kept, as the group may be destroyed before the scope is closed."""
        if self.process_group is None:
            return (dist.get_rank(),)
        return tuple(dist.get_process_group_ranks(self.process_group))

    @cached_property
    def place(self) -> int:
        """This rank's place among them."""
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
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


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

    With DDP (around the model, inside it, or found among the living objects) it is DDP's group; with sharded or tensor
    parallel parameters the ranks of their mesh, or all where DDP or FSDP2 and tensor parallelism are combined.
    """
    if any(is_flattened(p) for p in model.parameters()):
        return _flattened_group(model)
    sharded = [p for p in model.parameters() if hasattr(p, "device_mesh")]
    replicas = _ddp_of(model)
    wrapper = weakref.ref(replicas) if replicas is not None else None
    if not sharded and replicas is None and stage_of(model) is not None:
        return Group(None, "", 1, 1.0, True)
    if not sharded:
        group = dist.group.WORLD if replicas is None else replicas.process_group
        size = dist.get_world_size(group)
        return Group(group, "" if replicas is None else "DDP", size, float(size), True, wrapper, (group,))
    mesh: Any = max((p.device_mesh for p in sharded), key=lambda mesh: mesh.size())
    data_parallel = replicas.process_group if replicas is not None else _fsdp_group(model)
    everyone = _group_of(mesh, data_parallel if replicas is not None else None)
    if everyone is None:
        return None
    clocks = (*mesh.get_all_groups(), *([data_parallel] if replicas is not None else []))
    first = dist.get_process_group_ranks(everyone)[0]
    if data_parallel is None:
        return Group(everyone, "tensor parallel", 1, 1.0, dist.get_rank() == first, None, clocks)
    size = dist.get_world_size(data_parallel)
    divisor = size if replicas is not None else _fsdp_divisor(model, data_parallel)
    states = first in dist.get_process_group_ranks(data_parallel)
    kind = "DDP" if wrapper is not None else "FSDP2"
    return Group(everyone, kind, size, float(divisor), states, wrapper, clocks)


def _group_of(mesh: Any, replicas: Any) -> Any:
    """The group of all ranks of a mesh (and of its replicas), None where no such group exists."""
    size = mesh.size() * (dist.get_world_size(replicas) if replicas is not None else 1)
    if size == dist.get_world_size():
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 and replicas is None else None


def _flattened_group(model: nn.Module) -> Group | None:
    """The ranks of FullyShardedDataParallel (FSDP1), None for groups of groups: shards add up as those of FSDP2."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = _wrapper_of(model, FullyShardedDataParallel)
    group = getattr(found, "process_group", None)
    if not isinstance(group, dist.ProcessGroup):
        return None
    size = dist.get_world_size(group)
    return Group(group, "FSDP1", size, float(size), True, None, (group,))


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


def _fsdp_group(model: nn.Module) -> Any:
    """The ranks over which FSDP2 averages gradients, None without FSDP2."""
    states = fsdp_states(model)
    if not states:
        return None
    mesh = states[0].mesh_info.mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else None


def _fsdp_divisor(model: nn.Module, group: Any) -> float:
    """FSDP2's own division of the summed gradients: the number of ranks unless it was set."""
    factor = getattr(fsdp_states(model)[0], "gradient_divide_factor", None)
    return float(factor) if factor else float(dist.get_world_size(group))
