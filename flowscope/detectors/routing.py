"""`expert_collapse`: a mixture of experts that routes (nearly) all tokens to a few of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowscope.detectors.detector import ANY_FLOW, SHARE_RELEASE, Array, Detector, Finding, Flags, said
from flowscope.detectors.rows import flow_holding, label_of
from flowscope.records import Record, RunHeader

FEW_TOKENS = 4.0
"""With fewer tokens an expert in a step, chance alone leaves experts out: e^-4 of them at 4, e^-.5 at one half."""
FIRST_STEPS = 10
"""An untrained router is uneven, and even within so many steps."""
SETTLING_RECORDS = 4
"""A small batch leaves experts out by chance."""
UNDECIDED = 0.98
"""Scores of this entropy are as good as equal: which experts come first is a matter of the last digit, and changes."""
UNDECIDED_RECORDS = 20
"""So an undecided router must stay uneven for longer."""
ATTAINED = 0.9
"""A limit never lies above this share of what a router that sends every token to the same experts would show."""


class ExpertCollapse(Detector):
    """Experts without tokens, or one with a multiple of its share."""

    kind = "expert_collapse"
    shown_by = ("route_dead", "route_max_violation", "route_entropy")
    advice = (
        "add a load-balancing loss, weight * experts * sum of share * probability (Switch: 0.01; a router that has "
        "collapsed already needed 0.1)"
    )

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding at most: the first router beyond a limit."""
        dead, violation = record.metrics.get("route_dead"), record.metrics.get("route_max_violation")
        if dead is None or violation is None or dead.shape != violation.shape or bool(np.isnan(dead).all()):
            yield self.unseen(ANY_FLOW)
            return
        if record.step < FIRST_STEPS:
            return
        dead_limit, violation_limit = self._limits(record.metrics.get("route_worst"), dead)
        level = np.fmax(dead / dead_limit, violation / violation_limit)
        load = record.metrics.get("route_load")
        if load is not None and load.shape == level.shape:
            level = np.where(load < FEW_TOKENS, np.nan, level)
        if bool(np.isnan(level).all()):
            yield self.unseen(ANY_FLOW)
            return
        beyond = level > 1
        where = int(np.argmax(beyond) if beyond.any() else np.nanargmax(level))
        name = label_of(record, header, "route_dead", where, "router")
        if not beyond.any():
            yield from said(self.near(level[where] > SHARE_RELEASE, flow_holding(name, header)))
            return
        by_dead, by_load = (dead[where], dead_limit[where]), (violation[where], violation_limit[where])
        message = (
            f"{name} sends no token to {dead[where]:.0%} of its experts (limit {by_dead[1]:.0%}); the fullest "
            f"gets {violation[where] + 1:.1f} times the mean load (limit {by_load[1] + 1:.1f})"
            f"{_entropy(record, where)}; {int(beyond.sum())} of {dead.size} routers alike"
        )
        value, limit = max(by_dead, by_load, key=lambda pair: pair[0] / pair[1])
        records = UNDECIDED_RECORDS if _undecided(record, beyond) else SETTLING_RECORDS
        yield self.found(name, value, limit, message, flow_holding(name, header), records=records)

    def _limits(self, worst: Array | None, dead: Array) -> tuple[Array, Array]:
        """The limits of each router for its share of dead experts and its violation.

        With K of E experts a token, at most 1 - K / E of them are dead, and the violation is E / K - 1 at most.
        """
        config = self.config
        worst = np.full(dead.shape, np.inf) if worst is None or worst.shape != dead.shape else worst
        worst = np.where(np.isfinite(worst) & (worst > 0), worst, np.inf)
        most_dead = 1 - 1 / (worst + 1)
        return np.minimum(config.expert_dead, ATTAINED * most_dead), np.minimum(
            config.expert_violation, ATTAINED * worst
        )


def _undecided(record: Record, beyond: Flags) -> bool:
    """Whether all routers beyond the limit give their experts (nearly) equal scores."""
    entropy = record.metrics.get("route_entropy")
    return entropy is not None and entropy.shape == beyond.shape and bool((entropy[beyond] > UNDECIDED).all())


def _entropy(record: Record, where: int) -> str:
    entropy: Array | None = record.metrics.get("route_entropy")
    if entropy is None or where >= entropy.size or np.isnan(entropy[where]):
        return ""
    return f", entropy {entropy[where]:.2f} of log(experts)"
