"""`gradient`: the gradient that backward gives is the one that differences of the loss give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowscope.errors import CannotJudgeError
from flowscope.model.nested import nested_tensors
from flowscope.model.plan import display_path
from flowscope.torch_internals import FunctionMode
from flowscope.trials.bench import Bench, map_batch
from flowscope.trials.trial import Trial, TrialFinding

PASSES = 4
"""Forward passes a group takes."""
STEP = 1e-6
"""How far a group's parameters are moved, relative to their norm, in fp64."""
AGREE = 1e-3
"""Two derivatives that differ by less than this share of the larger one are equal."""
GROUPS = 24
"""So many groups of parameters are tried at most ..."""
FEWEST, AFFORDED = 6, 2e11
"""... and fewer, but so many, where their passes would take more floating-point operations than this."""
FLAT = 1e-8
"""A derivative below this share of the loss, for a step of the parameters' own size, is none."""


class Slope(NamedTuple):
    """The derivative of the loss along one direction: by differences with two steps, and by the gradient.

    `kink` is by how much the derivatives to both sides differ: 0 but where a unit stands at exactly 0, or the like.
    """

    group: str
    wide: float
    narrow: float
    kink: float
    claimed: float
    reached: bool
    scale: float

    @property
    def smooth(self) -> bool:
        """Whether the two steps agree, and no kink is what the gradient is off by."""
        agree = abs(self.wide - self.narrow) <= AGREE * max(abs(self.wide), abs(self.narrow)) + self.flat
        return agree and (self.right or abs(self.kink) < abs(self.narrow - self.claimed))

    @property
    def flat(self) -> float:
        """Below this a derivative is none."""
        return FLAT * self.scale

    @property
    def right(self) -> bool:
        """Whether the gradient says what the differences say."""
        return abs(self.narrow - self.claimed) <= AGREE * max(abs(self.narrow), abs(self.claimed)) + self.flat


class Gradient(Trial):
    """Move one group of parameters a little to both sides along a random direction, in fp64, and compare."""

    name = "gradient"
    proves = "<gradient, d> = (L(w + e d) - L(w - e d)) / 2e for a random d in each group of parameters"
    blind = "a wrong derivative that is right along the direction drawn; parts that do not run in fp64"
    cut = True

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding a kind of disagreement, with the first group in module order, the deepest of its path."""
        calls: list[_Applied] = []
        passes = int(AFFORDED / bench.flops / PASSES) if bench.flops else GROUPS
        with _in_double(bench):
            batch = _doubled(bench.batches[0])
            parameters = {n: p for n, p in bench.model.named_parameters() if p.requires_grad}
            with _hearing(bench, calls):
                loss, gradients = _loss_and_gradients(bench, batch)
            if not torch.isfinite(loss):
                raise CannotJudgeError("the loss is not finite")
            groups = _groups(parameters, max(FEWEST, min(GROUPS, passes)))
            slopes = [_slope(bench, batch, name, group, gradients, float(loss)) for name, group in groups]
            wrong = [_local(call) for call in calls]
        yield from self._judged(slopes, [one for one in wrong if one is not None], len(parameters))

    def _judged(self, slopes: list[Slope], functions: list[_Wrong], count: int) -> Iterable[TrialFinding]:
        broken = [one for one in functions if one.kind == "wrong"]
        meant = [one for one in functions if one.kind != "wrong"]
        off = [slope for slope in slopes if slope.smooth and not slope.right]
        for one in {(one.where, one.name): one for one in broken}.values():
            message = f"the backward of {one.name} is not the derivative of its forward: {one.seen}"
            yield self.failed(one.where, message, "test it with torch.autograd.gradcheck in fp64")
        for one in {(one.where, one.name): one for one in meant}.values():
            advice = "right for a straight-through estimate or an injected loss"
            yield self.noted(one.where, f"{one.name} {one.seen}", advice)
        cut = [s for s in off if not s.reached or abs(s.claimed) <= s.flat]
        if cut and not broken:
            last = cut[-1]
            message = f"the loss depends on {last.group} (slope {last.narrow:.3g}) and its gradient says 0"
            status = self.failed if all(not s.reached for s in cut) else self.noted
            advice = "look behind it for .detach(), .data, no_grad or a tensor made from numbers"
            yield status(last.group, message, advice)
        bent = [s for s in off if s not in cut]
        if bent and not broken:
            first = bent[-1]
            message = f"the gradient of {first.group} says {first.claimed:.4g}, the loss moves by {first.narrow:.4g}"
            advice = "look on its way for a stop-gradient, or a checkpoint that computes something else (recomputation)"
            advice = "as the custom function above has it" if meant else advice
            yield self.noted(first.group, message, advice)
        if not off and not broken:
            judged = [slope for slope in slopes if slope.smooth]
            rest = f"; {len(slopes) - len(judged)} are not smooth there" if len(judged) < len(slopes) else ""
            if not judged:
                raise CannotJudgeError("the loss is not smooth along any group of parameters")
            yield self.passed(f"{len(judged)} groups of {count} parameters: differences and gradient agree{rest}")


def _groups(parameters: dict[str, nn.Parameter], most: int) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """Parameters by the module that holds them; by the outer one where there would be too many."""
    for depth in range(12, 0, -1):
        groups: dict[str, dict[str, nn.Parameter]] = {}
        for name, p in parameters.items():
            owner = name.rpartition(".")[0]
            groups.setdefault(".".join(owner.split(".")[:depth]), {})[name] = p
        if len(groups) <= most:
            break
    for name, group in groups.items():
        yield display_path(name), group


def _loss_and_gradients(bench: Bench, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    for p in bench.model.parameters():
        p.grad = None
    with bench.alike(), _same_buffers(bench.model):
        loss = bench.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {n: p.grad.detach().clone() for n, p in bench.model.named_parameters() if p.grad is not None}


def _slope(
    bench: Bench, batch: Any, name: str, group: dict[str, nn.Parameter], gradients: dict[str, Tensor], loss: float
) -> Slope:
    draw = torch.Generator().manual_seed(len(name) + 17)
    directions = {n: torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p) for n, p in group.items()}
    for n, p in group.items():
        owner = bench.model.get_submodule(n.rpartition(".")[0])
        if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
            directions[n][owner.padding_idx] = 0  # it has no gradient by definition
        directions[n] *= max(float(p.detach().norm()), 1e-3) / max(float(directions[n].norm()), 1e-30)
    claimed = sum(float((gradients[n] * directions[n]).sum()) for n in group if n in gradients)

    def at(distance: float) -> float:
        with torch.no_grad():
            for n, p in group.items():
                p.add_(directions[n], alpha=distance)
            with bench.alike(), _same_buffers(bench.model):
                value = float(bench.loss(batch))
            for n, p in group.items():
                p.sub_(directions[n], alpha=distance)
        return value

    (slope, bend), (narrow, bent) = (_slope_and_bend(at(step), loss, at(-step), step) for step in (STEP, STEP / 8))
    # curvature bends an eighth of the step an eighth as much, a kink as much
    kink = (8 * bent - bend) / 7
    reached = any(n in gradients for n in group)
    return Slope(name or "model", slope, narrow, kink, claimed, reached, abs(loss) + 1e-12)


def _slope_and_bend(above: float, here: float, below: float, step: float) -> tuple[float, float]:
    return (above - below) / (2 * step), (above - 2 * here + below) / step


@contextlib.contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """What a forward writes into buffers (statistics, a power iteration) is undone: all passes begin alike."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)


@contextlib.contextmanager
def _in_double(bench: Bench) -> Iterator[None]:
    """The model in fp64, also where it asks for another kind; put back by the one who runs trials."""
    for module in bench.model.modules():
        held = vars(module)
        for name, value in held.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                held[name] = value.double()
    for tensor in (*bench.model.parameters(), *bench.model.buffers()):
        if tensor.is_floating_point():
            tensor.grad = None
            tensor.data = tensor.data.double()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    except (RuntimeError, TypeError) as error:
        raise CannotJudgeError(f"it does not run in fp64 ({str(error).splitlines()[0][:120]})") from None
    finally:
        torch.set_default_dtype(default)


SMALLEST = 1e-7
"""Slopes below this are rounding."""
UNSTEADY = 1e-3
"""Differences over one step and over eight times that agree to this share, where they are a derivative."""
_NARROWING = frozenset({"float", "half", "bfloat16"})


class _Wide(FunctionMode):
    """Whoever asks for a narrower floating-point kind (`x.float()`, `dtype=torch.float32`) is given fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with fp64 in the place of other kinds."""
        name = getattr(func, "__name__", "")
        if name in _NARROWING and args and isinstance(args[0], Tensor):
            return args[0].double()
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _doubled(batch: Any) -> Any:
    return map_batch(batch, lambda x: x.double() if x.is_floating_point() else x)


# -- functions with a backward of their own ---------------------------------------------------------------------------


class _Applied(NamedTuple):
    """One call of a torch.autograd.Function."""

    function: Any
    where: str
    args: tuple[Any, ...]


class _Wrong(NamedTuple):
    """One whose backward is not the derivative of its forward, and how."""

    name: str
    where: str
    kind: str
    seen: str


@contextlib.contextmanager
def _hearing(bench: Bench, calls: list[_Applied]) -> Iterator[None]:
    """Note each call of a custom function, and in which module."""
    original = torch.autograd.Function.__dict__["apply"]
    with bench.place() as place:

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not cls.__module__.startswith("torch."):
                held = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
                calls.append(_Applied(cls, place() or "", held))
            return original.__get__(None, cls)(*args, **kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _local(call: _Applied) -> _Wrong | None:
    """What is wrong with one custom function, judged alone and by each output: its derivative in fp64."""
    try:
        with torch.no_grad():
            made = [x for x in nested_tensors(call.function.apply(*call.args)) if x.is_floating_point()]
        with _Wide():
            found = [_of_output(call, n, len(made)) for n in range(len(made))]
    except Exception:
        return None
    told = sorted(filter(None, found), key=lambda one: one.kind != "wrong")
    return told[0] if told else None


def _of_output(call: _Applied, which: int, count: int) -> _Wrong | None:
    """The derivative of one output along a random direction of each input."""
    floating = [n for n, a in enumerate(call.args) if isinstance(a, Tensor) and a.is_floating_point()]
    name, where = call.function.__name__, call.where
    draw = torch.Generator().manual_seed(5)
    weights: list[Tensor] = []

    def value(args: list[Any]) -> Tensor:
        x = [x for x in nested_tensors(call.function.apply(*args)) if x.is_floating_point()][which]
        if not weights:
            weights.append(torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.device))
        return (x * weights[0]).sum()

    args = [a.double().requires_grad_() if n in floating else a for n, a in enumerate(call.args)]
    total = value(args)
    if not floating or not total.requires_grad:
        return None  # it is marked as not differentiable
    gradients = torch.autograd.grad(total, [args[n] for n in floating], allow_unused=True)
    if count > 1 and not any(g is not None and bool(g.any()) for g in gradients):
        return _Wrong(name, where, "meant", f"gives no gradient for output {which} of {count}")
    for n, gradient in zip(floating, gradients, strict=True):
        if gradient is None or (slopes := _slopes(value, args, n, draw)) is None:
            continue
        slope, claimed = slopes[0], float((gradient * slopes[1]).sum())
        size = max(abs(slope), abs(claimed))
        if abs(slope - claimed) <= 1e-3 * size + SMALLEST:
            continue
        if abs(slope) <= 1e-6 * size:
            return _Wrong(name, where, "meant", "gives a gradient to an input that its output does not depend on")
        return _Wrong(name, where, "wrong", f"it says {claimed:.4g}, differences {slope:.4g}")
    return None


def _slopes(
    value: Callable[[list[Any]], Tensor], args: list[Any], n: int, draw: torch.Generator
) -> tuple[float, Tensor] | None:
    """The derivative along a random direction of one argument by differences, and the direction.

    None where they do not tell: the function rounds inside, or is kinked there.
    """
    direction = torch.randn(args[n].shape, generator=draw, dtype=torch.float64).to(args[n].device)
    # of ones, not of their sum: many functions are kinked, and a small step meets few kinks
    step = 1e-6 * float(args[n].detach().abs().mean() + 1e-9)

    def moved(by: float) -> float:
        with torch.no_grad():
            return float(value([a + by * direction if k == n else a for k, a in enumerate(args)]))

    slope, wider = ((moved(h) - moved(-h)) / (2 * h) for h in (step, 8 * step))
    if abs(slope - wider) > UNSTEADY * max(abs(slope), abs(wider)) + SMALLEST:
        return None
    return slope, direction
