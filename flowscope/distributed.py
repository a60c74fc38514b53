"""Many processes, one record: ranks that train a model together add up what they deposited, once a sampled step.

What is entered when, on every rank alike (docs/scale.md has the costs):

- `register` (no collective): a counter in the process group's store, one per layout and schedule. Where not all ranks
  have the same one, because they watch different things or not at all, nothing is ever added up: each rank's records
  are its own, flagged `local`.
- in the optimizer's step hook of a sampled step: one SUM of the statistics, not waited for; every
  `WatchConfig.desync_every`-th time one MAX of the replicated parameters' norms. The first two times, and where a rank
  saw something new, one MAX of hashes before it: which parts the ranks have in common.
- in the hook of the step after, the sum is there, or is waited for: all ranks have entered it, or the step's own
  collectives would have failed. Losses mostly come after the hook, so a step's loss is in the next sum, and with that
  its record is complete: the same on all ranks, at the same step.

Reading records or closing waits for at most `exchange.GRACE` seconds, and enters nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flowscope.config import WatchConfig
from flowscope.faults import LOGGER
from flowscope.probes.agreement import SCHEDULE_STEPS, Registration, layout_of, parts_in_common
from flowscope.probes.buffer import HostCopy
from flowscope.probes.canary import Canary
from flowscope.probes.exchange import Exchange, Extremes
from flowscope.probes.observation import Observation
from flowscope.probes.payload import Part, Sharing, from_host
from flowscope.probes.process_groups import Group, find_group, sequence_of, several_processes
from flowscope.probes.statistics import wide
from flowscope.records import Record, split_key
from flowscope.schedule import Schedule
from flowscope.steps.ended import EndedStep
from flowscope.steps.losses import StepLoss

Array = NDArray[np.float64]
KINDS = len(Canary.KINDS)
MOST_LATE = 128
UNEVEN = "inside of torch's Join a rank that has run out of batches enters no sum"


class Ranks:
    """The other ranks, as a scope sees them.

    Args:
        observation: whose snapshots add up.
        config: the scope's settings.
        schedule: when it samples; part of what the ranks must have in common.
        prepare: makes the record of a sampled step whose sums are there.
    """

    def __init__(
        self, observation: Observation, config: WatchConfig, schedule: Schedule, prepare: Callable[[EndedStep], None]
    ) -> None:
        self._observation, self._config, self._schedule, self._prepare = observation, config, schedule, prepare
        self.group: Group | None = None
        self.joined = self._alone = False
        self._registration: Registration | None = None
        self._registered_at = -1
        self._ended = 0
        self._sequence = -1
        self._agreed: dict[str, int] = {}
        self._handshakes = 2
        self._exchange: Exchange | None = None
        self._since: list[EndedStep] = []
        self._sent: list[EndedStep] = []
        self._entered = 0
        self._of: Any = None
        self._apart: EndedStep | None = None
        self._locals: dict[str, Array] = {}
        self._sharing: Sharing | None = None
        self._late_rows = 0

    # -- who the others are -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register at once where the ranks' layout is known before the first forward."""
        if several_processes():
            group = find_group(self._observation.model)
            if group is not None and group.kind and group.size > 1:
                self._register(group)

    def forward_begins(self) -> None:
        """A training forward of the model begins."""
        if self.joined or self._alone or not several_processes():
            return
        if self._registered_at < 0:
            self._look()
        self._sequence = sequence_of(dist.group.WORLD)

    def _look(self) -> None:
        group = find_group(self._observation.model)
        if group is None:
            self._stay_alone("its parameters lie on a mesh of devices for whose ranks there is no process group")
        elif group.size == 1:
            self.group, self._alone = group, True
        else:
            self._register(group)

    def _register(self, group: Group) -> None:
        self.group = group
        self._registration = Registration(group, layout_of(group, self._observation, self._config, self._schedule))
        self._registered_at = self._ended

    def _registered(self) -> Registration:
        """There since the ranks' layout is known."""
        assert self._registration is not None
        return self._registration

    def _join(self) -> None:
        """In a step's hook: begin to add up, where all ranks have registered and the ranks are seen to go in step."""
        if self._registered_at < 0:
            self._look()
            if not self._alone:
                self._registered_at += 1  # a whole step must lie between: then all ranks have counted themselves
        elif self.group is not None and self.group.uneven:
            self._stay_alone(UNEVEN)
        elif self._ended >= self._registered_at and self.group is not None and self._in_step(self.group):
            device = self._device()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # once: the collectives of backward are behind all ranks
            count = self._registered().count()
            if count != self.group.size:
                self._stay_alone(
                    f"{count} of {self.group.size} ranks watch it with this layout and schedule (call flowscope.watch "
                    "on every rank with the same arguments, before the first step)"
                )
                return
            self._sharing = self.group.sharing(device)
            self._late_rows = self._longest_gap()
            self.joined = True

    def _in_step(self, group: Group) -> bool:
        """Whether something shows that the other ranks make this step too: a wrapper, or a collective in the step."""
        return bool(group.kind) or sequence_of(group.process_group) > self._sequence >= 0

    def _stay_alone(self, why: str) -> None:
        self._alone = True
        LOGGER.warning("flowscope: nothing is added up over ranks, records are this rank's own (flag local): %s.", why)

    def _party(self) -> tuple[Group, Sharing]:
        """Who adds up, and this rank's share: there since the ranks have joined."""
        assert self.group is not None
        assert self._sharing is not None
        return self.group, self._sharing

    def _device(self) -> torch.device:
        return next(self._observation.model.parameters()).device

    def _longest_gap(self) -> int:
        sampled = [step for step in range(SCHEDULE_STEPS) if self._schedule(step)]
        gaps = [after - before for before, after in itertools.pairwise(sampled)]
        return min(MOST_LATE, max(gaps, default=MOST_LATE))

    # -- the step ------------------------------------------------------------------------------------------------------

    def step_ended(self, ended: EndedStep, *, sampled: bool) -> None:
        """A step has ended, in its optimizer's hook: take the last sum, and begin the next where it was sampled."""
        if several_processes() and not (self.joined or self._alone):
            self._join()
        self._ended += 1
        if not self.joined:
            if several_processes() and (self.group is None or self.group.size > 1):
                ended.flags = (*ended.flags, "local")
            return
        try:
            self._take(wait=True)
            ended.awaited = True
            uneven = self._party()[0].uneven
            if uneven or (sampled and self._registered().others_left(self._entered)):
                self._since.append(ended)
                self._give_up(UNEVEN if uneven else "another rank has closed its scope")
                return
            if sampled:
                self._enter(ended)
            elif ended.snapshot is not None:
                ended.flags = (*ended.flags, "local")  # skipped by the GradScaler: nothing is entered outside of a step
            self._since.append(ended)
        except Exception as error:
            self._since.append(ended)
            self._give_up(f"{type(error).__name__}: {error}")
            if not isinstance(error, (RuntimeError, OSError)):
                raise
            # a rank has died: the training's own collectives tell the user

    def _give_up(self, why: str) -> None:
        self._registered().tell_left(self._entered)
        self.joined, self._exchange = False, None
        self._stay_alone(why)
        self._release()

    def _release(self) -> None:
        """What still waits for other ranks becomes records of this rank's own numbers."""
        for ended in dict.fromkeys((*self._sent, *self._since)):
            if ended.awaited:
                ended.awaited = False
                if ended.snapshot is not None and not ended.snapshot.shared:
                    ended.flags = (*ended.flags, "local")
                elif ended.loss.shared:
                    ended.loss.take_ranks()
                elif ended.snapshot is not None and ended.record is not None:
                    ended.record.notes = (*ended.record.notes, "the loss is this rank's own")
        self._keep_locals()
        self._sent, self._since = [], []

    def payload(self) -> dict[str, int]:
        """Bytes of the sum by kind of part ("points", "parameters", "units", ...), as the ranks last agreed."""
        late = {"header": 2, "late": (self._late_rows + 2) * (KINDS + 2)} if self.joined else {}
        sizes: Counter[str] = Counter()
        for name, size in {**late, **self._agreed}.items():
            sizes[name.split(" ")[0]] += 8 * size
        return dict(sizes)

    def poll(self) -> None:
        """Take the sum under way where it is there, or comes within `GRACE`."""
        if self._exchange is not None:
            self._take(wait=False)

    def close(self) -> None:
        """Tell the others that this rank enters nothing any more, and let go of what waits for them."""
        if self.joined:
            with contextlib.suppress(RuntimeError, OSError):
                self.poll()
            self._registered().tell_left(self._entered)
        self.joined, self._alone, self._exchange = False, True, None
        self._release()

    # -- the sum -------------------------------------------------------------------------------------------------------

    def _enter(self, ended: EndedStep) -> None:
        """Begin the sum of a sampled step; a rank that is paused, or whose probes failed, enters with zeros."""
        group, sharing = self._party()
        device = sharing.device
        # a part of its own in the list of faults: this rank goes on entering sums, with zeros
        made = self._observation.faults.guard("parts of ranks", self._own_parts, ended)
        own = made or []
        if made is None:
            ended.flags = (*ended.flags, "local")
        if self._handshakes > 0:
            self._handshake(own)
        news = any(not part.fixed and self._agreed.get(part.name) != part.size for part in own)
        header = np.array([float(ended.snapshot is not None and made is not None), float(news)])
        self._sent, self._since = self._since, []
        late = (self._late_rows + 2) * (KINDS + 2)
        first = [
            Part("header", 2, partial(from_host, header, device), lambda sums: None),
            Part("late", late, partial(self._late, self._sent, ended), partial(self._take_late, self._sent, ended)),
        ]
        by_name = {part.name: part for part in [*first, *own]}
        vector, places, at = [], [], 0
        for name, size in {"header": 2, "late": late, **self._agreed}.items():
            part = by_name.get(name)
            numbers = self._observation.faults.guard("parts of ranks", part.gather) if part is not None else None
            if part is not None and numbers is not None and numbers.numel() == size:
                places.append((part, at))
            else:
                numbers = torch.zeros(size, dtype=wide(device), device=device)
            vector.append(numbers)
            at += size
        self._keep_locals(sent={part.name for part, _ in places})
        self._exchange, self._of = Exchange(torch.cat(vector), group.process_group, places), ended
        self._entered += 1
        self._compare_replicas(ended, self._exchange)

    def _own_parts(self, ended: EndedStep) -> list[Part]:
        _, sharing = self._party()
        own = [self._local_part(key, values) for key, values in self._locals.items()]
        return own + (ended.snapshot.parts(sharing, self._agreed) if ended.snapshot is not None else [])

    def _handshake(self, own: list[Part]) -> None:
        """Agree on the parts that all ranks have in common."""
        group, sharing = self._party()
        self._handshakes -= 1
        known = {name: size for name, size in self._agreed.items() if self._observation.expects(name)}
        known.update({part.name: part.size for part in own})
        fixed = {part.name for part in own if part.fixed}
        self._agreed = parts_in_common(known, fixed, sharing.device, group.process_group)

    def _take(self, *, wait: bool) -> None:
        """Put the sum under way in its places."""
        exchange = self._exchange
        if exchange is None or not (wait or exchange.wait_a_little()):
            return
        exchange.wait(lambda: not self._registered().others_left(self._entered - 1))
        sums, ended, self._exchange = exchange.sums(), self._of, None
        for part, at in exchange.places:
            part.scatter(sums[at : at + part.size].copy())
        observing, news = sums[:2]
        self._sent, self._locals, self._apart = [], {}, None
        self._handshakes = max(self._handshakes, int(news > 0))
        if ended.snapshot is not None:
            size = self._party()[0].size
            ended.snapshot.shared = True
            if observing < size:
                ended.note = f"{observing:.0f} of {size} ranks observed this step"
            self._prepare(ended)
            self._set_apart(ended)

    def _set_apart(self, ended: EndedStep) -> None:
        """Take what does not add up out of the record; the first rank's numbers come back with the next sum."""
        record, snapshot = ended.record, ended.snapshot
        if record is None or snapshot is None:
            return
        sharded = self._party()[0].kind in ("FSDP2", "tensor parallel")
        keys = [key for key in record.metrics if is_local(key, record, snapshot.local_flows(), sharded=sharded)]
        self._locals = {key: record.metrics.pop(key) for key in keys}
        if keys:
            record.notes = (*record.notes, f"of the first rank alone (local): {', '.join(keys)}")
        self._apart = ended

    def _keep_locals(self, sent: Collection[str] = ()) -> None:
        """What does not come back with a sum stays with the first rank, shown and not judged."""
        if self._apart is not None and self.group is not None and self.group.first:
            mine = {key: values for key, values in self._locals.items() if f"local {key}" not in sent}
            self._apart.unshared.update(mine)
        self._locals = {key: values for key, values in self._locals.items() if f"local {key}" in sent}

    def _local_part(self, key: str, values: Array) -> Part:
        """[whether it is there, the numbers]: zeros of all ranks but the first."""
        group, sharing = self._party()
        first, record = group.first, self._apart.record if self._apart is not None else None
        sent = np.concatenate([[1.0], values.reshape(-1)]) if first else np.zeros(1 + values.size)
        device = sharing.device

        def scatter(sums: Array) -> None:
            if sums[0] > 0 and record is not None:
                record.metrics[key] = sums[1:].reshape(values.shape)

        return Part(f"local {key}", 1 + values.size, partial(from_host, sent, device), scatter, fixed=False)

    def _late(self, steps: list[EndedStep], now: EndedStep) -> Tensor:
        """[rows, canary and loss] of the steps since the last sum: that one's own, the unsampled ones, and this one.

        A loss that is given after its step has ended comes with the next sum.
        """
        device = self._party()[1].device
        rows = torch.zeros(self._late_rows + 2, KINDS + 2, dtype=wide(device), device=device)
        for at, ended in enumerate(steps):
            row = rows[min(at, self._late_rows)]
            for counted in ended.canary.source:
                row[:KINDS] += counted[:, 0].to(device, row.dtype, non_blocking=True)
            _add_losses(row, ended.loss)
        _add_losses(rows[-1], now.loss)
        return rows.reshape(-1)

    def _take_late(self, steps: list[EndedStep], now: EndedStep, sums: Array) -> None:
        rows = sums.reshape(-1, KINDS + 2)
        for at, ended in enumerate(steps):
            row = rows[min(at, self._late_rows)]
            # what more steps than rows share is told of the first of them
            ended.canary = HostCopy([torch.from_numpy(row[:KINDS, None] * (at <= self._late_rows))])
            ended.loss.receive(*row[KINDS:])
            ended.loss.take_ranks()
            ended.awaited = False
        now.loss.receive(*rows[-1, KINDS:])

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _compare_replicas(self, ended: EndedStep, exchange: Exchange) -> None:
        """Every `desync_every`-th sum: the largest and the least norm of each replicated parameter over the ranks."""
        group, sharing = self._party()
        every, replicated = self._config.desync_every, self._observation.replicated()
        if replicated is None or not replicated.any() or not every or (self._entered - 1) % every:
            return
        device = sharing.device
        norms = torch.zeros(len(replicated), dtype=wide(device), device=device)
        if ended.snapshot is not None:
            read = self._observation.faults.guard("parts of ranks", ended.snapshot.replicas, device)
            norms = norms if read is None else read
        exchange.extremes = Extremes(torch.cat([norms, -norms]), group.process_group)
        ended.rank_gap = partial(exchange.extremes.gap, replicated)


def is_local(key: str, record: Record, local_flows: Collection[str], *, sharded: bool) -> bool:
    """Whether a metric does not add up over ranks: it is the first rank's, sent to the others with the next sum."""
    spec, flow = record.spec(key), split_key(key)[1]
    if spec.ranks == "first" or (sharded and spec.ranks == "whole"):
        return True
    first = record.flow_names[0] if record.flow_names else None
    return spec.per_flow and (flow or first) in local_flows


def _add_losses(row: Tensor, loss: StepLoss) -> None:
    """Add the sum and the number of what was given for a step since the last sum to the last two entries of a row."""
    for value in loss.send():
        row[KINDS] += value.reshape(()).to(row.device, row.dtype) if isinstance(value, Tensor) else float(value)
        row[KINDS + 1] += 1.0
