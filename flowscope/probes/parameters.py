"""Statistics of the parameters around an optimizer step: norms, gradient norms, and the true change of the weights.

`param_grad_norm` is what the optimizer consumes (unscaled, reduced, after clipping). `update_ratio` is |dw| / |w| over
up to `update_samples` fixed, evenly spaced entries of each tensor before and after the step: exact for smaller tensors,
and no copy of the weights is held. `param_unchanged` is the share of these entries that the step left as they were.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.plan import display_path
from flowscope.discovery.structure import is_norm
from flowscope.probes.carried_gradients import CarriedGradients
from flowscope.probes.hooks import Hooks, Switch
from flowscope.probes.norms import Number, norms
from flowscope.probes.payload import local
from flowscope.probes.raw_gradients import RawGradients, entries
from flowscope.probes.weight_samples import WeightSamples
from flowscope.probes.weight_spread import spreads

SAMPLE_BUDGET = 1 << 22
GONE = nn.Module()
"""Stands for a module that is no longer in the model: its parameters are not seen."""
ROWS = 8
"""What is read of each parameter: see `ParameterObserver.take`."""
Array = NDArray[np.float64]


class ParameterObserver:
    """All floating-point parameters of a model, tied ones once, under their first name."""

    def __init__(self, model: nn.Module, config: WatchConfig, switch: Switch, hooks: Hooks) -> None:
        self._model = model
        self._places: list[tuple[nn.Module, str]] = []
        self._paths: list[tuple[str, str]] = []
        self._now: list[Tensor | None] | None = None
        self._stepping: dict[int, Tensor] | None = None
        self._epsilons: tuple[list[torch.dtype | None], Array] = ([], np.zeros(0))
        self.added: list[str] = []
        """Names of parameters that came after attaching; they stand behind the others."""
        self._find()
        share = SAMPLE_BUDGET // max(1, len(self.names))
        self._samples = WeightSamples(max(1, min(config.update_samples, share)))
        self.norms: dict[int, Number] = {}
        self.gradients: dict[int, Number] = {}
        self.updates: dict[int, tuple[Number, Number, Number]] = {}
        self.raw = RawGradients(self.some, self.follow, switch, hooks)
        self.carried = CarriedGradients(switch, hooks)
        self._switch = switch
        self.spreads: list[tuple[list[int], Tensor]] = []

    def current(self) -> list[Tensor | None]:
        """The parameters as they are now (they may have been replaced since attaching)."""
        if self._now is not None:
            return self._now
        return list(map(dict.get, self._holders, self._keys))

    def _index(self) -> None:
        self._holders = [module._parameters for module, _ in self._places]
        self._keys = [key for _, key in self._places]

    def follow(self) -> list[Tensor | None]:
        """The parameters as they are now, found again where modules were replaced."""
        self._follow_replaced_modules()
        return self.current()

    def some(self, count: int) -> dict[int, Tensor | None]:
        """At most `count` evenly spaced ones of the current parameters, by their number."""
        chosen = range(0, len(self._places), -(-len(self._places) // count) or 1)
        return {i: self._places[i][0]._parameters.get(self._places[i][1]) for i in chosen}

    def trainable(self) -> NDArray[np.float64]:
        """1 where a parameter asks for a gradient, 0 where it is frozen."""
        return np.array([float(p is not None and p.requires_grad) for p in self.current()])

    def epsilons(self) -> Array:
        """The machine epsilon of each parameter's numbers: the relative distance from 1 to the next."""
        kinds = [None if p is None else p.dtype for p in self.current()]
        if kinds != self._epsilons[0]:
            known = {kind: np.nan if kind is None else torch.finfo(kind).eps for kind in set(kinds)}
            self._epsilons = kinds, np.array([known[kind] for kind in kinds])
        return self._epsilons[1]

    def _follow_replaced_modules(self) -> None:
        """Find the parameters again where modules or parameters were replaced, renamed or added since attaching."""
        same = all(map(operator.is_, map(dict.get, *self._slots), self._children))
        if same and not self._lazy and sum(map(len, self._held)) == self._count:
            return
        self._now = None
        modules = dict(self._model.named_modules(remove_duplicate=False))
        paths = {id(module): path for path, module in reversed(modules.items())}
        for i, ((path, key), (held, _)) in enumerate(zip(self._paths, self._places, strict=True)):
            if path not in modules:
                path = paths.get(id(held), path)
            self._paths[i], self._places[i] = (path, key), (modules.get(path, GONE), key)
        known = len(self._paths)
        lazy = self._lazy
        self._find()
        self.added += [] if lazy else self.names[known:]

    def _find(self) -> None:
        """Add what the model holds and is not known yet, behind what is known: numbers stay what they are."""
        self._index()
        seen = {id(parameter) for parameter in self.current()}
        self._lazy = False
        for path, module in self._model.named_modules():
            for key, parameter in module._parameters.items():
                self._lazy = self._lazy or isinstance(parameter, nn.parameter.UninitializedParameter)
                if parameter is not None and id(parameter) not in seen and _floating(parameter):
                    seen.add(id(parameter))
                    self._places.append((module, key))
                    self._paths.append((path, key))
        self.names = tuple(display_path(f"{path}.{key}" if path else key) for path, key in self._paths)
        self._index()
        self.is_norm = np.array([float(is_norm(module)) for module, _ in self._places])
        self.matrices = [i for i, p in enumerate(self.current()) if p is not None and not self.is_norm[i] and _rows(p)]
        slots = [(module._modules, name) for module in self._model.modules() for name in module._modules]
        self._slots = [siblings for siblings, _ in slots], [name for _, name in slots]
        self._children = [siblings[name] for siblings, name in slots]
        self._held = [held for module in self._model.modules() for held in (module._modules, module._parameters)]
        self._count = sum(map(len, self._held))

    @torch.no_grad()
    def before_step(self, *, updating: bool) -> None:
        """Take the weights' norms and samples, before the optimizer changes them.

        Args:
            updating: the optimizer steps right now, so the parameters are looked up once until `take`.
        """
        self._now = None
        self._follow_replaced_modules()
        self._now = self.current() if updating else None
        live = self._live()
        self._stepping = live if updating else None
        self.norms = self._samples.take_before(live)
        large = [i for i in live if i not in self.norms]
        self.norms.update(zip(large, norms([live[i] for i in large]), strict=True))
        if self._switch.slow:
            held = {i: live[i] for i in self.matrices if i in live and _rows(live[i])}
            now = self.current()
            gradients = {i: local(p.grad) for i in held if (p := now[i]) is not None and p.grad is not None}
            self.spreads = spreads(held, gradients)

    def _live(self) -> dict[int, Tensor]:
        live = {i: p for i, p in enumerate(self.current()) if p is not None and p.requires_grad}
        whole = all(type(p) is nn.Parameter for p in live.values())
        return live if whole else {i: local(p) for i, p in live.items()}

    def entries(self) -> Array:
        """How many entries of each parameter this rank holds (of a sharded one fewer than there are)."""
        return np.array([0.0 if p is None else float(local(p.detach()).numel()) for p in self.current()])

    @torch.no_grad()
    def read_gradients(self, only: set[int] | None = None, scale: Tensor | None = None) -> None:
        """Take the gradients' norms.

        Args:
            only: ids of the parameters to read now (one optimizer's); None reads all that were not read yet.
            scale: what the gradients are still multiplied by (fused optimizers unscale them inside their step).
        """
        found: dict[int, Tensor] = {}
        held: dict[int, Tensor] = {}
        for i, parameter in enumerate(self.current()):
            if parameter is None or (gradient := parameter.grad) is None or i in self.gradients:
                continue
            if only is None or id(parameter) in only:
                held[i] = gradient
                plain = type(gradient) is Tensor and not gradient.is_sparse
                found[i] = gradient if plain else entries(_local_gradient(parameter))
        self.raw.compare(held)
        values = norms(list(found.values()))
        if scale is not None:
            factor = scale.item() if scale.device.type == "cpu" else scale
            values = [value / factor for value in values]
        self.gradients.update(zip(found, values, strict=True))

    @torch.no_grad()
    def after_step(self) -> None:
        """Compare the samples with the weights as they are now: the change per tensor."""
        held = self._stepping
        same = held is not None and all(type(p) is nn.Parameter for p in held.values())
        self.updates = self._samples.changes(held if held is not None and same else self._live())

    def take(self) -> tuple[Array, NDArray[np.bool_], list[tuple[Tensor, list[tuple[int, int]]]]]:
        """Return this step's numbers as the rows [8, n], which of them were read, and those still on devices.

        Rows: 0 norm, 1 gradient norm, 2 norm of the sampled change, 3 norm of the sampled entries before the step, 4
        share of the sampled entries that the step left exactly as they were, 5 gradient norm at the end of backward
        (times the loss scale), 6 whether the gradient is since then the same version of the same tensor, 7 norm of
        what `.grad` held before this step's gradients arrived.
        What is on a device comes as vectors, each with the (row, parameter) its entries belong to.
        """
        values = np.full((ROWS, len(self.names)), np.nan)
        columns: dict[tuple[torch.device, torch.dtype], list[tuple[int, int, Tensor]]] = {}
        rows: list[tuple[int, Mapping[int, Number]]] = [(0, self.norms), (1, self.gradients)]
        triples = zip(*self.updates.values(), strict=True)
        rows += [(2 + k, dict(zip(self.updates, numbers, strict=True))) for k, numbers in enumerate(triples)]
        rows += [(5, self.raw.norms), (6, self.raw.untouched), (7, self.carried.norms)]
        read = np.zeros(values.shape, dtype=bool)
        for row, found in rows:
            read[row, list(found)] = True
            known = found
            if not set(map(type, found.values())) <= {float}:
                known = {i: value for i, value in found.items() if not isinstance(value, Tensor)}
                for i, value in found.items():
                    if isinstance(value, Tensor):
                        columns.setdefault((value.device, value.dtype), []).append((row, i, value))
            values[row, list(known)] = list(known.values())
        self._forget()
        vectors = [
            (torch.stack([value for *_, value in items]), [(row, i) for row, i, _ in items])
            for items in columns.values()
        ]
        return values, read, vectors

    def let_go(self) -> None:
        """The step's numbers are taken: look the parameters up anew from here on, and keep none alive."""
        self._now = self._stepping = None

    def drop(self) -> None:
        """Forget what was read for a step that did not happen."""
        self.let_go()
        self._forget()
        self._samples.drop()

    def _forget(self) -> None:
        """Start again from nothing."""
        self.norms, self.gradients, self.updates = {}, {}, {}
        self.raw.drop()
        self.carried.drop()
        self.spreads = []

    def optimized(self, optimizers: Iterable[Any]) -> NDArray[np.float64]:
        """1 where an optimizer holds the parameter, 0 where none does, NaN while none is known."""
        known = list(optimizers)
        if not known:
            return np.full(len(self.names), np.nan)
        held = set[int]().union(*map(held_by, known))
        return np.array([float(p is not None and id(p) in held) for p in self.current()])

    def learning_rates(self, optimizers: Iterable[Any]) -> NDArray[np.float64]:
        """The learning rate of the group that holds each parameter (the last of several), NaN where none does."""
        rates: dict[int, float] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                rates.update(dict.fromkeys(map(id, group["params"]), _rate(group.get("lr"))))
        return np.array([np.nan if p is None else rates.get(id(p), np.nan) for p in self.current()])


def held_by(optimizer: Any) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, divided over the ranks as the parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(gradient, "placements", placements) != placements:
        # tensor parallel gradients may still be partial sums: a collective of the step's own place, as in the optimizer
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local(gradient)


def _rows(weight: Tensor) -> bool:
    """Whether a parameter is a matrix with rows to compare."""
    return weight.dim() >= 2 and weight.shape[0] >= 2 and weight.numel() > 0


def _rate(value: Any) -> float:
    """A group's learning rate as a number. One that lies on a device is not waited for: NaN."""
    known = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.device.type == "cpu")
    return float(value) if known else np.nan


def _floating(parameter: Tensor) -> bool:
    return (
        (parameter.is_floating_point() or parameter.is_complex())
        and not isinstance(parameter, nn.parameter.UninitializedParameter)
        and parameter.layout == torch.strided
    )
