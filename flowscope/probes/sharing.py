"""The parts of one snapshot that add up over ranks: rows of points, sites and gates, units, parameters.

Each method of `PartMaker` says how one kind is gathered into the vector that the ranks add up, and puts the sum in the
place of this rank's own numbers, so that the record is made of it as of one process' numbers.

Axis letters: R rows, N parameters, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.instruments.instrument import Taken
from flowscope.probes.deposit import FlowObserver, PointKey
from flowscope.probes.payload import Part, Sharing, flat, from_host, pack, packed_size, unpack
from flowscope.probes.statistics import BACKWARDS, COLUMNS, GRAD_SQUARE, wide
from flowscope.probes.units import SUMMED, UnitProbe

Array = NDArray[np.float64]
Vectors = Sequence[tuple[slice, Sequence[tuple[int, int]]]]
Calls = Mapping[int, tuple[dict[PointKey, float], dict[PointKey, float]]]
SHARE_ROWS = (4, 6)
"""Of the parameters' rows these are shares of the entries, the others are norms, whose squares add up."""


class Place(NamedTuple):
    """Where a point's row is."""

    flow: FlowObserver
    key: PointKey
    row: int


class PartMaker:
    """Makes the parts of one snapshot.

    Args:
        tensors: all tensors of the snapshot, on their devices.
        replaced: filled with (place in `tensors`) -> the arrays of the sum.
        sharing: this rank's share.
    """

    def __init__(self, tensors: list[Tensor], replaced: dict[tuple[int, int], list[Array]], sharing: Sharing) -> None:
        self._tensors, self._replaced, self._sharing = tensors, replaced, sharing

    def _replace(self, where: slice, first: Array) -> None:
        """Put the sum of several devices in the place of the first of them, nothing in that of the others."""
        rest = [np.zeros((0, *first.shape[1:]))] * (where.stop - where.start - 1)
        self._replaced[where.start, where.stop] = [first, *rest]

    def _zeros(self, size: int) -> Tensor:
        device = self._sharing.device
        return torch.zeros(size, dtype=wide(device), device=device)

    def table(self, name: str, where: slice, columns: int) -> list[Part]:
        """All rows of a buffer whose rows are reserved when it is built."""
        held = self._tensors[where]
        if not held or not held[0].shape[0]:
            return []
        rows = max(t.shape[0] for t in held)
        size = rows * columns

        def gather() -> Tensor:
            full = [t for t in held if t.shape[0] == rows]
            return flat(full, self._sharing.device) if self._sharing.states else self._zeros(size)

        return [Part(name, size, gather, lambda total: self._replace(where, total.reshape(rows, columns)))]

    def vector(self, name: str, where: slice) -> list[Part]:
        """One tensor of sums that not every step has."""
        held = self._tensors[where.start]

        def gather() -> Tensor:
            return flat([held], self._sharing.device) if self._sharing.states else self._zeros(held.numel())

        return [Part(name, held.numel(), gather, lambda total: self._replace(where, total), fixed=False)]

    def parts(self, taken: Taken, where: slice, agreed: Mapping[str, int]) -> list[Part]:
        """What an instrument saw, as it says itself how ranks combine it."""
        if callable(taken.adds_up):
            return taken.adds_up(self._sharing, agreed)
        if not taken.adds_up or not taken.tensors:
            return []
        if taken.adds_up == "vector":
            return self.vector(taken.name, where)
        return self.table(taken.name, where, taken.tensors[0].shape[1])

    def rows(self, where: slice, flows: Sequence[FlowObserver], calls: Calls, fixed: int) -> list[Part]:
        """The rows of the points: those known from the structure as one part, each further call as one of its own.

        Args:
            where: the deposit buffer's tensors, [R, COLUMNS] each.
            flows: whose rows they are.
            calls: how often each point was called and gave gradient, by the id of the flow.
            fixed: how many rows are known from the structure.
        """
        held = self._tensors[where]
        count = max((t.shape[0] for t in held), default=0)
        total = np.zeros((count, COLUMNS))
        places = [Place(flow, key, row) for flow in flows for key, row in flow.rows.items() if row < count]
        known = sorted((place for place in places if place.row < fixed), key=lambda place: place.row)
        further = [[place] for place in places if place.row >= fixed]

        def part(name: str, some: list[Place]) -> Part:
            def gather() -> Tensor:
                return self._gather_rows(held, some, calls)

            def scatter(sums: Array) -> None:
                table = sums.reshape(len(some), COLUMNS + 2)
                table[:, GRAD_SQUARE] /= self._sharing.divisor**2
                table[:, [BACKWARDS, COLUMNS, COLUMNS + 1]] /= self._sharing.replicas
                for place, row in zip(some, table, strict=True):
                    total[place.row] = row[:COLUMNS]
                    for counted, number in zip(calls[id(place.flow)], row[COLUMNS:], strict=True):
                        counted[place.key] = float(number)
                self._replace(where, total)

            return Part(name, len(some) * (COLUMNS + 2), gather, scatter, fixed=some is known)

        parts = [part("points", known)] if known else []
        return parts + [part(f"point {some[0].flow.flow.name} {some[0].key}", some) for some in further]

    def _gather_rows(self, held: Sequence[Tensor], places: Sequence[Place], calls: Calls) -> Tensor:
        """The rows of some points that follow one another, and their calls, as one row of numbers."""
        device, (start, stop) = self._sharing.device, (places[0].row, places[-1].row + 1)
        sums = flat([t[start:stop] for t in held if t.shape[0] >= stop], device).view(-1, COLUMNS)
        counts = [[counted.get(place.key, 0) for counted in calls[id(place.flow)]] for place in places]
        out = torch.cat([sums, from_host(np.array(counts), device).view(-1, 2)], dim=1)
        if not self._sharing.states:
            mine = from_host(np.array([float(p.key in p.flow.sharded) for p in places]), device)
            out = torch.where(mine[:, None] > 0, out, 0.0)
            out[:, [BACKWARDS, COLUMNS, COLUMNS + 1]] = 0.0
        return out.reshape(-1)

    def units(
        self,
        taken: Sequence[tuple[slice, UnitProbe]],
        probes: Sequence[UnitProbe],
        agreed: Mapping[str, int],
        absent: dict[UnitProbe, Array],
        positions: dict[UnitProbe, int],
    ) -> list[Part]:
        """The units of each activation that gave gradient: which were ever on, and the sums before them.

        Args:
            taken: the probes that saw a gradient on this rank, and the place of their vectors.
            probes: all probes that are still watched.
            agreed: the names of the parts that the ranks have in common, and their sizes.
            absent: filled with the vectors of probes that saw a gradient on other ranks only.
            positions: at how many positions each was seen; overwritten with the sum.
        """
        parts = []
        for where, probe in taken:
            vector = self._tensors[where.start]
            head = 2 if probe.kind in SUMMED else 0
            count = vector.numel() - head

            def replace(total: Array, where: slice = where) -> None:
                self._replace(where, total)

            parts.append(self._unit_part(probe, (head, count), vector, replace, positions))
        seen = {probe.label for _, probe in taken}
        by_label = {probe.label: probe for probe in probes if probe.label not in seen}
        for name in agreed:
            kind, _, rest = name.partition(" ")
            label, _, units = rest.rpartition(" ")
            if kind == "units" and (other := by_label.get(label)) is not None:

                def keep(total: Array, probe: UnitProbe = other) -> None:
                    absent[probe] = total

                sizes = 2 if other.kind in SUMMED else 0, int(units)
                parts.append(self._unit_part(other, sizes, None, keep, positions))
        return parts

    def _unit_part(
        self,
        probe: UnitProbe,
        sizes: tuple[int, int],
        vector: Tensor | None,
        put: Callable[[Array], None],
        positions: dict[UnitProbe, int],
    ) -> Part:
        """[positions it was seen at, sums (2) of kinds that have them, packed units]."""
        ranks, device, (head, count) = self._sharing.ranks, self._sharing.device, sizes
        size = 1 + head + packed_size(count, ranks)

        def gather() -> Tensor:
            if not self._sharing.states or vector is None:
                return self._zeros(size)
            row = flat([vector], device)
            seen = torch.full_like(row[:1], float(max(1, positions.get(probe, 0))))
            return torch.cat([seen, row[:head], pack(row[head:], ranks)])

        def scatter(sums: Array) -> None:
            if sums[0] > 0:
                positions[probe] = round(float(sums[0]))
                put(np.concatenate([sums[1 : 1 + head], unpack(sums[1 + head :], count, ranks)]))

        return Part(f"units {probe.label} {count}", size, gather, scatter, fixed=False)

    def parameters(self, values: Array, read: NDArray[np.bool_], vectors: Vectors, entries: Array) -> list[Part]:
        """Squares of the parameters' norms, entries left as they were, and what of it was read at all.

        A parameter that several ranks hold is taken from the first of them, the shards of one are added up.

        Args:
            values: [rows, N] of `ParameterObserver.take`; overwritten with the sum.
            read: [rows, N]; overwritten likewise.
            vectors: where in the snapshot's tensors the numbers are that are still on devices, and their (row, N).
            entries: [N] how many entries of each parameter this rank holds.
        """
        rows, count = values.shape
        ranks, owned, shares = self._sharing.ranks, self._sharing.owned, list(SHARE_ROWS)
        cut = rows * count, (rows + len(shares)) * count
        weights = np.where(owned & (entries > 0), entries, 0.0)

        def gather() -> Tensor:
            mine = read & owned
            for _, index in vectors:
                values[tuple(np.array(index).T)] = 0.0
            with np.errstate(invalid="ignore", over="ignore"):
                sums = np.where(mine, np.square(values), 0.0)
                weighted = mine[shares] & (entries > 0)
                sums[shares] = np.where(weighted, values[shares] * weights, 0.0)
            seen = np.where(weighted, weights, 0.0)
            head = from_host(np.concatenate([sums.reshape(-1), seen.reshape(-1)]), self._sharing.device)
            for where, index in vectors:
                self._add_device(head, self._tensors[where.start], index, weights, count)
            flags = from_host(mine.reshape(-1).astype(np.float64), self._sharing.device)
            return torch.cat([head, pack(flags, ranks)])

        def scatter(sums: Array) -> None:
            table = sums[: cut[0]].reshape(rows, count)
            seen = sums[cut[0] : cut[1]].reshape(len(shares), count)
            read[:] = unpack(sums[cut[1] :], rows * count, ranks).reshape(rows, count) > 0
            with np.errstate(all="ignore"):
                values[:] = np.sqrt(table)
                values[shares] = np.where(seen > 0, table[shares] / seen, np.nan)
            values[~read] = np.nan

        size = cut[1] + packed_size(rows * count, ranks)
        return [Part(f"parameters {rows} {count}", size, gather, scatter, fixed=False)]

    def _add_device(
        self, head: Tensor, vector: Tensor, index: Sequence[tuple[int, int]], weights: Array, count: int
    ) -> None:
        """Add numbers that are still on a device at their places, squared or weighted."""
        where = np.array(index)
        norm = ~np.isin(where[:, 0], SHARE_ROWS)
        factors = np.where(norm, self._sharing.owned[where[:, 1]], weights[where[:, 1]])
        device = self._sharing.device
        numbers = flat([vector], device)
        squared = from_host(norm.astype(np.float64), device) > 0
        factor = from_host(factors.astype(np.float64), device)
        places = from_host((where[:, 0] * count + where[:, 1]).astype(np.float64), device).long()
        added = torch.where(factor > 0, torch.where(squared, numbers * numbers, numbers * factor), 0.0)
        head.index_add_(0, places, added)


def owned_by(parameters: Sequence[Any], *, first: bool, first_rank: int) -> NDArray[np.bool_]:
    """Return which parameters this rank adds to the sum: of what several ranks hold, the first one's part.

    Args:
        parameters: tensors, DTensors or None.
        first: whether this rank is the first of those that add up.
        first_rank: that first one's global rank.
    """
    return np.array([_owns(p, first=first, first_rank=first_rank) for p in parameters], dtype=bool)


def _owns(parameter: Any, *, first: bool, first_rank: int) -> bool:
    if not hasattr(parameter, "placements"):
        return first
    mesh = parameter.device_mesh
    here = mesh.get_coordinate()
    if here is None or first_rank not in mesh.mesh.reshape(-1).tolist():
        return False
    return all(not p.is_replicate() or at == 0 for p, at in zip(parameter.placements, here, strict=True))
