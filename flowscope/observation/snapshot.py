"""What one sampled step showed, on its way to the host, and the record made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowscope.faults import Faults
from flowscope.instruments import Instrument, Taken
from flowscope.observation.sharing import parts_of
from flowscope.record_builder import RecordBuilder
from flowscope.records import Array, FlowLayout, Record
from flowscope.sums.buffer import HostCopy
from flowscope.sums.payload import Part, Sharing


class Snapshot:
    """What the instruments took of one sampled step; `record` turns it into numbers.

    Args:
        instruments: those of the model, in the order of the record.
        faults: a fault in one switches off that one.

    Attributes:
        shared: whether its numbers are those of all ranks together.
        local: the metrics that were made of this rank's numbers alone, once there is a record.
    """

    def __init__(self, instruments: Sequence[Instrument], faults: Faults) -> None:
        self._faults = faults
        self.shared = False
        self.local: set[str] = set()
        seen = [(i.fuse, faults.guard(i.fuse, _taken, i)) for i in instruments]
        self._taken: list[tuple[str, Taken, HostCopy]] = [(fuse, *taken) for fuse, taken in seen if taken is not None]
        self._sums: dict[str, Array] = {}

    def parts(self, sharing: Sharing, agreed: Mapping[str, int]) -> list[Part]:
        """What of this step adds up over ranks; the sums take the place of this rank's own numbers.

        Args:
            sharing: this rank's share.
            agreed: names and sizes of the parts that the ranks are known to have in common.
        """
        made = [
            self._faults.guard(fuse, parts_of, taken, sharing, agreed, self._sums) for fuse, taken, _ in self._taken
        ]
        return [part for parts in made for part in parts or ()]

    def join(self, optimizer: Any) -> None:
        """An optimizer found only now is about to make the second half of this step's update."""
        for fuse, taken, _ in self._taken:
            self._faults.guard(fuse, taken.joined, optimizer)

    def replicas(self, device: torch.device) -> Tensor | None:
        """[N] what replicas of the model must have equal; `Observation.replicated` says which of it."""
        return next((taken.replicas(device) for _, taken, _ in self._taken if taken.replicas is not None), None)

    def ready(self) -> bool:
        """Whether `record` would not wait for a copy."""
        return all(copy.ready() for *_, copy in self._taken)

    def record(self, step: int) -> tuple[Record, list[FlowLayout], dict[str, Any]]:
        """Wait for the copy and compute the metrics; returns them with the layout of the flows and the run's set-up."""
        out = RecordBuilder(step)
        for fuse, taken, copy in self._taken:
            local = bool(taken.tensors) and not taken.adds_up
            before = out.keys() if local else set()
            out.family()
            self._faults.guard(fuse, self._read, taken, copy, out)
            if local:
                self.local |= out.keys() - before
        return out.finish(), out.layouts, out.setup

    def _read(self, taken: Taken, copy: HostCopy, out: RecordBuilder) -> None:
        own = copy.read()
        taken.read(out, [self._sums[taken.name]] if taken.name in self._sums else own)


def _taken(instrument: Instrument) -> tuple[Taken, HostCopy] | None:
    """What an instrument saw, on its way to the host."""
    taken = instrument.take()
    return None if taken is None else (taken, HostCopy(taken.tensors))
