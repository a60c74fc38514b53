"""`solver_cost` and `solver_unconverged`: iterative layers (neural ODEs, deep equilibrium models)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import Array, Detector, Finding, said
from flowscope.detectors.limit import Beyond, Limit
from flowscope.detectors.rows import label_of
from flowscope.records import Record, RunHeader

HOPELESS = 10.0
"""A residual beyond its limit by this factor is no fixed point at all: an error at once."""


class SolverCost(Detector):
    """Function evaluations a forward, far above this run's own first records: the dynamics grow stiff."""

    kind = "solver_cost"
    yields_to = frozenset({"solver_unconverged"})
    shown_by = ("solver_nfe",)
    advice = "penalise the dynamics (kinetic energy or Jacobian norm), add weight decay, or loosen the tolerance"
    begins_with: ClassVar[dict[str, Any]] = {"first": np.zeros((0, 0)), "base": None}

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding at most: the solver that grew most."""
        cost = record.metrics.get("solver_nfe")
        if cost is None or bool(np.isnan(cost).all()):
            yield self.unseen()
            return
        base = self._learn(cost)
        if base is None:
            return
        growth = np.divide(cost, base, out=np.ones_like(cost), where=base > 0)
        limit, where = self.config.solver_growth, int(np.nanargmax(growth))
        if not growth[where] > limit:
            yield from said(self.near(growth[where] > 1 + (limit - 1) / self.config.release_factor))
            return
        name = label_of(record, header, "solver_nfe", where, "solver")
        message = (
            f"{name} takes {cost[where]:.0f} function evaluations a forward, {growth[where]:.1f} times the median of "
            f"this run's first records ({base[where]:.0f}; limit {limit:.3g} times): its dynamics grow stiff"
        )
        yield self.found(name, cost[where], limit * base[where], message)

    def _learn(self, cost: Array) -> Array | None:
        """The median of the first records by solver; None while there are too few."""
        first = self.state["first"]
        if first.shape[1:] != cost.shape:
            first = np.zeros((0, cost.size))
        if len(first) < self.config.baseline_records:
            first, base, seen = np.vstack([first, cost]), np.full(cost.shape, np.nan), np.isfinite(cost)
            seen |= np.isfinite(first).any(axis=0)
            base[seen] = np.nanmedian(first[:, seen], axis=0)
            self.state.update(first=first, base=base)
        return self.state["base"] if len(first) >= 3 else None


class SolverUnconverged(Limit):
    """A fixed point that is none: the relative residual at the end of the forward is above its limit."""

    kind, metric, above, row = "solver_unconverged", "solver_residual", "solver_residual", "solver"
    shown_by = ("solver_residual", "jacobian_radius")
    message = (
        "{where} stops at a relative residual of {value:.2g} (limit {limit:.2g}){more}; its gradient is that of no "
        "fixed point"
    )
    advice = "keep the map a contraction: divide its weights by their spectral norm (to 0.9 or so), or start smaller"

    def certain(self, beyond: Beyond) -> bool:
        """A residual that is no fixed point's at all."""
        return beyond.value > HOPELESS * beyond.limit

    def more(self, beyond: Beyond) -> str:
        """The radius of its Jacobian, where that was estimated."""
        radius = beyond.record.metrics.get("jacobian_radius")
        if radius is None or radius.shape != beyond.values.shape or not radius[beyond.row] > 0:
            return ""
        word = "no contraction" if radius[beyond.row] >= 1 else "a slow contraction"
        return f"; its Jacobian's spectral radius is {radius[beyond.row]:.2f}: {word}"
