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

Reading records or closing waits for at most `all_reduce.GRACE` seconds, and enters nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowscope.config import WatchConfig
from flowscope.hooks.canary import Canary
from flowscope.observation.observation import Observation
from flowscope.ranks.all_reduce import Agreement, Exchange
from flowscope.ranks.groups import Group, several_processes
from flowscope.ranks.membership import SCHEDULE_STEPS, UNEVEN, Membership, Standing, layout_of
from flowscope.records import OWN_LOSS, Array, Record
from flowscope.schedule import Schedule
from flowscope.steps.ended import EndedStep
from flowscope.steps.losses import StepLoss
from flowscope.sums.buffer import HostCopy
from flowscope.sums.payload import Part, Sharing, from_host
from flowscope.sums.statistics import wide

KINDS = len(Canary.KINDS)
MOST_LATE = 128


class LateRows:
    """What comes with the next sum: canary and losses of the steps since the last one, one row a step.

    The last row has the losses of the step that is entered: a loss that is given after its step comes with the next.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @cached_property
    def last(self) -> int:
        """The row that all further steps share: as many as lie between two samples."""
        sampled = [step for step in range(SCHEDULE_STEPS) if self._schedule(step)]
        gaps = [after - before for before, after in itertools.pairwise(sampled)]
        return min(MOST_LATE, max(gaps, default=MOST_LATE))

    @property
    def size(self) -> int:
        """How many numbers."""
        return (self.last + 2) * (KINDS + 2)

    def gather(self, steps: list[EndedStep], now: EndedStep, device: torch.device) -> Tensor:
        """[size] for the steps since the last sum (that one's own among them), and for this one."""
        rows = torch.zeros(self.last + 2, KINDS + 2, dtype=wide(device), device=device)
        for at, ended in enumerate(steps):
            row = rows[min(at, self.last)]
            for counted in ended.canary.source if ended.canary is not None else ():
                row[:KINDS] += counted[:, 0].to(device, row.dtype, non_blocking=True)
            _add_losses(row, ended.loss)
        _add_losses(rows[-1], now.loss)
        return rows.reshape(-1)

    def scatter(self, steps: list[EndedStep], now: EndedStep, sums: Array) -> None:
        """Take the sum over the ranks: with it the steps before this one are complete."""
        rows = sums.reshape(-1, KINDS + 2)
        for at, ended in enumerate(steps):
            row = rows[min(at, self.last)]
            # what more steps than rows share is told of the first of them
            ended.canary = HostCopy([torch.from_numpy(row[:KINDS, None] * (at <= self.last))])
            ended.loss.receive(*row[KINDS:])
            ended.loss.take_ranks()
            ended.awaited = False
        now.loss.receive(*rows[-1, KINDS:])


class FirstRanks:
    """The metrics that do not add up: taken out of the record, and the first rank's come back with the next sum."""

    def __init__(self) -> None:
        self._of: EndedStep | None = None
        self._values: dict[str, Array] = {}

    def take_out(self, ended: EndedStep, group: Group) -> None:
        """Take them out of the record of a step whose sum is there."""
        record, snapshot = ended.record, ended.snapshot
        if record is None or snapshot is None:
            return
        sharded = group.kind in ("FSDP2", "tensor parallel")
        keys = [key for key in record.metrics if is_local(key, record, snapshot.local, sharded=sharded)]
        self._values = {key: record.metrics.pop(key) for key in keys}
        if keys:
            record.notes = (*record.notes, f"of the first rank alone (local): {', '.join(keys)}")
        self._of = ended

    def parts(self, group: Group, device: torch.device) -> list[Part]:
        """For each [whether it is there, the numbers]: zeros of all ranks but the first."""
        record = self._of.record if self._of is not None else None
        return [self._part(key, values, record, group, device) for key, values in self._values.items()]

    @staticmethod
    def _part(key: str, values: Array, record: Record | None, group: Group, device: torch.device) -> Part:
        sent = np.concatenate([[1.0], values.reshape(-1)]) if group.first else np.zeros(1 + values.size)

        def scatter(sums: Array) -> None:
            if sums[0] > 0 and record is not None:
                record.metrics[key] = sums[1:].reshape(values.shape)

        return Part(f"local {key}", 1 + values.size, partial(from_host, sent, device), scatter, fixed=False)

    def keep(self, group: Group | None, sent: Collection[str] = ()) -> None:
        """What does not come back with a sum stays with the first rank, shown and not judged."""
        if self._of is not None and group is not None and group.first:
            mine = {key: values for key, values in self._values.items() if f"local {key}" not in sent}
            self._of.unshared.update(mine)
        self._values = {key: values for key, values in self._values.items() if f"local {key}" in sent}

    def clear(self) -> None:
        """They came back."""
        self._of, self._values = None, {}


class Ranks:
    """The other ranks, as a scope sees them.

    Args:
        observation: whose snapshots add up.
        config: the scope's settings.
        schedule: when it samples; part of what the ranks must have in common.
        prepare: makes the record of a sampled step whose sums are there.

    Attributes:
        others: who they are, and whether they add up.
    """

    def __init__(
        self, observation: Observation, config: WatchConfig, schedule: Schedule, prepare: Callable[[EndedStep], None]
    ) -> None:
        self._observation, self._config, self._prepare = observation, config, prepare
        self.others = Membership(observation.model, partial(layout_of, observation, config, schedule))
        self._agreement, self._late, self._local = Agreement(), LateRows(schedule), FirstRanks()
        self._exchange: Exchange | None = None
        self._of: Any = None
        """The step whose sum is under way."""
        self._since: list[EndedStep] = []
        self._sent: list[EndedStep] = []
        self._sharing: Sharing | None = None

    # -- the step ------------------------------------------------------------------------------------------------------

    def step_ended(self, ended: EndedStep, *, sampled: bool) -> None:
        """A step has ended, in its optimizer's hook: take the last sum, and begin the next where it was sampled."""
        others = self.others
        others.step_ended()
        if not others.joined:
            if several_processes() and (others.group is None or others.group.size > 1):
                ended.flags = (*ended.flags, "local")
            return
        why = ""
        try:
            self._take(wait=True)
            ended.awaited = True
            if others.uneven:
                why = UNEVEN
            elif sampled and others.others_left(others.entered):
                why = "another rank has closed its scope"
            elif sampled:
                self._enter(ended)
            elif ended.snapshot is not None:
                ended.flags = (*ended.flags, "local")  # skipped by the GradScaler: nothing is entered outside of a step
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            # else a rank has died: the training's own collectives tell the user
            if not isinstance(error, (RuntimeError, OSError)):
                raise
        finally:
            self._since.append(ended)
            if why:
                self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.others.leave()
        self._exchange = None
        self.others.stay_alone(why)
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
                    ended.record.notes = (*ended.record.notes, OWN_LOSS)
        self._local.keep(self.others.group)
        self._sent, self._since = [], []

    def payload(self) -> dict[str, int]:
        """Bytes of the sum by kind of part ("points", "parameters", "units", ...), as the ranks last agreed."""
        sizes: Counter[str] = Counter()
        for name, size in (self._sizes() if self.others.joined else self._agreement.sizes).items():
            sizes[name.split(" ")[0]] += 8 * size
        return dict(sizes)

    def _sizes(self) -> dict[str, int]:
        return {"header": 2, "late": self._late.size, **self._agreement.sizes}

    def poll(self) -> None:
        """Take the sum under way where it is there, or comes within `GRACE`."""
        if self._exchange is not None:
            self._take(wait=False)

    def close(self) -> None:
        """Tell the others that this rank enters nothing any more, and let go of what waits for them."""
        if self.others.joined:
            with contextlib.suppress(RuntimeError, OSError):
                self.poll()
            self.others.leave()
        self.others.standing, self._exchange = Standing.ALONE, None
        self._release()

    # -- the sum -------------------------------------------------------------------------------------------------------

    def _enter(self, ended: EndedStep) -> None:
        """Begin the sum of a sampled step; a rank that is paused, or whose probes failed, enters with zeros."""
        group, device = self.others.party(), self._share().device
        # a part of its own in the list of faults: this rank goes on entering sums, with zeros
        made = self._observation.faults.guard("parts of ranks", self._own_parts, ended)
        own = made or []
        if made is None:
            ended.flags = (*ended.flags, "local")
        self._agreement.renew(own, self._observation.expects, device, group.process_group)
        header = np.array([float(ended.snapshot is not None and made is not None), float(self._agreement.news(own))])
        self._sent, self._since = self._since, []
        late, since = self._late, self._sent
        first = [
            Part("header", 2, partial(from_host, header, device), lambda sums: None),
            Part("late", late.size, partial(late.gather, since, ended, device), partial(late.scatter, since, ended)),
        ]
        vector, places = self._vector({part.name: part for part in [*first, *own]}, device)
        self._local.keep(group, sent={part.name for part, _ in places})
        self._exchange, self._of = Exchange(vector, group.process_group, places), ended
        self.others.entered += 1
        self._compare_replicas(ended, self._exchange, device)

    def _share(self) -> Sharing:
        """This rank's share."""
        if self._sharing is None:
            self._sharing = self.others.party().sharing(next(self._observation.model.parameters()).device)
        return self._sharing

    def _own_parts(self, ended: EndedStep) -> list[Part]:
        sharing = self._share()
        own = self._local.parts(self.others.party(), sharing.device)
        return own + (ended.snapshot.parts(sharing, self._agreement.sizes) if ended.snapshot is not None else [])

    def _vector(self, parts: dict[str, Part], device: torch.device) -> tuple[Tensor, list[tuple[Part, int]]]:
        """The vector, and where in it this rank's own parts lie; zeros for those of which it has nothing."""
        vector, places, at = [], [], 0
        for name, size in self._sizes().items():
            part = parts.get(name)
            numbers = self._observation.faults.guard("parts of ranks", part.gather) if part is not None else None
            if part is not None and numbers is not None and numbers.numel() == size:
                places.append((part, at))
            else:
                numbers = torch.zeros(size, dtype=wide(device), device=device)
            vector.append(numbers)
            at += size
        return torch.cat(vector), places

    def _take(self, *, wait: bool) -> None:
        """Put the sum under way in its places."""
        exchange, others = self._exchange, self.others
        if exchange is None or not (wait or exchange.wait_a_little()):
            return
        exchange.wait(lambda: not others.others_left(others.entered - 1))
        sums, ended, self._exchange = exchange.sums(), self._of, None
        for part, at in exchange.places:
            part.scatter(sums[at : at + part.size].copy())
        observing, news = sums[:2]
        self._sent = []
        self._local.clear()
        if news > 0:
            self._agreement.reopen()
        if ended.snapshot is not None:
            group = others.party()
            ended.snapshot.shared = True
            if observing < group.size:
                ended.note = f"{observing:.0f} of {group.size} ranks observed this step"
            self._prepare(ended)
            self._local.take_out(ended, group)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _compare_replicas(self, ended: EndedStep, exchange: Exchange, device: torch.device) -> None:
        """Every `desync_every`-th sum: the largest and the least norm of each replicated parameter over the ranks."""
        every, replicated = self._config.desync_every, self._observation.replicated()
        if replicated is None or not replicated.any() or not every or (self.others.entered - 1) % every:
            return
        norms = torch.zeros(len(replicated), dtype=wide(device), device=device)
        if ended.snapshot is not None:
            read = self._observation.faults.guard("parts of ranks", ended.snapshot.replicas, device)
            norms = norms if read is None else read
        ended.rank_gap = exchange.compare(norms, self.others.party().process_group, replicated)


def is_local(key: str, record: Record, local: Collection[str], *, sharded: bool) -> bool:
    """Whether a metric does not add up over ranks: it is the first rank's, sent to the others with the next sum.

    Args:
        key: of the metric.
        record: that has it.
        local: the metrics that were made of one rank's numbers alone.
        sharded: whether a rank holds parts of the parameters.
    """
    ranks = record.spec(key).ranks
    return ranks == "first" or (sharded if ranks == "whole" else key in local)


def _add_losses(row: Tensor, loss: StepLoss) -> None:
    """Add the sum and the number of what was given for a step since the last sum to the last two entries of a row."""
    for value in loss.send():
        row[KINDS] += value.reshape(()).to(row.device, row.dtype) if isinstance(value, Tensor) else float(value)
        row[KINDS + 1] += 1.0
