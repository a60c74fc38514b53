"""`solver_cost` and `solver_unconverged`: iterative layers (neural ODEs, deep equilibrium models)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors.detector import Array, Detector, Finding, label_of, pack, unpack
from flowscope.records import Record, RunHeader

HOPELESS = 10.0
"""A residual beyond its limit by this factor is no fixed point at all: an error at once."""


class SolverCost(Detector):
    """Function evaluations a forward, far above this run's own first records: the dynamics grow stiff."""

    kind = "solver_cost"
    yields_to = frozenset({"solver_unconverged"})

    def __init__(self, config: WatchConfig) -> None:
        super().__init__(config)
        self._first: list[Array] = []
        self._base: Array | None = None

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding at most: the solver that grew most."""
        cost = record.metrics.get("solver_nfe")
        if cost is None or bool(np.isnan(cost).all()):
            yield Finding(self.kind, level="unseen")
            return
        if self._first and self._first[0].shape != cost.shape:
            self._first, self._base = [], None
        if len(self._first) < self.config.baseline_records:
            self._first.append(cost)
            self._base = None
        if len(self._first) < 3:
            return
        base = self._base = self._median() if self._base is None else self._base
        growth = np.divide(cost, base, out=np.ones_like(cost), where=base > 0)
        limit, where = self.config.solver_growth, int(np.nanargmax(growth))
        if not growth[where] > limit:
            if growth[where] > 1 + (limit - 1) / self.config.release_factor:
                yield Finding(self.kind, level="near")
            return
        name = label_of(record, header, "solver_nfe", where, "solver")
        yield Finding(
            self.kind,
            name,
            "warning",
            float(cost[where]),
            float(limit * base[where]),
            f"{name} takes {cost[where]:.0f} function evaluations a forward, {growth[where]:.1f} times the median of "
            f"this run's first records ({base[where]:.0f}; limit {limit:.3g} times): its dynamics grow stiff",
            "penalise the dynamics (kinetic energy or Jacobian norm), add weight decay, or loosen the tolerance",
        )

    def _median(self) -> Array:
        first = np.array(self._first)
        base, seen = np.full(first.shape[1:], np.nan), np.isfinite(first).any(axis=0)
        base[seen] = np.nanmedian(first[:, seen], axis=0)
        return base

    def state_dict(self) -> dict[str, Any]:
        """The first counts."""
        return {"first": [pack(values) for values in self._first]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._first, self._base = [unpack(values) for values in state["first"]], None


class SolverUnconverged(Detector):
    """A fixed point that is none: the relative residual at the end of the forward is above its limit."""

    kind = "solver_unconverged"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding at most: the solver with the largest residual."""
        residual = record.metrics.get("solver_residual")
        if residual is None or bool(np.isnan(residual).all()):
            yield Finding(self.kind, level="unseen")
            return
        limit, where = self.config.solver_residual, int(np.nanargmax(residual))
        worst = float(residual[where])
        if worst <= limit:
            if worst > limit / self.config.release_factor:
                yield Finding(self.kind, level="near")
            return
        radius = record.metrics.get("jacobian_radius")
        told = ""
        if radius is not None and radius.shape == residual.shape and radius[where] > 0:
            word = "no contraction" if radius[where] >= 1 else "a slow contraction"
            told = f"; its Jacobian's spectral radius is {radius[where]:.2f}: {word}"
        certain = worst > HOPELESS * limit
        name = label_of(record, header, "solver_residual", where, "solver")
        yield Finding(
            self.kind,
            name,
            "error" if certain else "warning",
            worst,
            limit,
            f"{name} stops at a relative residual of {worst:.2g} (limit {limit:.2g}){told}; its gradient is that of "
            "no fixed point",
            "keep the map a contraction: divide its weights by their spectral norm (to 0.9 or so), or start smaller",
            immediate=certain,
        )
