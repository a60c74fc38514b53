"""Many processes, one record: ranks that train a model together add up what they deposited, once a sampled step.

Nothing of it is part of what the training's own ranks wait for (docs/scale.md has the costs):

- a counter in the process group's store, one per layout and schedule. Where not all ranks have the same one, because
  they watch different things or not at all, nothing is ever added up: each rank's records are its own, flagged `local`.
  Else they connect as a tree of sockets (`Gathering`, `Node`).
- in the optimizer's step hook of a sampled step a rank hands its numbers over, under the step's stamp (`Clock`).
- in the hook of the step after, the sum is there, or known to never come: all ranks were in this step's backward. A
  rank waits `LIMIT` seconds at most. Losses mostly come after the hook, so a step's loss is in the next sum, and with
  that its record is complete: the same on all ranks, at the same step.
- where a rank left a step out, its sum and the next, which would hold two steps of that rank, are dropped: these
  records hold each rank's own numbers, flagged `local` and `dropped`, and no detector judges them. After that the ranks
  add up again; who counted fewer steps takes over the numbers of the others.

Reading records or closing waits for at most `GRACE` seconds, and enters nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.canary import Canary
from flowscope.observation.observation import Observation
from flowscope.ranks.clock import fingerprint
from flowscope.ranks.groups import Group, several_processes
from flowscope.ranks.membership import SCHEDULE_STEPS, UNEVEN, Membership, layout_of
from flowscope.ranks.wire import Entry, Kind, Message, Row, Stamp, Table, table_of
from flowscope.records import OWN_LOSS, Array, Record
from flowscope.schedule import Schedule
from flowscope.steps.ended import EndedStep
from flowscope.steps.losses import StepLoss
from flowscope.sums.buffer import HostCopy
from flowscope.sums.payload import Part, Sharing, from_host
from flowscope.sums.statistics import wide

KINDS = len(Canary.KINDS)
MOST_LATE = 128
LIMIT = 2.0
"""Seconds that a step's hook waits for the sum of the step before."""
ASK_AFTER = 0.05
"""Seconds after which a rank that waits asks who will not enter the sum."""
AGAIN = 0.3
"""Seconds that it waits once it has waited in vain, until a sum comes again."""
STRIKES = 3
"""After so many sums in a row that did not come in time a rank adds up no more."""
GRACE = 1.0
"""Seconds that reading or closing waits, once a sum, for ranks that are a little behind; a dead one costs no more."""
SHARDED = ("FSDP1", "FSDP2", "tensor parallel")
LOST = "its loss was not added up over ranks"


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

    def take_out(self, ended: EndedStep, *, sharded: bool) -> None:
        """Take them out of the record of a step whose sum is there; `sharded`: ranks hold parts of the parameters."""
        record, snapshot = ended.record, ended.snapshot
        if record is None or snapshot is None:
            return
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


class Counts(Protocol):
    """The steps of a scope.

    Attributes:
        step: the number of the step under way.
        samples: how many were sampled.
    """

    step: int
    samples: int


@dataclass
class UnderWay:
    """A sum under way.

    Attributes:
        stamp: of its step.
        ended: the step.
        parts: what this rank takes of it.
        asked: whether it was waited for already.
    """

    stamp: Stamp
    ended: EndedStep
    parts: list[Part]
    asked: bool = False


class Ranks:
    """The other ranks, as a scope sees them.

    Args:
        observation: whose snapshots add up.
        schedule: when it samples; part of what the ranks must have in common.
        prepare: makes the record of a sampled step whose sums are there.
        count: the scope's steps; the ranks agree on their numbers.

    Attributes:
        others: who they are, and whether they add up.
    """

    def __init__(
        self,
        observation: Observation,
        schedule: Schedule,
        prepare: Callable[[EndedStep], None],
        count: Counts,
    ) -> None:
        self._observation, self._prepare, self._count = observation, prepare, count
        self._schedule = schedule
        self.others = Membership(observation.model, partial(layout_of, observation, schedule))
        self._late, self._local = LateRows(schedule), FirstRanks()
        self._rows: dict[str, Row] = {}
        """The parts that the ranks last had in common, by name."""
        self._under_way: UnderWay | None = None
        self._since: dict[Stamp, EndedStep] = {}
        """Steps that ended since the last sum was begun."""
        self._sent: dict[Stamp, EndedStep] = {}
        """Those whose losses are in it."""
        self._strikes = 0

    # -- the step ------------------------------------------------------------------------------------------------------

    def step_ended(self, ended: EndedStep, *, sampled: bool) -> bool:
        """A step has ended, in its optimizer's hook: take the last sum, and begin the next where it was sampled.

        Returns:
            Whether the step under way has got another number.
        """
        others, clock = self.others, self.others.clock
        others.step_ended(ended.loss)
        if not others.joined:
            if several_processes() and (others.group is None or others.group.size > 1):
                ended.flags = (*ended.flags, "local")
            return False
        why, samples, grown = "", self._count.samples, 0
        try:
            self._take(wait=True)
            grown = self._agree_on_numbers(ended)
            ended.awaited = True
            why = self._why_alone() if sampled else UNEVEN if others.uneven else ""
            if sampled and not why:
                self._enter(ended, samples)
            else:
                others.node().note(Kind.PASSED, clock.stamp)
            if ended.snapshot is not None and not sampled:
                ended.flags = (*ended.flags, "local")  # skipped by the GradScaler: nothing is entered outside of a step
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._since[clock.stamp] = ended
            if why:
                self._give_up(why)
        return grown > 0

    def _why_alone(self) -> str:
        """Why nothing can be added up any more; empty where it can."""
        if self.others.uneven:
            return UNEVEN
        if self._strikes >= STRIKES:
            return f"the other ranks did not answer in time, {STRIKES} times in a row"
        return self.others.left

    def _agree_on_numbers(self, ended: EndedStep) -> int:
        """A step has the largest number that a rank has for it; returns by how much this rank's grow.

        Who may have left a step out tells the number of this one, and hears a larger one in time for the next.
        """
        node, clock = self.others.node(), self.others.clock
        if grown := clock.catch_up(node.inbox.take_numbers()):
            step = self._count.step
            self._count.step += grown
            self._count.samples += sum(bool(self._schedule(missed)) for missed in range(step, step + grown))
        if clock.uneven:
            node.tell(Kind.NUMBER, clock.stamp, ended.step)
        else:
            node.know(clock.stamp, ended.step)
        return grown

    def _give_up(self, why: str) -> None:
        self._under_way = None
        self.others.stay_alone(why)
        self._release()

    def _release(self) -> None:
        """What still waits for other ranks becomes records of this rank's own numbers."""
        for ended in (self._sent | self._since).values():
            if ended.awaited:
                ended.awaited = False
                if ended.snapshot is not None and not ended.snapshot.shared:
                    ended.flags = (*ended.flags, "local")
                elif ended.loss.shared:
                    ended.loss.take_ranks()
                elif ended.snapshot is not None and ended.record is not None:
                    ended.record.notes = (*ended.record.notes, OWN_LOSS)
        self._local.keep(self.others.group)
        self._sent, self._since = {}, {}

    def _drop(self, steps: Iterable[EndedStep]) -> None:
        """A sum did not come: no rank has what these steps still waited for, and none judges a part of it."""
        for ended in steps:
            ended.awaited = False
            if ended.snapshot is None or ended.snapshot.shared:
                ended.loss.values = []
            if ended.snapshot is None or not ended.snapshot.shared:
                ended.flags = (*ended.flags, *(("local",) if ended.snapshot is not None else ()), "dropped")
            elif ended.record is not None:
                ended.record.notes = (*ended.record.notes, LOST)
        self._local.keep(self.others.group)

    def payload(self) -> dict[str, int]:
        """Bytes of the sum by kind of part ("points", "parameters", "units", ...), as the ranks last had in common."""
        sizes: Counter[str] = Counter()
        for name, size, _ in self._rows.values():
            sizes[name.split(" ")[0]] += 8 * size
        return dict(sizes)

    def poll(self) -> None:
        """Take the sum under way where it is there, or comes within `GRACE`."""
        self._take(wait=False)

    def close(self) -> None:
        """Tell the others that this rank enters nothing any more, and let go of what waits for them."""
        if self.others.joined:
            with contextlib.suppress(RuntimeError, OSError):
                self.poll()
        self.others.leave()
        self._under_way = None
        self._release()

    # -- the sum -------------------------------------------------------------------------------------------------------

    def _enter(self, ended: EndedStep, samples: int) -> None:
        """Begin the sum of a sampled step; a rank that is paused, or whose probes failed, enters with zeros."""
        group, clock = self.others.party(), self.others.clock
        sharing = group.sharing(next(self._observation.model.parameters()).device)
        device = sharing.device
        self._sent, self._since = self._since, {}
        # a part of its own in the list of faults: this rank goes on entering sums, with zeros
        own = self._observation.faults.guard("parts of ranks", self._own_parts, ended, sharing)
        if own is None:
            ended.flags = (*ended.flags, "local")
        observed = float(ended.snapshot is not None and own is not None)
        # what must be the same on all ranks, and the larger of it and of its negative are
        same = [fingerprint([clock.before, samples]), fingerprint(self._sent)]
        agreed = np.array([*same, *(-value for value in same), ended.step])
        late, sent = self._late, [*self._sent.values()]
        parts = [
            Part("header", 1, partial(from_host, np.array([observed]), device), lambda sums: None),
            Part("late", late.size, partial(late.gather, sent, ended, device), partial(late.scatter, sent, ended)),
            *(own or ()),
            Part("agreed", len(agreed), partial(from_host, agreed, device), lambda sums: None, largest=True),
            Part("scale", 2, partial(_both, ended.scale, device), lambda sums: None, largest=True),
            *self._replicas(ended, device),
        ]
        table, vector, taken = self._vector(parts, device)
        self._local.keep(group, sent={part.name for part in taken})
        self._under_way = UnderWay(clock.stamp, ended, taken)
        self.others.node().enter(clock.stamp, table, HostCopy([vector]))

    def _own_parts(self, ended: EndedStep, sharing: Sharing) -> list[Part]:
        own = self._local.parts(self.others.party(), sharing.device)
        agreed = {name: size for name, size, _ in self._rows.values()}
        return own + (ended.snapshot.parts(sharing, agreed) if ended.snapshot is not None else [])

    def _vector(self, parts: list[Part], device: torch.device) -> tuple[Table, Tensor, list[Part]]:
        """The vector, what lies where in it, and the parts that this rank has; zeros where others may have more."""
        given = {part.name: part for part in parts}
        rows = {part.name: (part.name, part.size, part.largest) for part in parts}
        absent = {name: row for name, row in self._rows.items() if name not in rows and name != "replicas"}
        rows |= {name: row for name, row in absent.items() if self._observation.expects(name)}
        ordered = tuple(sorted(rows.values(), key=lambda row: (row[2], row[0])))
        table = table_of(ordered)
        vector, taken = [], []
        for name, size, _ in table.rows:
            part = given.get(name)
            numbers = self._observation.faults.guard("parts of ranks", part.gather) if part is not None else None
            if part is not None and numbers is not None and numbers.numel() == part.size == size:
                taken.append(part)
            else:
                numbers = torch.zeros(size, dtype=wide(device), device=device)
            vector.append(numbers)
        return table, torch.cat(vector), taken

    def _take(self, *, wait: bool) -> None:
        """Put the sum under way in its places.

        Args:
            wait: in a step's hook: it has no further time than this. Else `GRACE`, the first time.
        """
        if (under_way := self._under_way) is None:
            return
        node = self.others.node()
        limit = (AGAIN if self._strikes else LIMIT) if wait else (0.0 if under_way.asked else GRACE)
        decided, total = node.inbox.outcome(under_way.stamp, min(limit, ASK_AFTER))
        if not decided and limit > 0:
            node.tell(Kind.ASK, under_way.stamp)
            decided, total = node.inbox.outcome(under_way.stamp, limit)
        under_way.asked = True
        if not decided and not wait:
            return
        self._under_way = None
        if total is not None or not decided:
            self._strikes = 0 if decided else self._strikes + 1
        if not decided:
            node.tell(Kind.VOID, under_way.stamp)
        if total is None or not self._put(under_way, total):
            self._drop([*self._sent.values(), *self._since.values()])
            self._since = {}
        self._sent = {}

    def _put(self, under_way: UnderWay, total: Entry) -> bool:
        """Put a sum in its places; returns whether all ranks have entered the same step, and one step."""
        rows, numbers, ended = total.table.rows, total.numbers, under_way.ended
        found = {row[0]: numbers[place] for row, place in total.table.places.items()}
        before, sent, minus_before, minus_sent, step = found["agreed"]
        self.others.node().inbox.deliver(Message(Kind.NUMBER, under_way.stamp, int(step)))
        self._rows = {row[0]: row for row in rows}
        if before != -minus_before or found["scale"][0] != -found["scale"][1]:
            return False
        together = bool(sent == -minus_sent)
        for part in under_way.parts:
            if part.name in found and (together or not (part.name == "late" or part.name.startswith("local "))):
                part.scatter(found[part.name].copy())
        if together:
            self._local.clear()
        else:
            self._drop(self._sent.values())
        if ended.snapshot is not None:
            group, observing = self.others.party(), float(found["header"][0])
            ended.snapshot.shared = True
            if observing < group.size:
                ended.note = f"{observing:.0f} of {group.size} ranks observed this step"
            self._prepare(ended)
            sharded = group.kind in SHARDED or bool(self._observation.view.own)
            self._local.take_out(ended, sharded=sharded)
        return True

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _replicas(self, ended: EndedStep, device: torch.device) -> list[Part]:
        """Every `desync_every`-th sum: the largest and the least norm of each replicated parameter over the ranks."""
        every = self._observation.config.desync_every
        due = bool(every) and not (self._count.samples - 1) % every
        replicated = self._observation.replicated() if due else None
        if replicated is not None and (own := self._observation.view.own):
            replicated = replicated & [name not in own for name in self._observation.view.parameters.names]
        if replicated is None or not replicated.any():
            return []
        norms = torch.zeros(len(replicated), dtype=wide(device), device=device)
        if ended.snapshot is not None:
            read = self._observation.faults.guard("parts of ranks", ended.snapshot.replicas, device)
            norms = norms if read is None else read

        def scatter(extremes: Array) -> None:
            largest, least = np.split(extremes, 2)
            with np.errstate(all="ignore"):
                gap = np.where(largest > 0, (largest + least) / largest, 0.0)
            ended.rank_gap = np.where(replicated, gap, np.nan)

        return [Part("replicas", 2 * len(replicated), lambda: torch.cat([norms, -norms]), scatter, largest=True)]


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


def _both(scale: Tensor | float | None, device: torch.device) -> Tensor:
    """A loss scale and its negative, zeros where there is none."""
    held = scale if isinstance(scale, Tensor) else from_host(np.array([scale or 0.0]), device)
    held = held.reshape(1).to(device, wide(device), non_blocking=True)
    return torch.cat([held, -held])


def _add_losses(row: Tensor, loss: StepLoss) -> None:
    """Add the sum and the number of what was given for a step since the last sum to the last two entries of a row."""
    for value in loss.send():
        row[KINDS] += value.reshape(()).to(row.device, row.dtype) if isinstance(value, Tensor) else float(value)
        row[KINDS + 1] += 1.0
