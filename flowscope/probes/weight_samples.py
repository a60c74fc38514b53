"""Fixed, evenly spaced entries of many tensors, copied before and after an optimizer step: the true change, cheaply.

What is looked at (which entries, in which order) is planned once and kept while the weights stay where they are; a
sample is then one concatenation a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowscope.probes.norms import Number, numbers

RUN = 16
"""Entries looked at side by side: single entries would touch a cache line each, which is as slow as reading all."""


@dataclass
class _Plan:
    """The views of one device's tensors and the flat copies made of them."""

    indices: list[int]
    places: list[tuple[int, int]]
    views: list[Tensor]
    sizes: list[int] = field(default_factory=list)
    before: Tensor | None = None


class WeightSamples:
    """Samples of a changing set of tensors, known by number.

    Args:
        entries: at most this many entries a tensor; all of a smaller one.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._plans: dict[torch.device, _Plan] = {}

    def take_before(self, tensors: dict[int, Tensor]) -> None:
        """Copy the entries as they are now."""
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for i, tensor in tensors.items():
            by_device.setdefault(tensor.device, {})[i] = tensor
        self._plans = {device: self._planned(device, held) for device, held in by_device.items()}
        for plan in self._plans.values():
            plan.before = _flat(plan.views)

    def changes(self, tensors: dict[int, Tensor]) -> dict[int, tuple[Number, Number]]:
        """Return, for every tensor sampled before, the norms of its entries' change and of the entries before it.

        A tensor that has moved or changed its shape since `take_before` is left out.
        """
        out: dict[int, tuple[Number, Number]] = {}
        for plan in self._plans.values():
            if plan.before is None:
                continue
            kept = [i in tensors and _place(tensors[i]) == at for i, at in zip(plan.indices, plan.places, strict=True)]
            change = torch.split(_flat(plan.views).sub_(plan.before), plan.sizes)
            changed = numbers(torch._foreach_norm(change))
            before = numbers(torch._foreach_norm(torch.split(plan.before, plan.sizes)))
            pairs = zip(plan.indices, changed, before, kept, strict=True)
            out.update({i: (after, held) for i, after, held, right in pairs if right})
            plan.before = None
        return out

    def drop(self) -> None:
        """Forget the copies."""
        for plan in self._plans.values():
            plan.before = None

    def _planned(self, device: torch.device, tensors: dict[int, Tensor]) -> _Plan:
        places = [_place(tensor) for tensor in tensors.values()]
        held = self._plans.get(device)
        if held is not None and held.indices == list(tensors) and held.places == places:
            return held
        views = [self._view(tensor) for tensor in tensors.values()]
        return _Plan(list(tensors), places, views, [view.numel() for view in views])

    def _view(self, tensor: Tensor) -> Tensor:
        """The entries looked at: all, or evenly spaced runs of a cache line (slices, where there is no flat order)."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        count = real.numel()
        if not _dense(real):
            side = max(1, int(self._entries ** (1.0 / max(1, real.dim()))))
            return real[tuple(slice(None, None, max(1, -(-n // side))) for n in real.shape)]
        if count <= self._entries:
            return real.as_strided((count,), (1,))
        runs = max(1, self._entries // RUN)
        return real.as_strided((runs, min(RUN, count)), (count // runs, 1))


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor fills one stretch of memory, whatever the order of its axes (transposed, channels last)."""
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.numel() == 0 or span == tensor.numel()


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _flat(views: list[Tensor]) -> Tensor:
    views = [v if v.dim() == 1 else v.reshape(-1) for v in views]
    return torch.cat([v if v.dtype == torch.float32 else v.float() for v in views])
