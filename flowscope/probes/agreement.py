"""What the ranks have in common: the layout and schedule they watch with, and the parts of a sampled step.

The first is counted in the process group's store, without a collective; the second costs one MAX of hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from flowscope.config import WatchConfig
from flowscope.probes.observation import Observation
from flowscope.probes.payload import from_host
from flowscope.probes.process_groups import Group, sequence_of
from flowscope.schedule import Schedule

SCHEDULE_STEPS = 1024
BUCKETS = 64


class Registration:
    """This rank among those that have its layout; what is counted is only read in a later hook.

    Args:
        group: the ranks.
        layout: what they must have in common (`layout_of`).
    """

    _made: ClassVar[Counter[str]] = Counter()

    def __init__(self, group: Group, layout: list[Any]) -> None:
        self._group = group
        digest = hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:24]
        Registration._made[digest] += 1
        self._key = f"flowscope/{digest}/{Registration._made[digest]}"
        self._store().add(self._key, 1)

    def _store(self) -> Any:
        return dist.distributed_c10d._get_process_group_store(self._group.process_group)

    def count(self) -> int:
        """How many ranks have this layout."""
        return int(self._store().add(self._key, 0))

    def others_left(self, entered: int) -> bool:
        """Whether a rank closed its scope after this many sums: it will not enter the next."""
        return int(self._store().add(f"{self._key}/left after {entered}", 0)) > 0

    def tell_left(self, entered: int) -> None:
        """Tell the others that this rank has entered this many sums, and enters no more."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store().add(f"{self._key}/left after {entered}", 1)


def layout_of(group: Group, observation: Observation, watch: WatchConfig, schedule: Schedule) -> list[Any]:
    """Return what ranks must have in common for their numbers to add up."""
    config = watch.model_dump(mode="json")
    plan = [(flow.name, flow.kind, flow.outputs, flow.entry) for flow in observation.plan]
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in observation.model.named_parameters()]
    sites = [(site.flow, site.mode, site.labels) for site in observation.sites]
    gates = observation.gates.labels if observation.gates is not None else []
    steps = [bool(schedule(step)) for step in range(SCHEDULE_STEPS)]
    for display in ("console", "images_every", "max_records", "max_alerts"):
        config.pop(display, None)
    here = [group.size, group.kind, sequence_of(group.process_group), observation.fixed_rows]
    return [plan, shapes, sites, gates, steps, config, here]


def parts_in_common(
    known: Mapping[str, int], fixed: Collection[str], device: torch.device, process_group: Any
) -> dict[str, int]:
    """Return the parts that all ranks have, by one MAX of hashes of them and of their negatives.

    Args:
        known: names and sizes of this rank's parts.
        fixed: those of which the structure of the model alone decides.
        device: where the hashes are compared.
        process_group: the ranks.
    """
    buckets = np.zeros(BUCKETS + 1)
    places = {name: BUCKETS if name in fixed else zlib.crc32(name.encode()) % BUCKETS for name in known}
    for name, size in known.items():
        value, at = int(hashlib.sha256(f"{name} {size}".encode()).hexdigest()[:8], 16), places[name]
        buckets[at] = (buckets[at] + value) % 2.0**50
    vector = from_host(np.concatenate([buckets, -buckets]), device)
    dist.all_reduce(vector, dist.ReduceOp.MAX, group=process_group)
    largest = vector.cpu().double().numpy()
    same = largest[: BUCKETS + 1] == -largest[BUCKETS + 1 :]
    return {name: size for name, size in sorted(known.items()) if same[places[name]]}
