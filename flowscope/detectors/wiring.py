"""`no_gradient` and `parameters_not_optimized`: training code that cuts, freezes or forgets part of the model."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

import numpy as np

from flowscope.detectors.detector import WIRING, Array, Detector, Finding, Flags, said
from flowscope.detectors.gradients import gradient_flows
from flowscope.detectors.held import Held, held_in
from flowscope.detectors.rows import FlowView, ancestors, label_of, lie_at, module_of, parameter_name
from flowscope.detectors.unreached import NEVER_STEPS, part, unreached
from flowscope.records import Record, RunHeader, Severity, few

NORM_NAME = re.compile(r"(^|[._])(bn|ln|(batch|layer|group|rms|instance)?_?norm)(\d|_|\.|$)|norm\d*$", re.IGNORECASE)

UNGRAPHED_RECORDS = 5
"""A part that may be switched on later: it counts when it had no graph on so many records in a row."""
DETACHED_RECORDS = 3
"""A flow without any gradient may have had no turn: it counts after this many records."""


class NoGradient(Detector):
    """A cut inside a flow (error), parameters that get no gradient (info), frozen ones (info, norm-only: warning)."""

    kind, level = "no_gradient", WIRING
    shown_by = ("backward_calls", "param_grad_norm")

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """Cuts by flow; where there is none, one finding for all unused parameters; one for all frozen ones."""
        # detaching between the chunks of a long sequence is deliberate, so a recurrent layer's steps are left out
        views = [view for view in gradient_flows(record, header) if view.layout.kind != "time"]
        held = held_in(record)
        cuts = list(said(*(self._cut(view, header, held) for view in views)))
        yield from cuts
        trainable, norms = record.metrics.get("param_trainable"), record.metrics.get("param_grad_norm")
        if trainable is None or norms is None or trainable.shape != norms.shape:
            yield self.unseen(cause="unused")
            yield self.unseen(cause="frozen")
            return
        if not any(cut.level == "beyond" for cut in cuts):
            yield from self._unused(record, header, trainable == 1, norms, held)
        else:
            yield self.unseen(cause="unused")  # the cut explains it
        yield from self._frozen(record, header, trainable)

    def _cut(self, view: FlowView, header: RunHeader, held: Held | None) -> Finding | None:
        tracked, backward = view.get("tracked_calls"), view.get("backward_calls")
        if tracked is None or backward is None:
            return self.unseen(view.layout.name, "cut")
        if not bool((backward > 0).any()):
            return self._detached(view, header, tracked, held)
        first_with = int(np.argmax(backward > 0))
        silent = (tracked > 0) & ~(backward > 0)
        before = np.flatnonzero(silent[:first_with])
        if before.size == 0:
            return None
        if held is not None and _meant(view, header, silent & (np.arange(silent.size) < first_with), held):
            return self.unseen(view.layout.name, "cut")
        last = int(before[-1])
        # a block whose own output has no graph cut it itself: it is the last that gets none
        ran = view.get("forward_calls")
        while ran is not None and last + 1 < first_with and ran[last + 1] > 0 and not tracked[last + 1] > 0:
            last += 1
        where = view.point(last)
        message = (
            f"no gradient reaches {where} or what lies before it ({before.size} of {tracked.size} points), while "
            f"{view.point(first_with)} gets one: the graph is cut between them"
        )
        advice = (
            f"look for .detach(), .data, .item(), torch.no_grad() or a new tensor made from numbers after {where}; if "
            "the part before it is meant to stay fixed, set requires_grad_(False) on it"
        )
        flow = view.layout.name
        return self.found(where, before.size, 0.0, message, flow, advice=advice, certain=True, cause="cut")

    def _detached(self, view: FlowView, header: RunHeader, tracked: Array, held: Held | None) -> Finding:
        """A whole flow that ran with a graph and got no gradient, though the optimizer that steps holds its weights.

        A teacher whose output is detached on purpose is in no optimizer; a part that has no turn is not run.
        """
        unseen = self.unseen(view.layout.name, "cut")
        columns = [view.record.metrics.get(f"param_{name}") for name in ("trainable", "grad_norm", "optimized")]
        trainable, norms, optimized = columns
        if trainable is None or norms is None or optimized is None or not bool((tracked > 0).any()):
            return unseen
        if not trainable.shape == norms.shape == optimized.shape:
            return unseen
        waiting = (trainable == 1) & np.isnan(norms) & (optimized == 1)
        if not waiting.any() or bool(np.isnan(norms).all()):
            return unseen
        owners = [module_of(parameter_name(view.record, header, i)) for i in range(trainable.size)]
        points = [view.point(i) for i in range(tracked.size)]
        behind = np.isin(points, [block.partition("#")[0] for block in view.layout.blocks])
        inside = lie_at(points, behind, owners) & (trainable == 1)
        if not inside.any() or not bool(waiting[inside].all()) or not (held is None or held.turn[inside].all()):
            return unseen
        where = view.point(tracked.size - 1)
        message = (
            f"no gradient reaches {where} or what lies before it: all {tracked.size} points ran, the optimizer holds "
            f"their {int(inside.sum())} parameters, and none got a gradient"
        )
        advice = (
            f"look for .detach(), .data, .item() or torch.no_grad() behind {where}, or a loss that does not use it; if "
            "it is meant to stay fixed, set requires_grad_(False) on it"
        )
        flow, records = view.layout.name, DETACHED_RECORDS
        severity = part(int(inside.sum()), int((trainable[optimized == 1] == 1).sum()))
        return self.found(
            where, inside.sum(), 0.0, message, flow, severity=severity, advice=advice, records=records, cause="cut"
        )

    def _unused(
        self, record: Record, header: RunHeader, trainable: Flags, norms: Array, held: Held | None
    ) -> Iterable[Finding]:
        missing = trainable & np.isnan(norms)
        if not missing.any():
            return
        if missing.sum() == trainable.sum():  # there are none, or they were cleared before the mark (`Unreached`)
            yield self.unseen(cause="unused")
            return
        if held is not None and held.steps.size:
            # what no optimizer holds may be cut on purpose; one that had no turn (a delayed actor) used no gradient
            waits = bool((missing & held.held & ~held.turn).any())
            missing &= held.turn
            if waits and not missing.any():
                yield self.unseen(cause="unused")
                return
        ungraphed = self._ungraphed(record, header, missing if held is None else missing & held.turn)
        if ungraphed.any():
            first, without = parameter_name(record, header, int(np.argmax(ungraphed))), int(ungraphed.sum())
            message = (
                f"no gradient reached {without} parameters that the optimizer holds (the first is {first}), in a part "
                "of the model that ran without a graph while what follows it did"
            )
            advice = (
                "look for torch.no_grad() or .detach() around the call of that part; if it is meant to stay fixed, set "
                "requires_grad_(False) on it"
            )
            severity = part(without, int((trainable & (record.metrics["param_optimized"] == 1)).sum()))
            yield self.found(
                module_of(first), without, 0.0, message, severity=severity, advice=advice, records=UNGRAPHED_RECORDS,
                cause="ungraphed",
            )  # fmt: skip
        if held is not None:
            # `Unreached` tells of those that run, or wait for long
            missing = missing & ~(unreached(held) & ((held.called == 1) | (held.waiting >= NEVER_STEPS)))
        if not missing.any():
            return
        name, count = parameter_name(record, header, int(np.argmax(missing))), int(missing.sum())
        message = f"{count} trainable parameters got no gradient, the first is {name}"
        advice = (
            "if the module is meant to learn, call it in forward, outside torch.no_grad() and with its result in the "
            "loss; else remove it or set requires_grad_(False)"
        )
        yield self.found(module_of(name), count, 0.0, message, severity="info", advice=advice, cause="unused")

    def _ungraphed(self, record: Record, header: RunHeader, missing: Flags) -> Flags:
        """Of parameters without gradient, those held by the optimizer beside points of a flow that had no graph yet.

        Only the beginning of a flow counts, where all of a container had none: layers dropped at random do not.
        """
        held = record.metrics.get("param_optimized")
        if held is None or held.shape != missing.shape:
            return np.zeros_like(missing)
        parents: set[str] = set()
        for view in gradient_flows(record, header):
            tracked = view.get("tracked_calls")
            if tracked is None or not bool((tracked > 0).any()) or view.layout.kind == "time":
                continue
            start = int(np.argmax(tracked > 0))
            running = {view.point(i).rpartition(".")[0] for i in range(start, tracked.size)}
            parents |= {view.point(i).rpartition(".")[0] for i in range(start)} - running - {""}
        return _lie_under(parents, missing & (held == 1), record, header)

    def _frozen(self, record: Record, header: RunHeader, trainable: Array) -> Iterable[Finding]:
        # what got a gradient in this step is frozen for the turn of another optimizer only (a GAN that toggles halves)
        norms = record.metrics.get("param_grad_norm", np.full(trainable.shape, np.nan))
        frozen = (trainable == 0) & ~(norms > 0)
        if not frozen.any():
            return
        count, total = int(frozen.sum()), int(frozen.size)
        first = parameter_name(record, header, int(np.argmax(frozen)))
        norm = self._is_norm(record, header, trainable)
        others = np.flatnonzero(~norm)
        head_frozen = others.size > 0 and bool(frozen[others[-1]])
        learns = ~frozen
        severity: Severity = "info"
        optimized = record.metrics.get("param_optimized")
        message = f"{count} of {total} parameters are frozen, the first is {first}"
        advice = "nothing to do if they are meant to be; else requires_grad_(True)"
        if learns.any() and bool(norm[learns].all()) and head_frozen:
            head = parameter_name(record, header, int(others[-1]))
            severity, frozen_of = "warning", f"{count} of {total} are frozen"
            message = f"only normalisation parameters are trained: {frozen_of}, {first} to the head {head}"
            advice = "set requires_grad_(True) on what should learn (at least the head), before the optimizer is made"
        if not learns.any() and optimized is not None and bool((optimized == 1).any()):
            severity, message = (
                "warning",
                f"all {total} parameters are frozen (requires_grad is False): nothing can learn",
            )
            advice = "set requires_grad_(True) on what should learn, before the forward"
        where = module_of(first)
        yield self.found(where, count, total, message, severity=severity, advice=advice, cause="frozen")

    def _is_norm(self, record: Record, header: RunHeader, trainable: Array) -> Flags:
        known = record.metrics.get("param_is_norm")
        if known is not None and known.shape == trainable.shape:
            return np.equal(known, 1)
        names = (parameter_name(record, header, i) for i in range(trainable.size))
        return np.array([NORM_NAME.search(module_of(name)) is not None for name in names], dtype=bool)


def _meant(view: FlowView, header: RunHeader, silent: Flags, held: Held) -> bool:
    """Whether no optimizer misses what silent points of a flow [P] do not get.

    A net is judged by the backward its own optimizer steps on: where that has no turn in this step, or found gradients
    (of a graph that an earlier step made; of a pass that another optimizer's followed), nothing is cut from it. Nor is
    what no optimizer holds.
    """
    owners = [module_of(parameter_name(view.record, header, i)) for i in range(held.gradient.size)]
    inside = lie_at([view.point(i) for i in range(silent.size)], silent, owners)
    inside = inside & held.trainable if bool((inside & held.trainable).any()) else held.trainable
    if not held.steps.size or bool((inside & held.turn & ~(held.gradient > 0)).any()):
        return False
    return held.steps.size > 1 or bool((inside & ~held.held).any())


def _lie_under(modules: Container[str], rows: Flags, record: Record, header: RunHeader) -> Flags:
    """Which of the parameters in `rows` belong to one of the modules, or to a part of it."""
    found = np.zeros_like(rows)
    for row in np.flatnonzero(rows):
        owner = module_of(parameter_name(record, header, int(row)))
        found[row] = any(path in modules for path in ancestors(owner))
    return found


class ParametersNotOptimized(Detector):
    """Some of the trainable parameters that get a gradient are in no known optimizer (all: `stale_parameters`)."""

    kind, level = "parameters_not_optimized", WIRING
    shown_by = ("param_optimized",)
    yields_to = frozenset({"stale_parameters"})
    advice = (
        "optimizer.add_param_group({'params': ...}), flowscope.wrap(..., optimizer=optimizer), or build the "
        "optimizer after wrap; with several optimizers give them all: watch(model, [first, second])"
    )

    def findings(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """One finding for parameters, two for trainable tensors that no module has registered."""
        yield from self._unregistered(record, header)
        yield from said(self._made_anew(record))
        arrays = [record.metrics.get(name) for name in ("param_trainable", "param_grad_norm", "param_optimized")]
        trainable, norms, optimized = arrays
        if trainable is None or norms is None or optimized is None or bool(np.isnan(optimized).all()):
            yield self.unseen()
            return
        candidates = (trainable == 1) & ~np.isnan(norms)
        left_out = candidates & (optimized == 0)
        if not left_out.any():
            return
        name, count = parameter_name(record, header, int(np.argmax(left_out))), int(left_out.sum())
        message = (
            f"{count} of {int(candidates.sum())} parameters with a gradient are in no optimizer, the first is {name}"
        )
        yield self.found(module_of(name), count, 0.0, message)

    def _made_anew(self, record: Record) -> Finding | None:
        """Parameters of layers that are built inside forward."""
        made, shapes = record.metrics.get("made_anew"), record.metric_labels.get("made_anew", ())
        if made is None or made.size == 0 or not np.isfinite(made).all():
            return None
        message = (
            f"every forward makes {made.sum():.0f} parameters of its own (shape {few(shapes)}): they are random "
            "in each call, and no optimizer ever holds them"
        )
        advice = "build the layer in __init__ and hold it as an attribute; forward only calls it"
        return self.found("", made.sum(), 0.0, message, advice=advice, records=1, cause="made anew")

    def _unregistered(self, record: Record, header: RunHeader) -> Iterable[Finding]:
        """What plain lists, dicts and attributes hold: an info, and a warning once it has a gradient that is lost."""
        missed = record.metrics.get("unregistered")
        if missed is None or missed.size == 0:
            return
        first, count = label_of(record, header, "unregistered", 0, "tensor"), missed.size
        message = (
            f"{count} trainable tensors are in plain lists, dicts or attributes and not registered with the model, the "
            f"first is {first}: model.parameters(), .to() and state_dict() miss them"
        )
        advice = "hold modules in nn.ModuleList or nn.ModuleDict, tensors in nn.Parameter or nn.ParameterList"
        yield self.found(
            first.partition("[")[0],
            count,
            0.0,
            message,
            severity="info",
            advice=advice,
            immediate=True,
            cause="unregistered",
        )
        lost = missed == 1
        if lost.any():
            first, count = label_of(record, header, "unregistered", int(np.argmax(lost)), "tensor"), int(lost.sum())
            message = (
                f"{count} trainable tensors that are not registered with the model have a gradient and are in no "
                f"optimizer, the first is {first}: they never change"
            )
            advice = f"{advice}, before the optimizer is made from model.parameters()"
            yield self.found(first.partition("[")[0], count, 0.0, message, advice=advice, cause="unregistered gradient")
