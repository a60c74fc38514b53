"""`expert_collapse`: a mixture of experts that routes (nearly) all tokens to a few of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import ANY_FLOW, SHARE_RELEASE, Array, Detector, Finding, Flags, said
from flowscope.detectors.rows import flow_holding, label_of, labels_of
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
FIRST_RECORDS, IDLE_RECORDS = 10, 20
"""A member of a list that had a gradient in half of the first records and in none of so many since is out of use."""
MEMBERS = 3
"""Fewer members alike are no mixture."""
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


class UnusedExperts(Detector):
    """Members of a list that were chosen at first and never are any more, while others go on: a router by hand.

    Where no router is found in the model, the gradients of its experts still show whom it sends nothing: they have
    none, rather than one of zero.
    """

    kind = ExpertCollapse.kind
    yields_to = frozenset({"expert_collapse", "no_gradient"})
    shown_by = ("param_grad_norm",)
    advice = ExpertCollapse.advice
    # per parameter: its gradients in the first records, and the records in a row without one
    begins_with: ClassVar[dict[str, Any]] = {"records": 0, "had": None, "idle": None}

    @property
    def name(self) -> str:
        """Beside the detector of routers."""
        return "unused_experts"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding at most: the first list."""
        norms, asks = (record.metrics.get(f"param_{name}") for name in ("grad_norm", "trainable"))
        if norms is None or asks is None or norms.shape != asks.shape or bool(np.isnan(norms).all()):
            yield self.unseen(cause="unused")
            return
        state, none = self.state, np.isnan(norms)
        had, idle = (_grown(state[name], norms) for name in ("had", "idle"))
        if state["records"] < FIRST_RECORDS:
            had = had + ~none
        state.update(records=min(state["records"] + 1, FIRST_RECORDS), had=had, idle=np.where(none, idle + 1, 0.0))
        began = 2 * had >= FIRST_RECORDS
        out = began & (state["idle"] >= IDLE_RECORDS) & (asks == 1)
        if out.any():
            # heads that take turns do not begin together
            yield from said(self._list_of(labels_of(record, header, "param_grad_norm"), out, began & ~none))

    def _list_of(self, names: Sequence[str], out: Flags, active: Flags) -> Finding | None:
        """The innermost list of alike members of which some have fallen out of use and some are active."""
        rows = {name: row for row, name in enumerate(names)}
        parts = names[int(np.argmax(out))].split(".") if len(names) == out.size else []
        for at in reversed([at for at, part in enumerate(parts) if part.isdigit()]):
            members: list[int] = []
            while (name := ".".join([*parts[:at], str(len(members)), *parts[at + 1 :]])) in rows:
                members.append(rows[name])
            idle, others = out[members], active[members]
            if len(members) < MEMBERS or not idle.any() or not others.any():
                continue
            path, count = ".".join(parts[:at]), int(idle.sum())
            which = ", ".join(str(i) for i in np.flatnonzero(idle))
            message = (
                f"{count} of the {len(members)} members of {path} ({which}) were in use at first and have had no "
                f"gradient in {IDLE_RECORDS} records in a row, while {int(others.sum())} others had: nothing is sent "
                "to them any more"
            )
            return self.found(path, count / len(members), 0.0, message, records=1, cause="unused")
        return None


def _grown(values: Array | None, like: Array) -> Array:
    """Counts for all parameters; those that came later begin at 0."""
    known = np.zeros(0) if values is None else np.asarray(values)[: like.size]
    return np.pad(known, (0, like.size - known.size))
