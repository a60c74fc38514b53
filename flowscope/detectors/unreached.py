"""`no_gradient` where an optimizer looks for one: in all it holds, or in parameters that never had any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from flowscope.detectors.detector import WIRING, Array, Detector, Finding, Flags, said
from flowscope.detectors.gradients import gradient_flows
from flowscope.detectors.held import BACKWARDS, LEAF_LOSS, LEFT, Held, held_in
from flowscope.detectors.rows import module_of, parameter_name
from flowscope.records import Record, RunHeader, Severity

NONE_RECORDS = 3
"""Nothing at all had a gradient: single steps without one are made to begin a scheduler."""
NEVER_STEPS = 10
"""So many steps of its own optimizer found no gradient in a parameter (a delayed actor's optimizer waits with it)."""
POOLER = "pooler"
"""What lies in a module of this name is a note where its answer is left over."""
TURNS = 10
"""Where parameters of one optimizer take turns, one waits so many times as long for its first."""

LOST = "put zero_grad() before backward() or behind optimizer.step(), and look for p.grad = None between the two"
SWITCHED = (
    "nothing, if its term of the loss is switched on later; a weight of 0 for good is cheaper left out, with the "
    "parameters"
)
IN_PART = ("never", "zeros", "decay")
CAUSES = {
    "lost": ("backward left gradients, and the optimizer found none: they were cleared in between", LOST),
    "zero": (
        "every gradient the optimizer found is exactly 0",
        "look at the loss (a constant, a mask over everything) and at weights that are all 0 in two factors of one "
        "product (LoRA: only B starts at 0). In 16 bits scale the loss with torch.amp.GradScaler",
    ),
    "backward": (
        "no backward pass ran between the forward and optimizer.step()",
        "call loss.backward() before optimizer.step()",
    ),
    "leaf": (
        "the loss is a new leaf tensor (requires_grad set by hand, or torch.tensor(...)), which no path joins to the "
        "model",
        "compute the loss from the model's output by differentiable operations, without .item(), .detach(), .numpy() "
        "and torch.tensor()",
    ),
    "graph": (
        "the model runs without a graph (or not at all), so that its output has no gradient to pass on",
        "take the forward out of torch.no_grad(), torch.inference_mode() or @torch.no_grad, and look for .detach() and "
        "requires_grad_(False)",
    ),
    "path": (
        "a backward pass ran or may have, and the loss has no path to any of the parameters",
        "compute the loss from this model's output, without .detach(), .item(), .data, argmax or a new tensor made "
        "from numbers",
    ),
}


class Unreached(Detector):
    """No gradient in anything the optimizers hold (error); in some of it, ever (warning, beyond half an error)."""

    kind, level = "no_gradient", WIRING
    yields_to = frozenset({"no_gradient", "dead_units", "stale_parameters", "symmetry"})
    shown_by = ("backward_calls", "param_grad_norm")
    # whether there ever was a gradient, who had one, whether they take turns, and who only ever had exact zeros
    begins_with: ClassVar[dict[str, Any]] = {"alive": False, "had": None, "turns": False, "zero": None}

    @property
    def name(self) -> str:
        """Beside the detector of cuts."""
        return "unreached"

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding where nothing has a gradient; else for what waits, what gets zeros only, what only decays."""
        held = held_in(record)
        members = np.zeros(0, dtype=bool) if held is None else _looked_at(held)
        if held is None or not members.any():
            yield from (self.unseen(cause=cause) for cause in ("none", *IN_PART))
            return
        if not bool((held.gradient[members] > 0).any()):
            yield from said(self._none(held, members, record, header))
            yield from (self.unseen(cause=cause) for cause in IN_PART)
            return
        self.state["alive"] = True
        self._learn(held)
        yield from said(
            self._never(held, record, header), self._zeros(held, record, header), self._decays(held, record, header)
        )

    def _none(self, held: Held, members: Flags, record: Record, header: RunHeader) -> Finding | None:
        cause = _cause(held, members, record, header)
        if cause == "zero" and self.state["alive"]:
            return None  # a loss that has nothing left to teach
        first, count = parameter_name(record, header, int(np.argmax(members))), int(members.sum())
        told, advice = CAUSES[cause]
        message = f"none of the {count} parameters that should learn has a gradient (the first is {first}): {told}"
        return self.found("", count, 0.0, message, severity="error", advice=advice, records=NONE_RECORDS, cause="none")

    def _learn(self, held: Held) -> None:
        """Who had a gradient, and who of them has none now though the optimizer stepped."""
        had, now = _like(self.state["had"], held.turn, 0.0) == 1, ~np.isnan(held.gradient)
        self.state["turns"] = self.state["turns"] or bool((had & held.turn & ~now).any())
        self.state["had"] = (had | (held.turn & now)).astype(float)
        zero = _like(self.state["zero"], held.turn, 0.0)
        self.state["turns"] = self.state["turns"] or bool((held.turn & (held.gradient == 0) & (zero < 0)).any())
        counted = np.where(held.turn & (held.gradient == 0) & (zero >= 0) & ~held.idle, zero + 1, zero)
        self.state["zero"] = np.where(held.gradient > 0, -1.0, counted)

    def _never(self, held: Held, record: Record, header: RunHeader) -> Finding | None:
        limit = NEVER_STEPS * (TURNS if self.state["turns"] else 1)
        never = unreached(held) & (held.waiting >= limit)
        if not never.any():
            return None
        taken = bool(held.cleared[never].all())
        never &= taken | ~held.cleared
        spare = np.array([_spare(parameter_name(record, header, row)) for row in range(never.size)])
        never &= ~spare | bool(spare[never].all())
        first, count = parameter_name(record, header, int(np.argmax(never))), int(never.sum())
        total, steps = int(held.held.sum()), int(held.waiting[never].min())
        message = (
            f"{count} of the {total} parameters that the optimizer holds had no gradient in any of its {steps} steps "
            f"so far, the first is {first}"
        )
        advice = (
            f"look for .detach(), .data, torch.no_grad() or a rounding behind {module_of(first) or first}, or put its "
            "result into the loss; if it is meant to stay fixed, set requires_grad_(False) on it"
        )
        severity = part(count, total)
        if severity == "warning" and (taken or bool(spare[never].all())):
            severity = "info"  # a few, by name: prototypes that are left alone at first, or a pooler
        if taken or bool(held.lost[never].any()):
            message, advice = f"{message}: what backward left there was gone when the optimizer stepped", LOST
        return self.found(
            module_of(first) or first,
            count,
            total,
            message,
            severity=severity,
            advice=advice,
            records=1,
            cause="never",
        )

    def _meant(self, held: Held, zeros: Flags) -> Flags:
        """Which of those with zeros only are in terms that the loss multiplies by 0: switched off, or on later.

        Not where half of the parameters wait for it beside a term that no path joins to the model: then it is the cut
        that counts. And where they are more than half nobody waits for them for ever.
        """
        most = 2 * int(zeros.sum()) > int(held.held.sum())
        cut = zeros & (held.weighted > 1)
        waited = most & (self.state["zero"] >= NEVER_STEPS * TURNS)
        meant: Flags = zeros & (held.weighted > 0) & ~waited
        return meant & ~cut if 2 * int(cut.sum()) >= int(held.held.sum()) else meant

    def _long(self, held: Held) -> Flags:
        """What has had nothing but zeros for long enough: a start from zero (LoRA, ReZero) has left it by then."""
        limit = NEVER_STEPS * (TURNS if self.state["turns"] else 1)
        long: Flags = held.turn & (self.state["zero"] >= limit)
        return long

    def _zeros(self, held: Held, record: Record, header: RunHeader) -> Finding | None:
        """Parameters whose gradient is there, and exactly 0 from the start on, while others learn."""
        zeros = self._long(held) & held.still
        if zeros.any():  # a bias alone may cancel out (a loss of differences)
            owners = np.array([module_of(parameter_name(record, header, row)) for row in range(zeros.size)])
            zeros &= ~np.isin(owners, owners[held.held & ~zeros])
        if not zeros.any():
            return None
        zeros, meant = self._but_meant(held, zeros)
        first, count = parameter_name(record, header, int(np.argmax(zeros))), int(zeros.sum())
        total, place = int(held.held.sum()), module_of(first) or first
        message = (
            f"{count} of the {total} parameters that the optimizer holds have had a gradient of exactly 0 in all "
            f"{int(self.state['zero'][zeros].min())} records that used them since the start, and never moved, the "
            f"first is {first}"
        )
        advice = (
            f"look what multiplies the result of {place} by 0 (a mask, the weight of its loss, a factor or norm gain "
            "that starts at 0 and cannot move), or what feeds it zeros only"
        )
        severity = "info" if meant else part(count, total)
        return self.found(
            place, count, total, message, severity=severity, advice=SWITCHED if meant else advice, records=1,
            cause="zeros",
        )  # fmt: skip

    def _but_meant(self, held: Held, zeros: Flags) -> tuple[Flags, bool]:
        """Those that are not meant, and False; where there are none, all and True."""
        faulty = zeros & ~self._meant(held, zeros)
        return (faulty, False) if faulty.any() else (zeros, True)

    def _decays(self, held: Held, record: Record, header: RunHeader) -> Finding | None:
        ratio, zero = record.metrics.get("update_ratio"), self.state["zero"]
        if ratio is None or ratio.shape != zero.shape:
            return self.unseen(cause="decay")
        alone = self._long(held) & (ratio > 0) & ~held.still
        if not alone.any():
            return None
        alone, meant = self._but_meant(held, alone)
        first, count = parameter_name(record, header, int(np.argmax(alone))), int(alone.sum())
        place = module_of(first) or first
        message = (
            f"{count} of {int(held.held.sum())} parameters have had a gradient of exactly 0 since the start and are "
            f"moved by weight decay alone, the first is {first}"
        )
        advice = (
            f"put the result of {place} into the loss, or take it out of the optimizer until it learns: decay shrinks "
            "it towards 0"
        )
        severity: Severity = "info" if meant else "warning"
        advice = SWITCHED if meant else advice
        return self.found(place, count, 0.0, message, severity=severity, advice=advice, records=1, cause="decay")


def unreached(held: Held) -> Flags:
    """What an optimizer holds, never had a gradient, and is not known to have never run."""
    return held.held & np.greater(held.waiting, 0) & np.not_equal(held.called, 0)


def _spare(parameter: str) -> bool:
    """Whether it belongs to a pooler: bodies of transformers run theirs whether or not anyone asks for its answer."""
    return POOLER in parameter.split(".")


def part(count: int, total: int) -> Severity:
    """How severe it is that so many of what the optimizers hold learn nothing."""
    return "error" if 2 * count > total else "warning"


def _looked_at(held: Held) -> Flags:
    """The parameters in which a gradient was looked for; without an optimizer, those that nothing changed."""
    if held.steps.size:
        return held.turn
    unmoved: Flags = held.trainable & bool(held.still[held.trainable].all())
    return unmoved


def _cause(held: Held, members: Flags, record: Record, header: RunHeader) -> str:
    if bool(held.lost[members].any()):
        return "lost"
    if bool((held.gradient[members] == 0).any()):
        return "zero"
    if held.facts[LEFT] == 1:
        return "lost"
    if held.facts[BACKWARDS] == 0:
        return "backward"
    if held.facts[LEAF_LOSS] == 1:
        return "leaf"
    calls = [view.get("tracked_calls") for view in gradient_flows(record, header)]
    seen = [tracked for tracked in calls if tracked is not None]
    return "graph" if seen and not any(bool((tracked > 0).any()) for tracked in seen) else "path"


def _like(values: Array | None, flags: Flags, otherwise: float) -> Array:
    return values if values is not None and values.shape == flags.shape else np.full(flags.shape, otherwise)
