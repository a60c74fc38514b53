"""`update`: every parameter that an optimizer holds moves by what that optimizer says."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench
from flowscope.trials.trial import Trial, TrialFinding

DOUBLE = 0.05
"""A movement within this share of twice the expected one was made twice."""
LOST = 0.9
"""Where a larger share of a narrow tensor's numbers stays as it was, its update is rounded away."""
SMALL = 0.01
"""Rounding moves a tensor by less than this share of its norm."""
MORE = 1.5
"""So many times what a checkpoint had trained is told."""
NORM_LIKE = 1
"""Parameters of so many axes at most (gains, biases) do not want decay."""


class Moved(NamedTuple):
    """One parameter's step, and the same step made by a copy of the optimizer on a copy of it."""

    name: str
    before: Tensor
    after: Tensor
    expected: Tensor
    group: dict[str, Any]


class Update(Trial):
    """One step with the gradients of a batch, and the same step recomputed on copies in fp32 or wider."""

    name = "update"
    proves = "each parameter with a gradient that an optimizer holds moves, once, by what the optimizer computes"
    blind = "an optimizer that computes a wrong step everywhere: the copy computes the same one"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding a kind, with its first parameter: not held, held twice, never moving, moved by decay or twice."""
        if not bench.optimizers:
            raise CannotJudgeError("no optimizer is known")
        names = {id(p): name for name, p in bench.model.named_parameters()}
        found = [*self._held(bench, names)]
        moved = [step for optimizer in bench.optimizers for step in _steps(bench, optimizer, names)]
        found += self._movement(moved)
        if not any(finding.status == "fail" for finding in found):
            found.insert(0, self.passed(f"{len(moved)} parameters moved as their optimizer says"))
        yield from found
        yield from self._between(bench)
        yield from self._decay(bench, names)

    def _between(self, bench: Bench) -> Iterable[TrialFinding]:
        """What else than the optimizer changed parameters between two steps of the loop."""
        changed = bench.step.changed if bench.step is not None else {}
        if changed:
            first, left = min(changed.items(), key=lambda one: one[1])
            message = f"{len(changed)} parameters change outside of the optimizer's step, first {first}, of whose step "
            message += f"{left:.2g} is left when the next one begins"
            advice = (
                "right for weights that are clipped or normalised; an average is copied from the model, not into it"
            )
            yield self.noted(first, message, advice)

    def _held(self, bench: Bench, names: dict[int, str]) -> Iterable[TrialFinding]:
        held = Counter(id(p) for o in bench.optimizers for group in o.param_groups for p in group["params"])
        model = dict(bench.model.named_parameters())
        gradients = bench.gradients(bench.batches[0])
        left = [name for name in gradients if id(model[name]) not in held]
        strangers = [one for one in held if one not in names]
        if left:
            message = f"{len(left)} parameters get a gradient and are in no optimizer, first {left[0]}"
            advice = "make the optimizer after the model is whole, or add_param_group what was added"
            yield self.failed(left[0], message, advice)
        if strangers and left:
            message = f"the optimizer holds {len(strangers)} tensors that are no longer the model's"
            yield self.failed("", message, "make the optimizer after the model's parameters were replaced or moved")
        if twice := [names[one] for one, count in held.items() if count > 1 and one in names]:
            message = f"{len(twice)} parameters are held twice, first {twice[0]}: each step moves them twice"
            yield self.failed(twice[0], message, "give each parameter to one group of one optimizer")
        total = sum(p.numel() for p in model.values())
        free = sum(p.numel() for p in model.values() if p.requires_grad)
        learns = any(p.requires_grad for o in bench.optimizers for g in o.param_groups for p in g["params"])
        if free == 0 or not learns:
            message = "no parameter that the optimizer holds is trainable"
            yield self.failed("", message, "requires_grad_(True) on what should learn, before the optimizer is made")
        elif free < total:
            message = f"{free / total:.1%} of the model's {total} numbers are trainable"
            yield self.noted("", message, "nothing to do if that is meant; compare with the checkpoint's when resuming")
        yield from self._resumed(bench, model, free)

    def _resumed(self, bench: Bench, model: dict[str, torch.nn.Parameter], free: int) -> Iterable[TrialFinding]:
        """Far more that is trainable than the checkpoint had trained."""
        trained = bench.resumed.trained if bench.resumed is not None else frozenset()
        before = sum(model[n].numel() for n in trained if n in model)
        if before and free > MORE * before:
            message = f"{free} numbers are trainable, {free / before:.3g} times those of the checkpoint ({before})"
            advice = (
                "freeze again what was frozen before (requires_grad_(False) on the base), unless more is to be trained"
            )
            first = next(n for n, p in model.items() if p.requires_grad and n not in trained)
            yield self.noted(first, message, advice)

    def _movement(self, moved: list[Moved]) -> Iterable[TrialFinding]:
        resting: dict[str, list[str]] = {"not": [], "rounded": [], "decay": [], "twice": [], "rate": []}
        for step in moved:
            if kind := _kind(step):
                resting[kind].append(step.name)
        if names := resting["not"]:
            message = f"{names[0]} has a gradient and did not move ({len(names)} such): the step wrote elsewhere"
            yield self.failed(
                names[0], message, "look whether the optimizer writes to a copy (.contiguous(), .to(), .t())"
            )
        if names := resting["rounded"]:
            dtype = next(step.before.dtype for step in moved if step.name == names[0])
            message = f"the update of {names[0]} is rounded away in {dtype} ({len(names)} such)".replace("torch.", "")
            yield self.failed(
                names[0], message, "keep fp32 weights (autocast instead of .bfloat16()), or raise the rate"
            )
        if names := resting["decay"]:
            message = f"{names[0]} moved by weight decay alone, its gradient had no part in it ({len(names)} such)"
            yield self.failed(names[0], message, "look why the optimizer's step leaves the gradient out")
        if names := resting["twice"]:
            message = f"{names[0]} moved by twice what the optimizer says ({len(names)} such)"
            yield self.failed(
                names[0], message, "look for a second step: an optimizer in a hook, or a group held twice"
            )
        if names := resting["rate"]:
            message = f"the rate of {len(names)} parameters is 0 now, first {names[0]}"
            yield self.noted(names[0], message, "right in the first step of a warm-up; else look at the schedule")

    def _decay(self, bench: Bench, names: dict[int, str]) -> Iterable[TrialFinding]:
        groups = [group for optimizer in bench.optimizers for group in optimizer.param_groups]
        decayed = [
            names[id(p)]
            for group in groups
            if group.get("weight_decay")
            for p in group["params"]
            if p.dim() <= NORM_LIKE and id(p) in names
        ]
        if decayed:
            message = f"{len(decayed)} gains and biases are in a group with weight decay, first {decayed[0]}"
            yield self.noted(decayed[0], message, "usually they are left out of decay")


def _steps(bench: Bench, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[Moved]:
    """One step of the optimizer, and of a copy on copies."""
    bench.gradients(bench.batches[0])
    held = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    held = [(p, group) for p, group in held if id(p) in names]
    before = [p.detach().clone() for p, _ in held]
    copies = _expected(optimizer)
    with bench.alike():
        optimizer.step()
    return [
        Moved(names[id(p)], old, p.detach(), copies[id(p)], group) for (p, group), old in zip(held, before, strict=True)
    ]


def _expected(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Where a copy of the optimizer moves contiguous copies of its parameters, in fp32 or wider.

    Raises:
        CannotJudgeError: it cannot be copied.
    """
    wide: dict[int, Tensor] = {}

    def widened(x: Any) -> Any:
        dtype = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        return x.detach().clone().to(dtype)

    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            twin = torch.nn.Parameter(widened(p).contiguous())
            twin.grad = None if p.grad is None else widened(p.grad).contiguous()
            wide[id(p)] = memo[id(p)] = twin
    try:
        twin_optimizer = object.__new__(type(optimizer))  # copy.copy would leave out attributes of its own
        vars(twin_optimizer).update(vars(optimizer))
        twin_optimizer.param_groups = copy.deepcopy(optimizer.param_groups, memo)
        state: Any = type(optimizer.state)(optimizer.state.default_factory)
        for p, values in optimizer.state.items():
            state[memo[id(p)]] = {
                key: widened(value).contiguous()
                if isinstance(value, Tensor) and value.shape == p.shape
                else copy.deepcopy(value)
                for key, value in values.items()
            }
        twin_optimizer.state = state
        type(optimizer).step(twin_optimizer)
    except Exception as error:
        name, kind = type(optimizer).__name__, type(error).__name__
        raise CannotJudgeError(f"{name} cannot be copied ({kind}: {error})") from None
    return {key: value.detach() for key, value in wide.items()}


def _kind(step: Moved) -> str:
    """What is wrong with one step; "" where nothing is."""
    expected = (step.expected - step.before).double()
    real = step.after.double() - step.before.double()
    if float(expected.abs().max()) == 0:
        return "rate" if float(step.group.get("lr", 1)) == 0 else ""
    rate, decay = float(step.group.get("lr", 0)), float(step.group.get("weight_decay", 0) or 0)
    wanted = expected != 0
    lost = float((wanted & (real == 0)).sum() / wanted.sum())
    if step.before.element_size() < 4 and lost > LOST and _near(step.after.double(), step.expected.double(), SMALL):
        return "rounded"
    if not bool(real.any()):
        return "not"
    shrunk = -rate * decay * step.before.double()
    if decay and _near(real, shrunk, 1e-3) and not _near(expected, shrunk, 1e-3):
        return "decay"
    return "twice" if _near(real, 2 * expected, DOUBLE) and not _near(real, expected, DOUBLE) else ""


def _near(a: Tensor, b: Tensor, share: float) -> bool:
    return float((a - b).norm()) <= share * float(b.norm())
