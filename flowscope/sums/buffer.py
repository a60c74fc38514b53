"""The deposit buffer: one fp64 row of sums per point, on the device where the statistics arise, read once a flush."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowscope.sums.statistics import Sums, wide
from flowscope.torch_internals import HOOKED_INTERMEDIATES, unchecked

_HOST = torch.device("cpu")
HostSums = NDArray[np.float64] | tuple[float, ...]
WAITING = 1024
"""So many sums of the host wait to be added, at most."""


class DepositBuffer:
    """Rows of sums. A row lives on whichever devices deposited to it; reading adds the devices up.

    fp64 where the device has it (fp32 on MPS). Never registered on the user's module: DDP would broadcast it.

    Args:
        columns: of a row.
        maxima: those of them that hold the largest value >= 0 deposited (`raise_to`), not the sum.
    """

    def __init__(self, columns: int, maxima: Sequence[int] = ()) -> None:
        self.columns, self.maxima = columns, list(maxima)
        self.rows = 0
        self._tensors: dict[torch.device, Tensor] = {}
        self._numbers: NDArray[np.float64] = np.zeros((0, columns))
        self._waiting: list[tuple[int, int, HostSums, np.ufunc]] = []
        """Numbers of the host wait to be added at once: in a hook each addition would find a cold cache."""

    def new_row(self) -> int:
        """Reserve a row and return its number."""
        self.rows += 1
        return self.rows - 1

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Allocate all rows reserved so far on these devices: what a compiled hook adds to must exist before."""
        for device in devices:
            held = self._tensors.get(device)
            if held is None or held.shape[0] < self.rows:
                self._grow(device)

    def add(self, row: int, at: int, sums: Sums) -> None:
        """Add sums to a row from column `at` on: a tensor on its device, plain numbers on the host."""
        if not isinstance(sums, Tensor):
            self._wait(row, at, sums, np.add)
        elif (held := self._held(row, at, sums)) is not None:
            held.add_(sums)

    def raise_to(self, row: int, at: int, values: Sums) -> None:
        """Let a row from column `at` on hold the larger of what it holds and these values, likewise."""
        if not isinstance(values, Tensor):
            self._wait(row, at, values, np.maximum)
        elif (held := self._held(row, at, values)) is not None:
            held.copy_(torch.maximum(held, values.to(held.dtype)))

    def _wait(self, row: int, at: int, sums: HostSums, join: np.ufunc) -> None:
        self._waiting.append((row, at, sums, join))
        if len(self._waiting) >= WAITING:
            self._settle()

    def _held(self, row: int, at: int, sums: Tensor) -> Tensor | None:
        """A row's columns from `at` on, on the device of the sums and as many."""
        held = self._tensors.get(sums.device)
        tracing = torch.compiler.is_compiling()
        if held is None or held.shape[0] <= row:
            if tracing:
                return None  # a traced hook must not allocate: better no number than a broken compilation
            held = self._grow(sums.device)
        if tracing and HOOKED_INTERMEDIATES:
            held = unchecked(held)
        return held[row, at : at + sums.shape[0]]

    def deposit(self, row: int, sums: Sums, gradient: Tensor) -> None:
        """Add sums that have waited for a gradient."""
        self.add(row, 0, sums)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and len(self._numbers) < self.rows:
            self._grow(_HOST)
        for row, at, sums, join in waiting:
            held = self._numbers[row, at : at + len(sums)]
            join(held, sums, out=held)

    def hide(self, row: int, at: int) -> None:
        """Make one entry NaN until it is cleared: what will be added to it is not the whole."""
        for held in self._tensors.values():
            held[row, at].fill_(float("nan"))

    def _grow(self, device: torch.device) -> Tensor:
        grown = torch.zeros(max(self.rows, 8) * 2, self.columns, dtype=wide(device), device=device)
        if (held := self._tensors.get(device)) is not None:
            grown[: held.shape[0]].copy_(held)
        self._tensors[device] = grown
        if device == _HOST:
            self._numbers = grown.numpy()
        return grown

    def clear(self) -> None:
        """Zero every row, without synchronising."""
        self._waiting.clear()
        for tensor in self._tensors.values():
            tensor.zero_()

    def empty(self) -> bool:
        """Whether nothing was deposited since the last `take`; False where only a device could tell."""
        self._settle()
        return all(device.type in ("cpu", "meta") for device in self._tensors) and not self._numbers.any()

    def take(self) -> list[Tensor]:
        """Return a snapshot (still on the devices) of all rows and zero them."""
        self._settle()
        # what was deposited on the meta device has no numbers
        taken = [tensor[: self.rows].clone() for tensor in self._tensors.values() if not tensor.is_meta]
        self.clear()
        return taken


class HostCopy:
    """Device tensors on their way to the host: asynchronous on CUDA through pinned memory and an event."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.source = tensors
        """The tensors where they were made."""
        self._host: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        for tensor in tensors:
            if tensor.is_cuda:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(tensor.device))
                self._events.append(event)
                self._host.append(host)
            elif tensor.is_meta:
                self._host.append(torch.full(tensor.shape, float("nan"), device="cpu"))
            else:
                self._host.append(tensor.cpu())

    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def read(self) -> list[NDArray[np.float64]]:
        """Wait for the copies and return them as fp64 arrays."""
        for event in self._events:
            event.synchronize()
        return [host.double().numpy() for host in self._host]
