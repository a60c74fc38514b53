"""Iterative layers: how often they evaluate their function, how well they converge, whether their map contracts.

Four kinds are recognised, by what they do and not by one library's class:

- *dynamics*: a module called as f(t, y) with a time that is a single number (neural ODEs, torchdiffeq and others);
- *fixed points*: a module called as f(z, x), without gradient and then with it, from one forward of the model;
- *equilibrium layers* that return statistics, {"nstep", "rel_lowest"} (torchdeq);
- any module that leaves `solver_nfe` or `solver_residual` on itself in its forward (or `iterations` with `residual`).
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.hooks.hooks import Hooks, in_backward
from flowscope.instruments.fixed_points import may_be_differentiated_again, relative_residual, spectral_radius
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import floating_tensors, is_compiling
from flowscope.model.plan import display_path
from flowscope.model.structure import is_time
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.payload import local

ATTRIBUTES = (("solver_nfe", "solver_residual"), ("iterations", "residual"))
"""Names under which a layer says how its solver went; of the second pair both must be there."""

SEARCHES = 3
"""So many records look for such a layer; later ones only on the slow schedule."""


@dataclass
class Solver:
    """One solver, and what it did in the step under way."""

    path: str
    module: nn.Module
    calls: int = 0
    backward_calls: int = 0
    in_forward: int = 0
    """Calls of the forward under way: one evaluation is no solver."""
    untracked: int = 0
    """Calls without gradient: an implicit solver's own."""
    steps: list[Tensor | float] = field(default_factory=list)
    residuals: list[Tensor | float] = field(default_factory=list)
    radii: list[Tensor | float] = field(default_factory=list)
    last: tuple[Tensor, Tensor, int] | None = None
    """The last z, f(z), and the version of z, kept until the model's forward ends."""
    injected: list[Tensor] | None = None
    """What the first call of the forward was given beside z."""
    varies: bool = False
    """Whether a later call was given something else: a recurrence over inputs, no iteration to a fixed point."""
    seen: bool = False
    """Whether it was one at run time; from then on it has its entry in every record."""

    def forget(self) -> None:
        """Start again from nothing."""
        self.calls = self.backward_calls = self.in_forward = self.untracked = 0
        self.steps, self.residuals, self.radii = [], [], []
        self.last, self.injected, self.varies = None, None, False


_routing = partial(Metric, view="Routing", rows="modules")


class Solvers(Instrument):
    """The iterative layers of a model."""

    name = "solvers"
    metrics = (
        _routing("solver_nfe", "Function evaluations a forward.", healthy="steady; alert at 4 times its start"),
        _routing("solver_nfe_backward", "Function evaluations a backward (adjoint method)."),
        _routing(
            "solver_residual",
            "How far the solution is from a fixed point.",
            formula="|f(z) - z| / |f(z)|",
            healthy="about 0.001; alert over 0.01",
            scale="log",
            limits=("solver_residual",),
        ),
        _routing("jacobian_radius", "Spectral radius of the iterated map.", healthy="under 1"),
    )

    def __init__(self) -> None:
        self._inside = False
        self._forwards = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._solvers: list[Solver] = []
        self._searches = 0

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at the calls of what may be iterated."""
        self._view, self._switch = view, hooks.switch
        kinds = (view.dynamics, self._dynamics), (view.maps, self._map), (view.equilibrium_layers, self._layer)
        for found, after in kinds:
            for path, module in found:
                solver = Solver(display_path(path), module)
                self._solvers.append(solver)
                hooks.after(module, self.fuse, partial(after, solver), hooks.switch)
        if self._solvers:
            hooks.before(view.model, self.fuse, self._begin, hooks.switch, first=True)
            hooks.after(view.model, self.fuse, self._end, hooks.switch)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_compiling() and not in_backward() and torch.is_grad_enabled() and not self._switch.paused:
            self._inside = True
            self._forwards += 1
            for solver in self._solvers:
                solver.in_forward = 0

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not is_compiling() and not in_backward() and self._inside:
            self._inside = False
            for solver in self._solvers:
                self._close(solver, slow=self._switch.slow and torch.is_grad_enabled())

    def _counts(self, module: nn.Module) -> bool:
        """Whether a call belongs to a training forward: of the model, or to one where its own is not called."""
        if self._switch.paused:
            return False
        return self._inside or (not self._forwards and torch.is_grad_enabled()) or module is self._view.model

    def _dynamics(self, solver: Solver, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        if is_compiling():
            return
        if not is_time(next(iter([*args, *kwargs.values()]), None)):
            return
        if in_backward() and not self._switch.paused:
            solver.backward_calls += 1
        elif self._counts(module):
            solver.calls += 1
            solver.in_forward += 1
            solver.seen = solver.seen or solver.in_forward > 1

    def _map(self, solver: Solver, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        if is_compiling() or in_backward() or not self._counts(module):
            return
        given = list(floating_tensors((args, kwargs)))
        z = given[0] if given else None
        image = next((x for x in floating_tensors(output) if z is not None and x.shape == z.shape), None)
        if z is None or image is None:
            return
        solver.calls += 1
        injected, solver.injected = solver.injected, given[1:] if solver.injected is None else solver.injected
        solver.varies = solver.varies or (injected is not None and not _same(injected, given[1:]))
        if not torch.is_grad_enabled() or not image.requires_grad:
            solver.untracked += 1
        solver.last = (z, image, z._version)

    def _layer(self, solver: Solver, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or in_backward() or not self._counts(module):
            return
        told = next((part for part in output if isinstance(part, dict) and "nstep" in part), None)
        if told is None:
            return
        solver.seen = True
        for name, kept in (("nstep", solver.steps), ("rel_lowest", solver.residuals), ("sradius", solver.radii)):
            value = told.get(name)
            if isinstance(value, Tensor) and value.numel():
                mean = value.detach().float().mean()
                # -1 and 0 stand for "not computed"
                kept.append(torch.where(mean > 0, mean, torch.nan))

    def _close(self, solver: Solver, *, slow: bool = False) -> None:
        """A forward of the model has ended: was the map iterated in it, and how far from its fixed point is it?"""
        last, untracked, varies = solver.last, solver.untracked, solver.varies
        solver.last, solver.untracked, solver.injected, solver.varies = None, 0, None, False
        if last is None:
            return
        solver.seen = solver.seen or (untracked > 0 and solver.calls > 1 and not varies)
        if not solver.seen:
            solver.calls = 0
            return
        z, image, version = last
        if z._version != version:
            return
        solver.residuals.append(relative_residual(z, image))
        # the transposed Jacobian needs the graph, which is there until backward
        if slow and z.requires_grad and image.requires_grad and may_be_differentiated_again(solver.module):
            solver.radii = [spectral_radius(z, image, self._generator(z.device))]

    def _generator(self, device: torch.device) -> torch.Generator:
        return self._generators.setdefault(device, torch.Generator(device).manual_seed(0))

    # -- the step ----------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Forget what was seen in this step."""
        self._inside, self._forwards = False, 0
        for solver in self._solvers:
            solver.forget()

    def take(self) -> Taken | None:
        """[solvers, sums and counts], None where nothing is iterated."""
        for solver in self._solvers:
            self._close(solver)
        self._find_attributes()
        seen = [solver for solver in self._solvers if solver.seen]
        if not seen:
            self.discard()
            return None
        forwards = max(self._forwards, 1)
        told = [_told(solver, forwards) for solver in seen]
        devices = (value.device for row in told for of in row for value in of if isinstance(value, Tensor))
        device = next(devices, torch.device("cpu"))
        values = torch.stack([_mean(of, device) for row in told for of in row]).view(len(seen), -1)
        known = ~values.isnan()
        self.discard()
        labels = [solver.path for solver in seen]
        table = torch.cat([torch.where(known, values, 0.0), known.float()], 1)
        return Taken(f"solvers {' '.join(labels)}", [table], partial(self._read, labels), "vector")

    def _read(self, labels: list[str], out: RecordBuilder, parts: list[Array]) -> None:
        """Means over forwards (and ranks) from their sums and, behind these, counts; NaN where there was none."""
        sums, counts = np.split(parts[0].reshape(len(labels), -1), 2, axis=1)
        with np.errstate(all="ignore"):
            means = np.where(counts > 0, sums / counts, np.nan)
        for metric, values in zip(self.metrics, means.T, strict=True):
            out.add(metric.name, values, labels)

    def _find_attributes(self) -> None:
        """Layers that say themselves how their solver went; looked for at first, and slowly."""
        held = {id(solver.module): solver for solver in self._solvers}
        self._searches += 1
        if self._searches <= SEARCHES or self._switch.slow:
            self._view.tree.follow()
            for path, module in self._view.modules:
                if id(module) not in held and _attributes(module) is not None:
                    self._solvers.append(Solver(display_path(path), module))
        for solver in self._solvers:
            if (told := _attributes(solver.module)) is not None:
                steps, residual = told
                solver.seen = True
                solver.steps = solver.steps if steps is None else [steps]
                solver.residuals = solver.residuals if residual is None else [residual]


def _same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    """Whether two calls were given the same tensors; the first ones are kept, so no address is used again."""
    return len(tensors) == len(others) and all(
        local(a).data_ptr() == local(b).data_ptr() and a.shape == b.shape for a, b in zip(tensors, others, strict=True)
    )


def _told(solver: Solver, forwards: int) -> tuple[Sequence[Tensor | float], ...]:
    """What was counted and measured, in the order of the metrics."""
    counted = [calls / forwards for calls in (solver.calls, solver.backward_calls) if solver.calls]
    return solver.steps or counted[:1], counted[1:], solver.residuals, solver.radii


def _mean(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """The mean on a device, which is not waited for; NaN of nothing."""
    known = [v.detach().float() if isinstance(v, Tensor) else _filled(v, device) for v in values]
    return torch.stack(known).mean().to(device) if known else _filled(torch.nan, device)


def _filled(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _attributes(module: nn.Module) -> tuple[Tensor | float | None, Tensor | float | None] | None:
    """What a layer left on itself: evaluations and residual."""
    held = module.__dict__
    for steps, residual in ATTRIBUTES:
        if steps not in held and residual not in held:
            continue
        told = _numeral(held.get(steps)), _numeral(held.get(residual))
        # of names that mean many things both must be there, and a residual is no whole number
        certain = steps == ATTRIBUTES[0][0] or (None not in told and not isinstance(held[residual], numbers.Integral))
        if certain and told != (None, None):
            return told
    return None


def _numeral(value: Any) -> Tensor | float | None:
    if isinstance(value, Tensor):
        return value.detach() if value.numel() == 1 and not value.is_complex() and not value.is_meta else None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return float(value)
