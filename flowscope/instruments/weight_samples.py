"""Fixed, evenly spaced entries of many tensors, copied before and after an optimizer step: the true change, cheaply.

What is looked at (which entries, in which order) is planned once and kept while the weights stay where they are. A
sample is then two concatenations a device: the whole small tensors, and equally many runs of each large one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.sums.statistics import at_least_single, is_host, wide
from flowscope.sums.vector_norms import Number, numbers, row_norms
from flowscope.torch_internals import foreach_norm

RUN = 16
"""Entries looked at side by side: single entries would touch a cache line each, which is as slow as reading all."""


_HOST = torch.device("cpu")
Places = tuple[list[int], list[int]]
"""Where tensors begin in memory, and how many entries they have."""


@dataclass
class _Plan:
    """The views of one device's tensors, those looked at whole first, and the copies made of them."""

    indices: list[int]
    places: Places
    order: list[int]
    whole: list[Tensor]
    runs: list[Tensor]
    sizes: NDArray[np.int64]
    exact: list[int]
    """The numbers of the tensors of which every entry is looked at."""
    before: tuple[Tensor, Tensor] | None = None
    norms: list[Number] = field(default_factory=list)
    """Those of the entries before the step, in `order`."""
    ends: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = [*self.sizes.tolist(), *(view.numel() for view in self.runs)]
        self.roots = dict(zip(self.order, np.sqrt(sizes).tolist(), strict=True))
        self._plain = all(view.dtype is torch.float32 and view.dim() == 1 for view in self.whole)

    def copy(self) -> tuple[Tensor, Tensor]:
        """Return the entries as they are now: [entries] of the whole tensors, [tensors, entries] of the rest."""
        rows = self.whole if self._plain else [_row(at_least_single(view)) for view in self.whole]
        whole = torch.cat(rows) if rows else torch.empty(0)
        runs = torch.cat([at_least_single(view) for view in self.runs]) if self.runs else torch.empty(0, RUN)
        return whole, runs.view(len(self.runs), -1) if self.runs else runs


class WeightSamples:
    """Samples of a changing set of tensors, known by number.

    Args:
        entries: all of a tensor up to this size, half as many of a larger one.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._plans: dict[torch.device, _Plan] = {}

    def take_before(self, tensors: dict[int, Tensor]) -> dict[int, Number]:
        """Copy the entries as they are now; return the norms of tensors on the host that are looked at whole."""
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        if all(tensor.is_cpu for tensor in tensors.values()):
            by_device = {_HOST: tensors} if tensors else {}
        else:
            for i, tensor in tensors.items():
                by_device.setdefault(tensor.device, {})[i] = tensor
        self._plans = {device: self._planned(device, held) for device, held in by_device.items()}
        known: dict[int, Number] = {}
        for device, plan in self._plans.items():
            plan.before = plan.copy()
            plan.norms = _norms(*plan.before, plan.sizes)
            if device == _HOST:
                norms = dict(zip(plan.order, plan.norms, strict=True))
                known = {i: norms[i] for i in plan.exact}
        return known

    def changes(self, tensors: dict[int, Tensor]) -> dict[int, tuple[Number, Number, Number]]:
        """Return, for every tensor sampled before: (norm of its entries' change, norm of the entries before it, share).

        The share is that of the entries which are exactly what they were, NaN for a tensor without entries. A tensor
        that has moved or changed its shape since `take_before` is left out.
        """
        out: dict[int, tuple[Number, Number, Number]] = {}
        for plan in self._plans.values():
            if plan.before is None:
                continue
            same = list(tensors) == plan.indices and _places(tensors.values()) == plan.places
            places = zip(plan.indices, *plan.places, strict=True)
            kept = plan.indices if same else {i for i, *at in places if i in tensors and _place(tensors[i]) == at}
            (whole, runs), (whole_before, runs_before) = plan.copy(), plan.before
            plan.before = None
            change = _norms(whole.sub_(whole_before), runs.sub_(runs_before), plan.sizes)
            found = zip(plan.order, zip(change, plan.norms, _zero_shares(plan, whole, runs), strict=True), strict=True)
            out.update(found if same else ((i, numbers) for i, numbers in found if i in kept))
        return out

    def roots(self, changes: Mapping[int, Any]) -> Mapping[int, Number]:
        """The root of the number of entries looked at, of each tensor that `changes` has."""
        found = [plan.roots for plan in self._plans.values()]
        if len(found) == 1 and found[0].keys() == changes.keys():
            return found[0]
        return {i: root for roots in found for i, root in roots.items() if i in changes}

    @property
    def whole(self) -> list[int]:
        """The numbers of the tensors of which every entry is looked at."""
        return [i for plan in self._plans.values() for i in plan.exact]

    def drop(self) -> None:
        """Forget the copies."""
        for plan in self._plans.values():
            plan.before = None

    def _planned(self, device: torch.device, tensors: dict[int, Tensor]) -> _Plan:
        places = _places(tensors.values())
        held = self._plans.get(device)
        if held is not None and held.indices == list(tensors) and held.places == places:
            return held
        whole: dict[int, Tensor] = {}
        runs: dict[int, Tensor] = {}
        for i, tensor in tensors.items():
            view = self._runs(tensor)
            if view is None:
                whole[i] = self._whole(tensor)
            else:
                runs[i] = view
        sizes = np.array([view.numel() for view in whole.values()], dtype=np.int64)
        exact = [i for i, view in whole.items() if view.numel() == _real(tensors[i]).numel()]
        return _Plan(list(tensors), places, [*whole, *runs], list(whole.values()), list(runs.values()), sizes, exact)

    def _runs(self, tensor: Tensor) -> Tensor | None:
        """Evenly spaced runs [runs, RUN] of a tensor too large to be looked at whole, else None."""
        runs = max(1, self._entries // 2 // RUN)
        if not _dense(tensor) or tensor.is_complex() or tensor.numel() <= max(self._entries, runs * RUN):
            return None
        return tensor.as_strided((runs, RUN), (tensor.numel() // runs, 1))

    def _whole(self, tensor: Tensor) -> Tensor:
        """All entries in one row; evenly spaced ones of a large complex tensor, or of one with gaps in memory."""
        real = _real(tensor)
        if _dense(real):
            flat = real.as_strided((real.numel(),), (1,))
            return flat[:: max(1, -(-flat.numel() // self._entries))]
        side = max(1, int(self._entries ** (1.0 / max(1, real.dim()))))
        return real[tuple(slice(None, None, max(1, -(-n // side))) for n in real.shape)]


def _norms(whole: Tensor, runs: Tensor, sizes: NDArray[np.int64]) -> list[Number]:
    """The norm of each tensor's entries, the whole ones first."""
    if is_host(whole) and is_host(runs):
        norms = row_norms(whole, sizes) if len(sizes) else []
        return [*norms, *(torch.linalg.vector_norm(runs, dim=1).tolist() if len(runs) else ())]
    parts = foreach_norm(torch.split(whole, sizes.tolist())) if len(sizes) else []
    return numbers([*parts, *torch.linalg.vector_norm(runs, dim=1).unbind()]) if parts or len(runs) else []


def _zero_shares(plan: _Plan, whole: Tensor, runs: Tensor) -> list[Number]:
    """The share of exact zeros in each tensor's entries, the whole ones first; NaN for one without entries."""
    if is_host(whole) and is_host(runs):
        shares: list[Number] = []
        for entries, sizes in ((whole, plan.sizes), (runs, np.full(len(runs), runs.shape[1]))):
            found = np.flatnonzero(entries.numpy() == 0)
            ends = np.cumsum(sizes)
            counts = np.searchsorted(found, ends) - np.searchsorted(found, ends - sizes)
            with np.errstate(invalid="ignore"):
                shares += (counts / sizes).tolist()
        return shares
    parts = []
    if len(plan.sizes):
        if plan.ends is None:
            plan.ends = torch.tensor([0, *plan.sizes.tolist()], device=whole.device).cumsum(0)
        sums = torch.cat([plan.ends.new_zeros(1), (whole == 0).cumsum(0)])[plan.ends].diff()
        parts.append(sums.to(wide(whole.device)) / plan.ends.diff())
    if len(runs):
        parts.append((runs == 0).sum(1, dtype=wide(runs.device)) / runs.shape[1])
    return numbers(torch.cat(parts).unbind()) if parts else []


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor fills one stretch of memory, whatever the order of its axes (transposed, channels last)."""
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.numel() == 0 or span == tensor.numel()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _place(tensor: Tensor) -> list[int]:
    return [tensor.data_ptr(), tensor.numel()]


def _places(tensors: Iterable[Tensor]) -> Places:
    held = list(tensors)
    return list(map(Tensor.data_ptr, held)), list(map(Tensor.numel, held))


def _row(view: Tensor) -> Tensor:
    return view if view.dim() == 1 else view.reshape(-1)
