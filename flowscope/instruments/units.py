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
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import AxisReader, hidden_input, hidden_output, is_compiling
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.payload import Part, Sharing, flat, local, pack, packed, packed_size, unpack
from flowscope.sums.statistics import feature_last, spaced, wide

SMOOTH_ZERO = 1e-5
"""GELU and SiLU never reach zero: a unit that stays below this is off (TheDeepChecker's limit)."""
RECTIFIED_SHARE = 0.05
"""An input with fewer exact zeros than this did not come from a rectifier, and is not watched further."""
BOUNDED = ("sigmoid", "tanh")
"""Kinds that saturate; units of the others are dead."""
SUMMED = (*BOUNDED, "input")
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
            for (_, width), on in held.items():
                self.add((0, width), on)
            held, self.on = self.on, {}
        if not held:
            return None
        self.taken_positions = positions
        units = torch.cat([held[key] for key in sorted(held)])
        units = units.to(wide(units.device))
        return units if sums is None else torch.cat([sums, units])

    def vector(self, taken: Array) -> Array:
        """Return [saturated or zero, size, on per unit...] from what `take` gave; 0, 0 where only units are counted."""
        return taken if self.kind in SUMMED else np.concatenate([[0.0, 0.0], taken])

    def lasting(self, on: Array, positions: int) -> float:
        """The share of units that were off at each of the last 32 positions or more; NaN until so many were seen.

        Args:
            on: a record's counts per unit, in the order of the records.
            positions: at how many positions they were counted.
        """
        seen = on > 0
        if self._window is not None and self._window[0].shape == seen.shape:
            seen, positions = seen | self._window[0], positions + self._window[1]
        self._window = (seen, positions)
        if positions >= LASTING_POSITIONS:
            self._lasting, self._window = _off_share(seen), None
        return self._lasting


_units = partial(Metric, view="Depth", rows="modules", bounds=(0.0, 1.0))


class Units(Instrument):
    """Dead and saturated units of every activation module (and of rectified inputs) of a model."""

    name = "units"
    metrics = (
        _units("dead_fraction", "Share of units that are off for the whole batch.", healthy="under 0.1", logged=True),
        _units(
            "dead_lasting",
            "Share of units off at each of the last 32 positions or more.",
            healthy="under 0.4; alert over 0.7",
        ),
        _units(
            "saturation",
            "Share of values in the flat tails of tanh or sigmoid.",
            formula="share of |z| > 2.5 (tanh) or > 5 (sigmoid)",
            healthy="under 0.5",
        ),
    )

    def __init__(self, units: int, positions: int) -> None:
        self._units, self._positions = units, positions
        self._probes: list[UnitProbe] = []
        self._counted: dict[int, weakref.ref[Tensor]] = {}
        self._first = True

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One."""
        return [cls(config.units, config.positions)]

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what activations return, and at what layers with weights are given."""
        self._switch, self._hooks = hooks.switch, hooks
        reader_of = cache(lambda path: AxisReader.of(view.model.get_submodule(path)))
        for path, module, kind in view.activations:
            register, at = (hooks.before, ":input") if kind == "input" else (hooks.after, "")
            probe = UnitProbe(f"{display_path(path)}{at}", kind)
            count = partial(self._count, probe, reader_of(path.rpartition(".")[0]))
            probe.handle = register(module, self.fuse, count, hooks.switch)
            self._probes.append(probe)

    def _count(
        self, probe: UnitProbe, reader: AxisReader, module: nn.Module, args: Any, kwargs: Any, *returned: Any
    ) -> None:
        """Count what an activation returned or, before it runs, what a layer with weights is given."""
        if self._switch.paused or is_compiling() or not torch.is_grad_enabled():
            return
        x = hidden_output(returned[0], None) if returned else hidden_input(args, kwargs)
        if x is None or not x.requires_grad or x.is_complex():
            return
        if returned:
            self._counted[id(x)] = weakref.ref(x)
        elif (held := self._counted.get(id(x))) is not None and held() is x:
            return  # what an activation returned
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
        self._hooks.on_gradient(x, self.fuse, deposit, (probe.label, key[0]))

    def start_forward(self) -> None:
        """The root's forward begins: calls are counted from 0 again."""
        for probe in self._probes:
            probe.calls = 0

    def take(self) -> Taken:
        """What the probes that saw a gradient counted (`UnitProbe.vector` reads it)."""
        settle(self._probes)
        vectors = {probe: vector for probe in self._probes if probe.on and (vector := probe.take()) is not None}
        counted = Counted(vectors, self._probes)
        return Taken(self.name, list(vectors.values()), partial(self._read, counted), counted.parts)

    def discard(self) -> None:
        """Forget what was counted."""
        for probe in self._probes:
            if probe.on or probe.largest:
                probe.largest = []
                probe.take()

    def drop(self) -> None:
        """Forget also which tensors were looked at."""
        self.discard()
        self._counted.clear()

    def expects(self, part: str) -> bool:
        """Not the units of inputs that are watched no further."""
        kind, _, rest = part.partition(" ")
        return kind != self.name or rest.rpartition(" ")[0] in {probe.label for probe in self._probes}

    def _read(self, counted: Counted, out: RecordBuilder, parts: list[Array]) -> None:
        vectors = {probe: probe.vector(counts) for probe, counts in counted.of_all_ranks(parts).items()}
        if self._first and vectors:
            self._first = False
            self._leave_unrectified(vectors)
        vectors = {probe: vector for probe, vector in vectors.items() if probe in self._probes}
        dead = {probe: vector[2:] for probe, vector in vectors.items() if probe.kind not in BOUNDED}
        bounded = {probe: vector for probe, vector in vectors.items() if probe.kind in BOUNDED}
        labels = [probe.label for probe in dead]
        if dead:
            out.add("dead_fraction", np.array([_off_share(on) for on in dead.values()]), labels)
        if bounded:
            shares = np.array([_share(vector) for vector in bounded.values()])
            out.add("saturation", shares, [probe.label for probe in bounded])
        if dead:
            lasting = [probe.lasting(on, counted.positions.get(probe, 0)) for probe, on in dead.items()]
            out.add("dead_lasting", np.array(lasting), labels)

    def _leave_unrectified(self, vectors: Mapping[UnitProbe, Array]) -> None:
        """After the first record: inputs that did not come from a rectifier are watched no further."""
        for probe in list(self._probes):
            if probe.kind == "input" and not (probe in vectors and _share(vectors[probe]) >= RECTIFIED_SHARE):
                probe.handle.remove()
                self._probes.remove(probe)


class Counted:
    """The units of one step, and how ranks add them up: a unit is off where it is off on all of them.

    Args:
        vectors: of each probe that saw a gradient on this rank, its [sums (2) of kinds that have them, units].
        watched: all probes.
    """

    def __init__(self, vectors: Mapping[UnitProbe, Tensor], watched: Sequence[UnitProbe]) -> None:
        self._vectors, self._watched = vectors, watched
        self.positions = {probe: probe.taken_positions for probe in vectors}
        """At how many positions each was seen, on all ranks where they add up."""
        self._sums: dict[UnitProbe, Array] = {}

    def of_all_ranks(self, own: Sequence[Array]) -> dict[UnitProbe, Array]:
        """What was counted: the sums over ranks where there are any, else this rank's own."""
        return {**dict(zip(self._vectors, own, strict=True)), **self._sums}

    def parts(self, sharing: Sharing, agreed: Mapping[str, int]) -> list[Part]:
        """One part a probe: those that saw a gradient here, and those of which other ranks are known to have seen one.

        A part is [positions it was seen at, sums (2), packed units].
        """
        own = {probe: vector.numel() - _head(probe) for probe, vector in self._vectors.items()}
        absent = {probe.label: probe for probe in self._watched if probe not in own}
        for name in agreed:
            kind, _, rest = name.partition(" ")
            label, _, units = rest.rpartition(" ")
            if kind == Units.name and label in absent:
                own[absent[label]] = int(units)
        return [self._part(probe, count, sharing) for probe, count in own.items()]

    def _part(self, probe: UnitProbe, count: int, sharing: Sharing) -> Part:
        ranks, head, vector = sharing.ranks, _head(probe), self._vectors.get(probe)
        size = 1 + head + packed_size(count, ranks)

        def gather() -> Tensor:
            if not sharing.states or vector is None:
                return torch.zeros(size, dtype=wide(sharing.device), device=sharing.device)
            seen = float(max(1, self.positions[probe]))
            if vector.device.type == sharing.device.type == "cpu":
                host = vector.reshape(-1).numpy()
                return torch.from_numpy(np.concatenate([[seen], host[:head], packed(host[head:], ranks)]))
            row = flat([vector], sharing.device)
            return torch.cat([torch.full_like(row[:1], seen), row[:head], pack(row[head:], ranks)])

        def scatter(sums: Array) -> None:
            if sums[0] > 0:
                self.positions[probe] = round(float(sums[0]))
                self._sums[probe] = np.concatenate([sums[1 : 1 + head], unpack(sums[1 + head :], count, ranks)])

        return Part(f"{Units.name} {probe.label} {count}", size, gather, scatter, fixed=False)


def _head(probe: UnitProbe) -> int:
    return 2 if probe.kind in SUMMED else 0


def _off_share(on: NDArray[Any]) -> float:
    return (on.size - int(np.count_nonzero(on))) / on.size


def _share(vector: Array) -> float:
    """The share of single values that are saturated, or exactly zero."""
    return float(vector[0] / vector[1])


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
