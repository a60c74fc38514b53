"""Dead and saturated units of activation modules, counted on the same deposit-on-backward mechanism.

A unit (one feature or channel) is dead in a step when it never switched on: a rectifier's output above 0, that of GELU
or SiLU (which only approach 0) above 1e-5, at any position of any micro-batch. A unit is saturated at a position when
its derivative is small: |tanh z| > tanh 2.5, sigmoid outside (sigmoid -5, sigmoid 5). A rectifier that is a function
call has no module: it is seen at the input of the next parametrised module. Compiled code is not watched for units: how
many there are is known only once it runs.

Axis letters: B batch, T positions (of B*T about 128, evenly spaced, where there are more than
`WatchConfig.positions`), U units (at most `WatchConfig.units`, evenly spaced).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.plan import display_path
from flowscope.discovery.view import ModelView
from flowscope.probes.hooks import Hooks, Switch
from flowscope.probes.layout import AxisReader, hidden_input, hidden_output, is_compiling
from flowscope.probes.payload import local
from flowscope.probes.statistics import feature_last, spaced, wide

SMOOTH_ZERO = 1e-5
"""GELU and SiLU never reach zero: a unit that stays below this is off (TheDeepChecker's limit)."""
RECTIFIED_SHARE = 0.05
"""An input with fewer exact zeros than this did not come from a rectifier, and is not watched further."""
SUMMED = ("tanh", "sigmoid", "input")
"""Kinds that also count single values: saturated, or exactly zero."""
PLACES = 16
"""Up to so many calls of an activation in one forward are places of their own, more are a loop."""
LASTING_POSITIONS = 32
"""A unit that is on for a tenth of the data is off at so many positions in 3 % of cases, at one in 90 %."""
WAITING = 16
"""So many calls of a module wait to be looked at, at most."""

TANH_LIMIT = math.tanh(2.5)
SIGMOID_LIMIT = 1.0 / (1.0 + math.exp(-5.0))


class UnitProbe:
    """Counts of one module: which units were ever on; of all values, how many are saturated or zero."""

    def __init__(self, label: str, kind: str) -> None:
        self.label, self.kind = label, kind
        self.on: dict[tuple[int, int], Tensor] = {}
        self.largest: list[tuple[tuple[int, int], Tensor]] = []
        """Of calls that nobody has looked at yet: the largest value of each unit."""
        self.sums: Tensor | None = None
        self.calls = 0
        self.handle: Any = None
        self._positions = self.taken_positions = 0  # the latter: of what was taken last
        self._window: tuple[NDArray[np.bool_], int] | None = None
        self._lasting = math.nan

    def deposit(
        self, key: tuple[int, int], found: Tensor, sums: Tensor | None, positions: int, gradient: Tensor
    ) -> None:
        """Add what the forward found, now that its gradient arrived.

        Args:
            key: (call within the forward, units).
            found: which units were on; of kinds without `sums`, the largest value of each.
            sums: of the kinds that count single values.
            positions: how many were looked at.
            gradient: unused.
        """
        del gradient
        if key[0] == 0:
            self._positions += positions
        if sums is not None:
            self.add(key, found)
            self.sums = sums if self.sums is None else self.sums + sums
            return
        self.largest.append((key, found))
        if len(self.largest) >= WAITING:
            settle([self])

    def add(self, key: tuple[int, int], on: Tensor) -> None:
        """Note which units were on in a call."""
        held = self.on.get(key)
        self.on[key] = on if held is None else held | on

    def take(self) -> Tensor | None:
        """Return [sums..., on...], None where nothing was deposited, and start again.

        A module that stands in several places (one `self.relu` for all layers) has the units of each place. Where it is
        called more often, it is taken for a loop: then a unit is on where it was on in any call.
        """
        held, sums = self.on, self.sums
        self.on, self.sums = {}, None
        positions, self._positions = self._positions, 0
        if any(call >= PLACES for call, _ in held):
            loop: dict[tuple[int, int], Tensor] = {}
            for (_, width), on in held.items():
                loop[0, width] = on | loop[0, width] if (0, width) in loop else on
            held = loop
        if not held:
            return None
        self.taken_positions = positions
        units = torch.cat([held[key] for key in sorted(held)])
        units = units.to(wide(units.device))
        return units if sums is None else torch.cat([sums, units])

    def vector(self, taken: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [saturated or zero, size, on per unit...] from what `take` gave; 0, 0 where only units are counted."""
        return taken if self.kind in SUMMED else np.concatenate([[0.0, 0.0], taken])

    def lasting(self, on: NDArray[np.float64]) -> float:
        """The share of units that were off at each of the last 32 positions or more; NaN until so many were seen.

        Args:
            on: a record's counts per unit, in the order of the records.
        """
        seen, positions = on > 0, self.taken_positions
        if self._window is not None and self._window[0].shape == seen.shape:
            seen, positions = seen | self._window[0], positions + self._window[1]
        self._window = (seen, positions)
        if positions >= LASTING_POSITIONS:
            self._lasting, self._window = (seen.size - int(np.count_nonzero(seen))) / seen.size, None
        return self._lasting


class UnitObserver:
    """Dead and saturated units of every activation module (and of rectified inputs) of a model."""

    PART = "units"

    def __init__(self, view: ModelView, config: WatchConfig, switch: Switch, hooks: Hooks) -> None:
        self._switch, self._hooks = switch, hooks
        self._units, self._positions = config.units, config.positions
        self.probes: list[UnitProbe] = []
        self._counted: dict[int, weakref.ref[Tensor]] = {}
        readers: dict[int, AxisReader] = {}
        for path, module, kind in view.activations:
            parent = view.model.get_submodule(path.rpartition(".")[0])
            reader = readers.setdefault(id(parent), AxisReader.of(parent))
            if kind != "input":
                probe = UnitProbe(display_path(path), kind)
                probe.handle = hooks.after(module, self.PART, partial(self._after, probe, reader), switch)
            else:
                probe = UnitProbe(f"{display_path(path)}:input", kind)
                probe.handle = hooks.before(module, self.PART, partial(self._before, probe, reader), switch)
            self.probes.append(probe)

    def _after(self, probe: UnitProbe, reader: AxisReader, module: nn.Module, args: Any, kw: Any, output: Any) -> None:
        if not self._switch.paused and not is_compiling():
            x = hidden_output(output, None)
            if x is not None:
                self._count(probe, reader, x)

    def _before(self, probe: UnitProbe, reader: AxisReader, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._switch.paused and not is_compiling():
            x = hidden_input(args, kwargs)
            if x is not None and not self._already_counted(x):
                self._count(probe, reader, x)

    def _already_counted(self, x: Tensor) -> bool:
        held = self._counted.get(id(x))
        return held is not None and held() is x

    def _count(self, probe: UnitProbe, reader: AxisReader, x: Tensor) -> None:
        if not x.requires_grad or not torch.is_grad_enabled() or x.is_complex():
            return
        if probe.kind != "input":
            self._counted[id(x)] = weakref.ref(x)
        states, axis, _ = reader.read(local(x.detach()))
        states = spaced(feature_last(states, axis), self._positions)
        if states.shape[2] > self._units:
            states = states[:, :, :: -(-states.shape[2] // self._units)]
        if not states.numel():
            return
        # the largest entry of a unit tells whether it was ever on, ten times faster than counting how often
        found, sums = states.amax((0, 1)), None
        if (counted := _counted(probe.kind, states, wide(x.device))) is not None:
            found = (found > 0.0) | (states.amin((0, 1)) < 0.0)
            sums = torch.stack([counted, torch.full_like(counted, states.numel())])
        key = (min(probe.calls, PLACES), found.numel())
        probe.calls += 1
        deposit = partial(probe.deposit, key, found, sums, states.shape[0] * states.shape[1])
        self._hooks.on_gradient(x, self.PART, deposit, (probe.label, key[0]))

    def start_forward(self) -> None:
        """The root's forward begins: calls are counted from 0 again."""
        for probe in self.probes:
            probe.calls = 0

    def end_step(self) -> None:
        """Forget which tensors were counted."""
        self._counted.clear()

    def take(self) -> list[tuple[Tensor, UnitProbe]]:
        """Return what the probes that saw a gradient counted (`UnitProbe.vector` reads it), and start again."""
        settle(self.probes)
        taken = []
        for probe in self.probes:
            if probe.on and (vector := probe.take()) is not None:
                taken.append((vector, probe))
        return taken

    def keep(self, rectified: Callable[[UnitProbe], bool]) -> None:
        """Switch off the input probes that `rectified` denies (decided on the host from the first record)."""
        for probe in list(self.probes):
            if probe.kind == "input" and not rectified(probe):
                probe.handle.remove()
                self.probes.remove(probe)


def settle(probes: Sequence[UnitProbe]) -> None:
    """Find the units that were on from the largest values, for many modules at once."""
    alike: dict[Any, list[tuple[UnitProbe, tuple[int, int], Tensor]]] = {}
    for probe in probes:
        waiting, probe.largest = probe.largest, []
        for key, largest in waiting:
            kind = probe.kind, largest.shape, largest.dtype, largest.device
            alike.setdefault(kind, []).append((probe, key, largest))
    for (kind, *_), group in alike.items():
        largest = torch.stack([row for *_, row in group])
        # of a layer that is small as a whole the zero is small too
        zero = SMOOTH_ZERO * largest.amax(1, keepdim=True).clamp(0.0, 1.0) if kind == "smooth" else 0.0
        for (probe, key, _), on in zip(group, (largest > zero).unbind(), strict=True):
            probe.add(key, on)


def _counted(kind: str, states: Tensor, dtype: torch.dtype) -> Tensor | None:
    """How many values are saturated (sigmoid, tanh) or exactly zero (a layer's input)."""
    if kind == "tanh":
        return (states.abs() > TANH_LIMIT).sum(dtype=dtype)
    if kind == "sigmoid":
        return ((states - 0.5).abs() > SIGMOID_LIMIT - 0.5).sum(dtype=dtype)
    if kind == "input":
        return (states == 0).sum(dtype=dtype)
    return None
