"""What one step showed of the parameters: ten numbers each, how ranks add them up, and the metrics made of them.

Axis letters: N parameters, R the members of `Row`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.instruments.instrument import Array
from flowscope.sums.payload import Part, Sharing, flat, from_host, packed, packed_size, unpack
from flowscope.sums.statistics import wide
from flowscope.sums.vector_norms import Number
from flowscope.torch_internals import is_flattened


class Row(IntEnum):
    """What is read of each parameter."""

    NORM = 0
    GRADIENT = 1
    """Norm of the gradient that the optimizer used."""
    CHANGE = 2
    """Norm of the change of the sampled entries."""
    BEFORE = 3
    """Norm of the sampled entries before the step."""
    UNCHANGED = 4
    """Share of the sampled entries that the step left exactly as they were."""
    RAW = 5
    """Norm of the gradient at the end of backward, times the loss scale."""
    UNTOUCHED = 6
    """Whether the gradient is since then the same version of the same tensor."""
    CARRIED = 7
    """Norm of what `.grad` held before this step's gradients arrived."""
    SAMPLED = 8
    """Root of the number of sampled entries: as the norm of as many ones it adds up like the other norms."""
    SAME = 9
    """Share of all entries that the step left as they were, or whether it left all: where all were looked at."""


SHARES = [Row.UNCHANGED, Row.UNTOUCHED, Row.SAME]
"""These are shares of the entries, the others are norms, whose squares add up."""


class ParameterTable:
    """The numbers of one step; those on devices stay there until `read`, or until the ranks add them up.

    Args:
        count: N.
        found: what was read, by parameter; what is missing is NaN.
    """

    def __init__(self, count: int, found: Mapping[Row, Mapping[int, Number]]) -> None:
        self.values = np.full((len(Row), count), np.nan)
        self.seen = np.zeros(self.values.shape, dtype=bool)
        """[R, N] what was read at all."""
        self._on_devices: list[tuple[Tensor, list[tuple[Row, int]]]] = []
        self._summed = False
        self.not_updated: list[int] = []
        """Parameters whose update was not seen whole: an optimizer found only now makes the rest of it."""
        columns: dict[tuple[torch.device, torch.dtype], list[tuple[Row, int, Tensor]]] = {}
        for row, numbers in found.items():
            self.seen[row][_indices(numbers)] = True
            known = numbers
            if not set(map(type, numbers.values())) <= {float}:
                known = {i: value for i, value in numbers.items() if not isinstance(value, Tensor)}
                for i, value in numbers.items():
                    if isinstance(value, Tensor):
                        columns.setdefault((value.device, value.dtype), []).append((row, i, value))
            self.values[row][_indices(known)] = np.fromiter(known.values(), np.float64, len(known))
        for items in columns.values():
            vector = torch.stack([value for *_, value in items])
            self._on_devices.append((vector, [(row, i) for row, i, _ in items]))

    @property
    def count(self) -> int:
        """N."""
        return int(self.values.shape[1])

    @property
    def tensors(self) -> list[Tensor]:
        """The numbers that are still on devices."""
        return [vector for vector, _ in self._on_devices]

    def read(self, host: Sequence[Array]) -> None:
        """Put the host's copies of `tensors` in their places, unless the sums of all ranks are there."""
        if not self._summed:
            for (_, index), numbers in zip(self._on_devices, host, strict=True):
                self.values[tuple(np.array(index).T)] = numbers

    def norms(self, device: torch.device) -> Tensor:
        """[N] this rank's norms before the step, 0 where not read."""
        norms = torch.zeros(self.count, dtype=wide(device), device=device)
        norms = norms + from_host(np.nan_to_num(self.values[Row.NORM], posinf=np.inf), device)
        for vector, index in self._on_devices:
            rows = [at for at, (row, _) in enumerate(index) if row is Row.NORM]
            places = torch.tensor([index[at][1] for at in rows], dtype=torch.long)
            if rows:
                norms.index_copy_(0, places.to(device), vector.to(device, norms.dtype)[rows[0] : rows[-1] + 1])
        return norms

    # -- over ranks ----------------------------------------------------------------------------------------------------

    def part(self, name: str, sharing: Sharing, owned: NDArray[np.bool_], entries: Array) -> Part:
        """Squares of the norms, entries left as they were, and what of it was read at all, as one part.

        A parameter that several ranks hold is taken from the first of them, the shards of one are added up.

        Args:
            name: of the part.
            sharing: this rank's share.
            owned: [N] which parameters this rank adds.
            entries: [N] how many entries of each parameter this rank holds.
        """
        rows, count = self.values.shape
        ranks = sharing.ranks
        cut = rows * count, (rows + len(SHARES)) * count
        weights = np.where(owned & (entries > 0), entries, 0.0)

        def gather() -> Tensor:
            mine = self.seen & owned
            for _, index in self._on_devices:
                self.values[tuple(np.array(index).T)] = 0.0
            with np.errstate(invalid="ignore", over="ignore"):
                sums = np.where(mine, np.square(self.values), 0.0)
                weighted = mine[SHARES] & (entries > 0)
                sums[SHARES] = np.where(weighted, self.values[SHARES] * weights, 0.0)
            seen = np.where(weighted, weights, 0.0)
            flags = packed(mine.reshape(-1), ranks)
            head = from_host(np.concatenate([sums.reshape(-1), seen.reshape(-1), flags]), sharing.device)
            for vector, index in self._on_devices:
                _add_device(head, flat([vector], sharing.device), np.array(index), owned, weights)
            return head

        def scatter(sums: Array) -> None:
            table = sums[: cut[0]].reshape(rows, count)
            seen = sums[cut[0] : cut[1]].reshape(len(SHARES), count)
            self.seen[:] = unpack(sums[cut[1] :], rows * count, ranks).reshape(rows, count) > 0
            with np.errstate(all="ignore"):
                self.values[:] = np.sqrt(table)
                self.values[SHARES] = np.where(seen > 0, table[SHARES] / seen, np.nan)
            self.values[~self.seen] = np.nan
            self._summed = True

        size = cut[1] + packed_size(rows * count, ranks)
        return Part(f"{name} {rows} {count}", size, gather, scatter, fixed=False)

    # -- the metrics ---------------------------------------------------------------------------------------------------

    def metrics(self, scale: float) -> dict[str, Array]:
        """The metrics of `flowscope.specs.PARAMETERS` that come of these numbers, [N] or [1].

        param_norm, param_grad_norm: NaN where not read (frozen, gradient None), inf where the tensor holds non-finite
        entries. update_rms = sqrt(mean dw²). update_ratio = |dw| / |w|; NaN where the weights were exactly zero before
        the step. param_unchanged: the share of entries that stayed as they were. param_grad_norm_raw: the gradient norm
        before clipping, where it was read or where nothing touched the gradient since. clip_ratio [1]: total gradient
        norm after over before, NaN unless all of it is known. grad_carried [1]: what was in `.grad` before the step's
        gradients, over what the step used.
        param_still: 1 where the step left every entry, NaN where not all were looked at.

        Args:
            scale: what the loss was multiplied by in backward.
        """
        values, seen = self.values, self.seen
        for row in (Row.CHANGE, Row.UNCHANGED, Row.SAME):
            values[row, self.not_updated] = np.nan
            seen[row, self.not_updated] = False
        values[Row.RAW] /= scale
        norm, gradient, change, before, _, raw, untouched, held, sampled, same = np.where(
            seen & ~np.isfinite(values), np.inf, values
        )
        with np.errstate(all="ignore"):
            ratio = np.where(before > 0, change / before, np.nan)
            raw = np.where(np.isnan(raw) & (untouched == 1), gradient, raw)
            used = ~np.isnan(gradient)
            # by the largest first: squares of norms may leave the range of fp64
            largest = np.max(raw[used], initial=0.0)
            totals = [np.sqrt(np.sum((total[used] / largest) ** 2)) for total in (gradient, raw)]
            clip = totals[0] / totals[1]
            looked = ~np.isnan(held) & used
            carried = np.sqrt(np.sum(held[looked] ** 2)) / np.sqrt(np.sum(gradient[looked] ** 2))
        return {
            "param_norm": norm,
            "param_grad_norm": gradient,
            "param_grad_norm_raw": raw,
            "clip_ratio": np.array([clip]),
            "grad_carried": np.array([carried]),
            "update_ratio": ratio,
            "update_rms": change / np.where(sampled > 0, sampled, np.nan),
            "param_unchanged": values[Row.UNCHANGED],
            "param_still": np.where(np.isnan(same), np.nan, same == 1),
        }


def _indices(numbers: Mapping[int, Number]) -> NDArray[np.intp]:
    return np.fromiter(numbers, np.intp, len(numbers))


def _add_device(
    head: Tensor, numbers: Tensor, index: NDArray[np.int64], owned: NDArray[np.bool_], weights: Array
) -> None:
    """Add numbers [M] that are still on a device at their (row, parameter) [M, 2], squared or weighted."""
    rows, parameters = index.T
    norm = ~np.isin(rows, SHARES)
    squared = from_host(norm.astype(np.float64), head.device) > 0
    factor = from_host(np.where(norm, owned[parameters], weights[parameters]).astype(np.float64), head.device)
    places = from_host((rows * len(weights) + parameters).astype(np.float64), head.device).long()
    head.index_add_(0, places, torch.where(factor > 0, torch.where(squared, numbers * numbers, numbers * factor), 0.0))


def owned_by(parameters: Sequence[object], sharing: Sharing) -> NDArray[np.bool_]:
    """Return which parameters this rank adds to the sum: of what several ranks hold, the first one's part.

    Args:
        parameters: tensors, DTensors or None.
        sharing: this rank's share.
    """
    return np.array([_owns(p, first=sharing.first, first_rank=sharing.first_rank) for p in parameters], dtype=bool)


def _owns(parameter: object, *, first: bool, first_rank: int) -> bool:
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return first or is_flattened(parameter)
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    here = mesh.get_coordinate()
    if here is None or first_rank not in mesh.mesh.reshape(-1).tolist():
        return False
    return all(not p.is_replicate() or at == 0 for p, at in zip(placements, here, strict=True))
