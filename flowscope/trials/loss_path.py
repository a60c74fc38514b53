"""`loss_path`: every differentiable number that a forward pass makes has a path to the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.model.nested import nested_tensors
from flowscope.torch_internals import leaves_below, nodes_below
from flowscope.trials.bench import Bench
from flowscope.trials.criteria import Listener
from flowscope.trials.trial import Trial, TrialFinding

_SUMS = frozenset({"sum", "mean", "norm", "vector_norm", "logsumexp", "cross_entropy", "mse_loss", "kl_div", "l1_loss"})
_ARITHMETIC = frozenset({"mul", "add", "div", "sub", "neg", "pow", "sqrt", "square", "log", "exp"})

TERMS = ("loss", "aux", "penal", "regul", "commit", "balanc", "diverg", "cost", "objective", "constraint")
WORDS = frozenset({"reg", "kl", "kld", "lb", "tv", "vq", "nll", "mse", "bce", "ce", "l1", "l2", "elbo", "term"})
"""What a term of a loss is called (parts of its name, or whole words of it) where a module keeps it.

Under other names it may be kept for a log.
"""
SAME = 0.999
"""Gradients of a larger cosine are those of one loss."""


class LossPath(Trial):
    """Listen to what modules compute; numbers with a gradient that nothing leads on from are a term thrown away."""

    name = "loss_path"
    proves = "no term of a loss that a module computes is lost on the way"
    blind = "terms that are computed without gradient, and numbers that are no sum or mean"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding a module whose number has no path to the loss."""
        made: list[tuple[str, Tensor]] = []
        read = _Detached()
        own: list[Any] = []  # the nodes of the losses that the model returns
        handle = bench.model.register_forward_hook(lambda module, args, output: own.append(_loss_in(output)))
        with handle, bench.place() as place:

            def heard(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
                read.heard((args, kwargs), result)
                if (where := place()) is None or not isinstance(result, Tensor) or result.numel() != 1:
                    return
                name = getattr(func, "__name__", "").strip("_")
                if result.requires_grad and (name in _SUMS or name.removeprefix("r") in _ARITHMETIC):
                    made.append((where, result))

            with bench.alike(), Listener(heard):
                loss = bench.loss(bench.batches[0])
        yield from self._judged(bench, loss, made, read, set(nodes_below(own)))

    def _judged(
        self, bench: Bench, loss: Tensor, made: list[tuple[str, Tensor]], read: _Detached, own: set[Any]
    ) -> Iterable[TrialFinding]:
        on_path, before = set(nodes_below([loss.grad_fn])), 0
        while len(on_path) > before:  # what is read detached may have read so itself
            before = len(on_path)
            on_path |= set(nodes_below(read.behind(on_path)))
        off = [(where, x) for where, x in made if x.grad_fn not in on_path]
        # of a chain of numbers the last one tells
        inner = {node for _, x in off for node in nodes_below([x.grad_fn]) if node is not x.grad_fn}
        held = {id(p) for p in bench.model.parameters()}
        lost: dict[str, Tensor] = {}
        for where, x in off:
            learns = x.grad_fn not in inner and any(id(leaf) in held for leaf in leaves_below([x.grad_fn]))
            if learns and not _is_the_loss(x, loss, list(bench.model.parameters())):
                lost.setdefault(where, x)
        for where, x in lost.items():
            message = f"{where or 'the model'} computes {float(x.detach()):.3g} with a gradient, and no loss uses it"
            advice = "add it to the loss (a balance or auxiliary term), or compute it under no_grad"
            if x.grad_fn in own:
                message = f"the model returns a loss of its own ({float(x.detach()):.3g}), and is trained by another"
                yield self.noted(where, message, "right for a trainer that makes its loss of the other outputs")
                continue
            name = _kept_as(bench.model, x)
            tell = self.noted if name and not _is_a_term(name.lower()) else self.failed
            yield tell(where, f"{message}; it is kept as {name}" if name else message, advice)
        if not lost:
            yield self.passed(f"each of {len(made)} numbers that modules compute leads to the loss")


class _Detached:
    """What is read without its gradient, on purpose: a number that is detached, and then part of the loss."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Tensor, set[Any]]] = {}
        self._readers: list[tuple[Any, set[Any]]] = []

    def heard(self, given: Any, result: Any) -> None:
        """One function was called."""
        inputs = [*nested_tensors(given)]
        known = [self._sources[id(x)][1] for x in inputs if id(x) in self._sources]
        for made in nested_tensors(result):
            if made.requires_grad:
                self._readers += [(made.grad_fn, sources) for sources in known]
            elif sources := set().union(*known, (x.grad_fn for x in inputs if x.grad_fn is not None)):
                self._sources[id(made)] = made, sources

    def behind(self, on_path: set[Any]) -> list[Any]:
        """The nodes whose values are read, without a gradient, by what leads to the loss."""
        return [node for reader, sources in self._readers if reader in on_path for node in sources]


def _loss_in(output: Any) -> Any:
    """The node of what a model returns by the name of a loss, as those of transformers do; None where there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    return loss.grad_fn if isinstance(loss, Tensor) else None


def _is_a_term(name: str) -> bool:
    return any(part in name for part in TERMS) or not WORDS.isdisjoint(name.split("_"))


def _kept_as(model: nn.Module, x: Tensor) -> str:
    """The attribute of a module that holds a number; "" where none does."""
    for module in model.modules():
        for name, value in vars(module).items():
            if value is x or (isinstance(value, (list, tuple, dict)) and any(y is x for y in nested_tensors(value))):
                return name
    return ""


def _is_the_loss(x: Tensor, loss: Tensor, parameters: list[Tensor]) -> bool:
    """Whether a number has the loss's gradient but for a factor: the same loss in another unit (its mean, its exp)."""
    asked = [p for p in parameters if p.requires_grad]
    both = [torch.autograd.grad(y, asked, retain_graph=True, allow_unused=True) for y in (x, loss)]
    if any((a is None) != (b is None) for a, b in zip(*both, strict=True)):
        return False
    a, b = (torch.cat([g.double().flatten() for g in one if g is not None]) for one in both)
    return float(a @ b) >= SAME * float(a.norm() * b.norm())
