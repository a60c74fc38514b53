"""What a loss is made of: the calls of torch's loss functions, and what else the way from the outputs to it tells."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flowscope.torch_internals import FunctionMode
from flowscope.trials.bench import Bench

CLASSES = "classes"
"""The target is the number of a class: cross_entropy, nll_loss."""
LABELS = "labels"
"""The target is between 0 and 1 for each output: binary_cross_entropy and that with logits."""
VALUES = "values"
"""The target is the output itself: mse_loss, l1_loss, smooth_l1_loss, huber_loss."""

_KINDS: dict[str, str] = {
    "cross_entropy": CLASSES,
    "nll_loss": CLASSES,
    "binary_cross_entropy": LABELS,
    "binary_cross_entropy_with_logits": LABELS,
    "mse_loss": VALUES,
    "l1_loss": VALUES,
    "smooth_l1_loss": VALUES,
    "huber_loss": VALUES,
}
_SIGNATURES = {name: inspect.signature(getattr(functional, name)) for name in _KINDS}
_SHAPE_ONLY = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "Transpose", "Permute", "Slice", "Select", "Squeeze", "Unsqueeze", "Expand")
) | {"ReshapeAliasBackward0", "TBackward0", "CloneBackward0", "ToCopyBackward0", "AliasBackward0", "IndexBackward0"}
_TWO_SIDED = frozenset({"sub", "rsub", "__sub__", "__rsub__", "subtract", "mul", "__mul__", "div", "__truediv__"})


@dataclass(frozen=True)
class Criterion:
    """One call of a loss function.

    Attributes:
        name: of the function.
        kind: CLASSES, LABELS or VALUES.
        input: what came out of the model.
        target: what it is compared with.
        given: the other arguments by name.
        value: what it returned.
    """

    name: str
    kind: str
    input: Tensor
    target: Tensor
    given: dict[str, Any]
    value: Tensor

    @property
    def ignored(self) -> int:
        """The class that does not count."""
        return int(self.given.get("ignore_index", -100))

    @property
    def class_axis(self) -> int:
        """The axis of the classes in the input: the last of [N, C] and [C], the second of [N, C, ...]."""
        return 0 if self.input.dim() == 1 else 1

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.input.shape[self.class_axis])

    @property
    def counted(self) -> Tensor:
        """The targets that count, [N]; whole numbers only."""
        flat = self.target.detach().flatten()
        return flat[flat != self.ignored]

    def made_by(self) -> str:
        """The last operation on the input that is more than a change of shape, such as "Softmax"; "" for a leaf."""
        return last_operation(self.input)


@dataclass(frozen=True)
class Widened:
    """An operation that made more of two tensors than either held: [B, 1] against [B] gives [B, B]."""

    name: str
    left: tuple[int, ...]
    right: tuple[int, ...]


class Listener(FunctionMode):
    """Hears each function of torch while it is entered: `heard(function, args, kwargs, result)`."""

    def __init__(self, heard: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._heard = heard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function as it would be without us; then tell."""
        result = func(*args, **(kwargs or {}))
        self._heard(func, args, kwargs or {}, result)
        return result


def criteria(bench: Bench, batch: Any) -> tuple[Tensor, list[Criterion], list[Widened]]:
    """The loss of a batch, the loss functions it called, outermost calls only, and what was widened on the way.

    Products and differences within a module's forward are its own affair; torch's loss functions there are a loss.
    """
    found: list[Criterion] = []
    widened: list[Widened] = []

    def heard(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        if name in _KINDS and func is getattr(functional, name) and isinstance(result, Tensor):
            bound = _SIGNATURES[name].bind(*args, **kwargs)
            bound.apply_defaults()
            rest = {key: value for key, value in bound.arguments.items() if key not in ("input", "target")}
            pair = bound.arguments["input"], bound.arguments["target"]
            found.append(Criterion(name, _KINDS[name], *pair, rest, result))
        if (name in _TWO_SIDED and running() is None) or _KINDS.get(name) in (VALUES, LABELS):
            sides = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)][:2]
            if len(sides) == 2 and _widens(*sides) and any(side.requires_grad for side in sides):
                widened.append(Widened(name, tuple(sides[0].shape), tuple(sides[1].shape)))

    with bench.place() as running, bench.alike(), Listener(heard):
        loss = bench.loss(batch)
    return loss, found, widened


def _widens(a: Tensor, b: Tensor) -> bool:
    """Whether one has an axis of size 1 too many: as many numbers, in shapes that broadcast into a square.

    Axes of size 1 on both sides, as in `a[:, None] - b[None]`, were written on purpose.
    """
    if a.dim() == b.dim():
        return False
    try:
        shape = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return a.numel() == b.numel() > 1 and math.prod(shape) > a.numel()


def last_operation(x: Tensor) -> str:
    """The name of what computed a tensor, changes of shape left out: "Softmax", "Sigmoid", "Addmm", ...; "" for a leaf.

    Of several inputs the first counts.
    """
    node = x.grad_fn
    while node is not None and node.name() in _SHAPE_ONLY and node.next_functions:
        node = node.next_functions[0][0]
    return "" if node is None else node.name().removesuffix("Backward0").removesuffix("Backward1")
