"""The all-reduce of a sampled step: which parts its vector has on all ranks, and the collectives under way.

They are entered in a step's hook, read a step later, and waited for only while all ranks are there.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flowscope.records import Array
from flowscope.sums.buffer import HostCopy
from flowscope.sums.payload import Part, from_host

GRACE = 1.0
"""Seconds that reading or closing waits, once a sum, for ranks that are a little behind; a dead one costs no more."""
PATIENCE = 2.0
"""Seconds after which a rank that waits asks whether the others are still there."""

BUCKETS = 64
"""Parts that only some ranks have are compared by so many hashes."""


class Exchange:
    """One SUM under way."""

    def __init__(self, vector: Tensor, group: Any, places: list[tuple[Part, int]]) -> None:
        self.places, self._vector = places, vector
        self._extremes: Any = None
        self._copy: HostCopy | None = None
        self._late = False
        if vector.is_cuda and "nccl" in str(dist.get_backend(group)):
            # on a stream of its own: the next forward does not wait for the slowest rank
            stream = torch.cuda.Stream(vector.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(vector.device))
            with torch.cuda.stream(stream):
                self._work: Any = dist.all_reduce(vector, group=group, async_op=True)
                self._work.wait()
                self._copy = HostCopy([vector])
            vector.record_stream(stream)
        else:
            self._work = dist.all_reduce(vector, group=group, async_op=True)

    def done(self) -> bool:
        """Whether `sums` would not wait for other ranks."""
        if self._extremes is not None and not self._extremes.is_completed():
            return False
        return self._copy.ready() if self._copy is not None else bool(self._work.is_completed())

    def wait_a_little(self) -> bool:
        """Whether it is done, within `GRACE` the first time it is asked."""
        end = time.monotonic() + (0.0 if self._late else GRACE)
        self._late = True
        while not (done := self.done()) and time.monotonic() < end:
            time.sleep(0.001)
        return done

    def wait(self, still_there: Callable[[], bool]) -> None:
        """Wait for the other ranks, while they are there.

        Raises:
            ConnectionError: they are not.
        """
        asked = time.monotonic()
        while not self.done():
            time.sleep(0.0002)
            if time.monotonic() - asked > PATIENCE:
                asked = time.monotonic()
                if not still_there():
                    raise ConnectionError("a rank left before it entered the sum of this step")

    def sums(self) -> Array:
        """The sum, once it is done."""
        if self._copy is None:
            self._work.wait()
            self._copy = HostCopy([self._vector])
        return self._copy.read()[0]

    def compare(self, norms: Tensor, group: Any, replicated: NDArray[np.bool_]) -> Callable[[], Array]:
        """Begin one MAX of [n, -n] beside the sum; what it returns waits for it, when its step's record is made.

        Returns:
            A function that gives [N]: (max - min) / max over the ranks of what all of them hold, NaN for the rest.
        """
        vector = torch.cat([norms, -norms])
        self._extremes = work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=group, async_op=True)

        def gap() -> Array:
            work.wait()
            largest, least = np.split(vector.cpu().double().numpy(), 2)
            with np.errstate(all="ignore"):
                found = np.where(largest > 0, (largest + least) / largest, 0.0)
            return np.where(replicated, found, np.nan)

        return gap


class Agreement:
    """The parts of a sampled step that all ranks have in common, and in which order they lie in the vector.

    Attributes:
        sizes: by name; the same on all ranks.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._open = 2
        """So many sums more begin with a comparison."""

    def news(self, own: Iterable[Part]) -> bool:
        """Whether this rank has seen something that the ranks have not agreed on."""
        return any(not part.fixed and self.sizes.get(part.name) != part.size for part in own)

    def reopen(self) -> None:
        """A rank has seen something new: compare before the next sum."""
        self._open = max(self._open, 1)

    def renew(self, own: list[Part], expects: Callable[[str], bool], device: torch.device, process_group: Any) -> None:
        """Agree anew, where a comparison is due.

        Args:
            own: this rank's parts of the step.
            expects: whether a part that was agreed on may still come.
            device: where the hashes are compared.
            process_group: the ranks.
        """
        if self._open <= 0:
            return
        self._open -= 1
        known = {name: size for name, size in self.sizes.items() if expects(name)}
        known |= {part.name: part.size for part in own}
        self.sizes = parts_in_common(known, {part.name for part in own if part.fixed}, device, process_group)


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
