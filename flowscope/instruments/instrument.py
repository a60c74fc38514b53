"""An instrument: all that is known of one kind of number, from the hook to the metric. A new one is one file.

The observation holds a list of them and knows none by name. In a sampled step each hears of its events (`begin_step`,
`start_forward`, `before_update`, ...), gives what it saw (`take`), and makes metrics of it once the numbers are on the
host (`Taken.read`), where they may be the sums over all ranks (`Taken.adds_up`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.config import Family, WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.metrics import Metric
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.records import Array as Array
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.payload import Part, Sharing

AddsUp = Literal["table", "vector", ""] | Callable[[Sharing, Mapping[str, int]], list[Part]]


@dataclass(frozen=True, eq=False)
class Taken:
    """What one instrument saw in a step, on its way to the host.

    Attributes:
        name: the same on all ranks that saw the same.
        tensors: on their devices.
        read: writes the metrics, from the host's copies of the tensors.
        adds_up: how the numbers of several ranks are combined. "table": one tensor a device, whose rows are fixed by
            the structure of the model. "vector": one tensor, which not every step has. "": not, the record shows the
            first rank's. Or a function that makes the parts of the all-reduce vector: this rank's share, and names and
            sizes of what the ranks have in common -> parts; `read` then finds their sums where the parts put them.
        joined: told of an optimizer that was found only after the step, and makes the rest of its update.
        replicas: [N] numbers on a device, of which `Instrument.replicated` says which are the same on all ranks.
    """

    name: str
    tensors: list[Tensor]
    read: Callable[[RecordBuilder, list[Array]], None]
    adds_up: AddsUp = ""
    joined: Callable[[Any], None] = lambda optimizer: None
    replicas: Callable[[torch.device], Tensor] | None = None


class Instrument:
    """Base of all; every method has a default that does nothing.

    Hooks of an instrument are registered with its `fuse`, so that a fault of it switches off it alone.
    """

    name: ClassVar[str]
    """Its key in `config={"instruments": {name: False}}`."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """What each of its metrics says, how ranks combine it and how it is drawn; it goes into the run's header."""
    families: ClassVar[tuple[Family, ...]] = ("parameters",)
    """Which families of `WatchConfig.metrics` it belongs to: any of them turns it on; without one it is always on."""
    counts_canary: ClassVar[bool] = False
    """Whether it counts the non-finite values of the last hidden state on every step (`hooks.canary`)."""
    buffer: DepositBuffer | None = None
    """Allocated before the first compiled call, where there is one."""

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """The instruments of this class that a model asks for: one, or one a flow, or none."""
        return [cls()]

    @cached_property
    def fuse(self) -> str:
        """What a fault of it switches off (`faults.guard`); one of several of a class gives itself its own."""
        return self.name

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Register what looks at the model. `hooks.switch` says whether a step is sampled, slow, paused."""

    def begin_step(self) -> None:
        """A sampled step begins."""

    def start_forward(self) -> None:
        """A training forward of the model begins."""

    def start_evaluation(self) -> None:
        """A forward without gradient begins."""

    def replay(self) -> None:
        """Gradients are there, and the weights still (nearly) those of the forward: run again what has to be."""

    def scaled_by(self, scale: Tensor | float | None) -> None:
        """What the loss was multiplied by in this step's backward; None where there is no scaler."""

    def before_update(self, *, updating: bool) -> None:
        """The first optimizer of the step is about to change the weights.

        Args:
            updating: False where no optimizer is known: they change some time until `after_update`.
        """

    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """An optimizer is about to use the gradients.

        Args:
            only: ids of its parameters; None for all.
            scale: what the gradients are still multiplied by.
        """

    def after_update(self) -> None:
        """The weights have changed."""

    def update_failed(self) -> None:
        """The optimizer raised: the step begins its update again."""

    def take(self) -> Taken | None:
        """What this step showed; starts again from nothing."""

    def set_aside(self) -> None:
        """What backward deposited so far left no gradient, and no step has shown yet whether this loop leaves any."""

    def recall(self, *, counts: bool) -> None:
        """A step ends, before `take`: whether what was set aside counts."""

    def runs(self) -> int:
        """Grows whenever parts of the model run with gradient, where it sees that."""
        return 0

    def rests(self) -> bool:
        """Whether steps that are not sampled may pass without it: its hooks are off then, and it is told nothing.

        False of one from outside that does not say so: its hooks may look at every step.
        """
        return type(self).__module__.startswith("flowscope.")

    def discard(self) -> None:
        """Forget what backward deposited, not what forwards under way wait with."""
        if self.buffer is not None:
            self.buffer.clear()

    def drop(self) -> None:
        """Forget all of it: it belongs to no step of ours."""
        self.discard()

    def close(self) -> None:
        """Take off what is no hook of `hooks`."""

    # -- over ranks ----------------------------------------------------------------------------------------------------

    def layout(self) -> Any:
        """What ranks must have in common for its numbers to add up, JSON-ready."""

    def expects(self, part: str) -> bool:
        """Whether a part of the all-reduce vector that the ranks once had in common may still come."""
        return True

    def replicated(self) -> NDArray[np.bool_] | None:
        """Which of `Taken.replicas` are the same on all ranks; None where nothing is compared."""


def table_rows(parts: list[Array], columns: int, count: int = 0, maxima: Sequence[int] = ()) -> Array:
    """The rows that several devices hold, added up (of the columns `maxima` the largest); `count` at least."""
    rows = np.zeros((max([count, *map(len, parts)]), columns))
    for part in parts:
        held = rows[: len(part)]
        largest = np.maximum(held[:, maxima], part[:, maxima]) if maxima else None
        held += part
        if largest is not None:
            held[:, maxima] = largest
    return rows
