"""Whether this rank adds up with the others: all must watch with one layout and schedule, and go in step.

They are counted in the process group's store, without a collective, and find each other's addresses there.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flowscope.faults import LOGGER
from flowscope.model.plan import display_path
from flowscope.observation.observation import Observation
from flowscope.ranks.clock import Clock
from flowscope.ranks.groups import Group, find_group, several_processes
from flowscope.ranks.node import Node, local_address
from flowscope.ranks.wire import Kind
from flowscope.schedule import Schedule
from flowscope.steps.losses import StepLoss
from flowscope.torch_internals import is_flattened, sequence_of

SCHEDULE_STEPS = 1024
FLATTENED = (
    "FullyShardedDataParallel (FSDP1) is seen: parameters are flat shards, whose norms add up over the ranks (without "
    "use_orig_params=True one row a wrapped module). Use torch.distributed.fsdp.fully_shard for what else there is."
)
UNEVEN = "inside of torch's Join a rank that has run out of batches enters no sum"


_REGISTERED: Counter[str] = Counter()
"""How many scopes of each layout this process has registered: each counts in a place of its own."""


class Standing(Enum):
    """How this rank stands to the others.

    LOOKING: who they are is not known.
    REGISTERED: it has counted itself among them; they may not have, yet.
    JOINED: all have the same layout and schedule, and go in step: they add up.
    ALONE: its records are its own.
    """

    LOOKING, REGISTERED, JOINED, ALONE = range(4)


class Membership:
    """Finds the ranks that train a model together, and whether this one adds up with them.

    Args:
        model: the model.
        layout: what ranks must have in common (`layout_of`, for a group).

    Attributes:
        group: the ranks, None while they are not known.
        standing: how this rank stands to them.
        clock: which of this rank's steps is which of the others'.
    """

    def __init__(self, model: nn.Module, layout: Callable[[Group], list[Any]]) -> None:
        self._model, self._layout = model, layout
        self.group: Group | None = None
        self.standing = Standing.LOOKING
        self.clock = Clock()
        self._node: Node | None = None
        self._place = ""
        """Of what is kept in the process group's store; empty before this rank has registered."""
        self._ended = self._count_at = 0
        self._sequence = -1

    @property
    def joined(self) -> bool:
        """Whether this rank adds up with the others."""
        return self.standing is Standing.JOINED

    def party(self) -> Group:
        """Who adds up: known since the ranks have joined."""
        assert self.group is not None
        return self.group

    def node(self) -> Node:
        """This rank's connections: there since it has joined."""
        assert self._node is not None
        return self._node

    @property
    def uneven(self) -> bool:
        """Whether ranks may run out of batches one by one."""
        return self.group is not None and self.group.uneven

    def attach(self) -> None:
        """Register at once where the ranks' layout is known before the first forward."""
        if several_processes():
            group = find_group(self._model)
            if group is not None and group.kind and group.size > 1:
                self._register(group)

    def forward_begins(self) -> None:
        """A training forward of the model begins."""
        passed = self.clock.forward_begins()
        if self.standing is Standing.ALONE or not several_processes():
            return
        if self.standing is Standing.LOOKING:
            self._look()
        if self.standing is Standing.REGISTERED and self.clock.begun > 1 and self._there() >= self.party().size:
            self._connect()  # this rank may have left out the step in which the others have joined
        if self.joined:
            self.node().note(Kind.PASSED, passed)
        self._sequence = sequence_of(dist.group.WORLD)

    def step_ended(self, step: StepLoss) -> None:
        """In a step's hook: join where all ranks have registered and are seen to go in step."""
        self.clock.step_ended(step)
        if several_processes():
            if self.standing is Standing.LOOKING:
                self._look()
                self._count_at += 1  # a whole step must lie between: then all ranks have counted themselves
            elif self.standing is Standing.REGISTERED:
                self._join()
        self._ended += 1

    def _look(self) -> None:
        group = find_group(self._model)
        if group is None:
            self.stay_alone("who holds its parameters besides this rank is not known: DDP over a part of a larger mesh")
        elif group.size == 1:
            self.group, self.standing = group, Standing.ALONE
        else:
            self._register(group)

    def _register(self, group: Group) -> None:
        """Count this rank among those that have its layout; how many they are is only read in a later hook."""
        self.group, self.standing, self._count_at = group, Standing.REGISTERED, self._ended
        self.clock.groups = group.clocks
        if group.kind == "FSDP1":
            LOGGER.warning("flowscope: %s", FLATTENED)
        digest = hashlib.sha256(json.dumps(self._layout(group)).encode()).hexdigest()[:24]
        _REGISTERED[digest] += 1
        # a launcher that starts the ranks again may keep the store
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._place = f"flowscope/{digest}/{again}/{_REGISTERED[digest]}"
        store = self._store()
        self._node = node = Node(group.place, group.size, local_address(store), self._place)
        weakref.finalize(self, node.end)  # of a scope that nobody closes
        store.set(f"{self._place}/{group.place}", node.address)
        store.add(self._place, 1)

    def _store(self) -> Any:
        return dist.distributed_c10d._get_process_group_store(dist.distributed_c10d._get_default_group())

    def _join(self) -> None:
        group = self.party()
        if self.uneven:
            self.stay_alone(UNEVEN)
        elif self._ended >= self._count_at and self._in_step(group):
            device = next(self._model.parameters()).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # once: the collectives of backward are behind all ranks
            if not self.clock.counts():
                self.stay_alone("the backend of its process group does not count collectives")
            elif (count := self._there()) >= group.size:
                self._connect()
            else:
                self.stay_alone(
                    f"{count} of {group.size} ranks watch it with this layout and schedule (call flowscope.watch "
                    "on every rank with the same arguments, before the first step)"
                )

    def _there(self) -> int:
        """How many ranks have registered; more than there are where the store remembers an earlier try."""
        return int(self._store().add(self._place, 0))

    def _connect(self) -> None:
        node = self.node()
        above = node.gathering.parent
        node.start(self._store().get(f"{self._place}/{above}").decode() if above >= 0 else "")
        self.standing = Standing.JOINED

    def _in_step(self, group: Group) -> bool:
        """Whether something shows that the other ranks make this step too: a wrapper, or a collective in the step."""
        return bool(group.kind) or sequence_of(dist.group.WORLD) > self._sequence >= 0

    def stay_alone(self, why: str) -> None:
        """Add up no more, and say why."""
        self.leave(f"another rank adds up no more ({why})" if why != self.left else why)
        LOGGER.warning("flowscope: nothing is added up over ranks, records are this rank's own (flag local): %s.", why)

    @property
    def left(self) -> str:
        """Why another rank adds up no more; empty while all do."""
        return self._node.inbox.left if self._node is not None else ""

    def leave(self, why: str = "another rank has closed its scope") -> None:
        """Tell the others that this rank enters no more, and let go of them."""
        if self._node is not None:
            if self.joined:
                self._node.leave(why)
            self._node.close()
        self.standing, self._node = Standing.ALONE, None


def layout_of(observation: Observation, schedule: Schedule, group: Group) -> list[Any]:
    """Return what ranks must have in common for their numbers to add up."""
    config, own = observation.config.model_dump(mode="json"), observation.view.own
    plan = [(flow.name, flow.kind, flow.outputs, flow.entry) for flow in observation.view.flows]
    shapes = [
        # of a flattened parameter each rank holds another number of entries, of experts perhaps others
        (name if display_path(name) not in own else "", [] if is_flattened(p) else list(p.shape), str(p.dtype))
        for name, p in observation.model.named_parameters()
    ]
    steps = [bool(schedule(step)) for step in range(SCHEDULE_STEPS)]
    for display in ("console", "images_every", "max_records", "max_alerts"):
        config.pop(display, None)
    here = [group.ranks, group.kind, sum(sequence_of(clock) for clock in group.clocks)]
    return [plan, shapes, observation.layout(), steps, config, here]
