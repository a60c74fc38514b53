"""`train_eval`: training and evaluation mode differ by dropout and normalisation only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.errors import CannotJudgeError
from flowscope.model.example_inputs import evaluating, modes
from flowscope.model.plan import display_path
from flowscope.torch_internals import FunctionMode
from flowscope.trials.averages import shortened
from flowscope.trials.bench import Bench, Call, Seen
from flowscope.trials.criteria import Listener
from flowscope.trials.kept import put_back
from flowscope.trials.layout import MODEL, first_that_differs, name_of
from flowscope.trials.recomputation import DRAWS as RANDOM
from flowscope.trials.trial import Trial, TrialFinding

_QUIET = ("drop", "norm", "noise")
"""Modules whose class is named so behave otherwise in evaluation by intention."""
DRAWS = 64
"""Draws of a dropout written by hand, whose mean is compared with what it returns in evaluation."""
OFF = 0.1
"""A mean that is off by a smaller share is no mistake."""
SURE = 6.0
"""Standard errors that it must be off."""


class _NoDropout(FunctionMode):
    """Dropout called as a function does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the function would with a probability of 0."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | {"dropout_p": 0.0}
            args = args[:3]
        elif name == "multi_head_attention_forward":
            kwargs["training"] = False  # what it calls is heard no more
        elif "dropout" in name and args and isinstance(args[0], Tensor):
            return args[0]
        return func(*args, **kwargs)


class _Dropping(FunctionMode):
    """Calls `told()` at each dropout that drops: as a function, or within attention."""

    def __init__(self, told: Callable[[], object]) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            given = dict(zip(("attn_mask", "dropout_p"), args[3:], strict=False)) | kwargs
            drops = given.get("dropout_p", 0.0) > 0
        else:
            given = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
            drops = "dropout" in name and given.get("p", 0.5) > 0 and given.get("training", given.get("train", True))
        if drops:
            self._told()
        return func(*args, **kwargs)


class TrainEval(Trial):
    """Run a call in both modes, with dropout and normalisation in evaluation mode in both; then dropout by itself."""

    name = "train_eval"
    proves = "apart from dropout and normalisation, what is evaluated is what is trained"
    blind = "layers that draw in training only are noted, not judged"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: the first module, in the order of the pass, that behaves otherwise."""
        call = bench.calls()[0]
        drops: list[str] = []
        in_evaluation: list[str] = []
        with bench.place() as place, _Dropping(lambda: drops.append(place() or "")), _drawing(place, in_evaluation):
            evaluated = bench.look(call)
        yield from self._mode(bench)
        if (told := self._averaged(bench) or self._dropping(drops)) is not None:
            yield told
            return
        if first_that_differs(evaluated[-1:], bench.look(call)[-1:], _whole) is not None:
            raise CannotJudgeError("the same input gives different outputs in evaluation mode (see determinism)")
        for where, gain, whole in _gains(bench, call):
            message = f"in training {where} returns on average {gain:.3g} times what it returns in evaluation"
            advice = "divide what is kept by 1 - p in training, as nn.Dropout does"
            if whole:
                yield self.noted(
                    where, message, f"right for words or conditions that are left out whole; else {advice}"
                )
            else:
                yield self.failed(where, message, advice)
            return
        moved: dict[str, Tensor] = {}
        in_training: list[str] = []
        trained = self._trained(bench, call, 0, moved, in_training)
        again = self._trained(bench, call, 1, moved, in_training)
        if len(trained[-1].tensors) != len(evaluated[-1].tensors):
            yield self.noted(
                "", "the model returns other tensors in training than in evaluation", "right for detectors"
            )
            return
        if not trained[-1].tensors:
            raise CannotJudgeError("the model returns no floating-point tensor")
        if first_that_differs(trained[-1:], again[-1:], _whole) is not None:
            first = first_that_differs(trained, again, _whole) or trained[-1]
            where = next(iter(in_training), first.path)
            mode = "in training and in evaluation" if where in in_evaluation else "in training"
            message = f"{where or MODEL} draws random numbers {mode} that are no dropout"
            advice = "right for masks and noise that are meant; the answers are random in evaluation, too"
            advice = advice if where in in_evaluation else "right for noise that is meant; it is off in evaluation"
            yield self.noted(where, message, advice)
            return
        if first_that_differs(evaluated[-1:], trained[-1:], _whole, 4096.0) is None:
            yield self.passed("with dropout off and normalisation fixed, both modes give the same output")
            return
        first = first_that_differs(evaluated, trained, _whole, 4096.0) or trained[-1]
        message = (
            f"in training {name_of(first)} returns something else than in evaluation, and no dropout or norm is it"
        )
        owners = {display_path(name.rpartition(".")[0]) for name in moved}
        if any(_lies_in(first.path, owner) for owner in owners) or self._by_moving(bench, call, moved, trained):
            advice = "right for averages that it uses as it updates them; else update them after they are read"
            yield self.noted(first.path, f"{message}; the pass changes buffers that it reads", advice)
            return
        yield self.failed(first.path, message, "look there for self.training, or averaged weights")

    def _mode(self, bench: Bench) -> Iterable[TrialFinding]:
        """A model that is trained in evaluation mode, though it has layers that this switches off."""
        off = [path for path, module in bench.model.named_modules() if _is_of_training(module) and not module.training]
        if not bench.model.training and off:
            message = f"the model is in evaluation mode in training: {len(off)} dropout and batch norm layers are off"
            advice = "call model.train() before training goes on (after an evaluation, or from_pretrained)"
            yield self.noted("", f"{message}, first {off[0]}", advice)

    def _averaged(self, bench: Bench) -> TrialFinding | None:
        """An average of the weights, for evaluation, that holds means of what does not bear averaging."""
        if (vector := shortened(bench.model)) is None:
            return None
        where = display_path(vector.name.rpartition(".")[0].partition(".parametrizations")[0])
        message = f"an average of the model's state holds {vector.name} with length {vector.length:.4g}; a spectral"
        message += " norm's vector has length 1, so what is evaluated has larger weights than what is trained"
        return self.failed(where, message, "average parameters alone, and copy buffers (AveragedModel does so)")

    def _dropping(self, drops: list[str]) -> TrialFinding | None:
        """Dropout that goes on in evaluation."""
        if not drops:
            return None
        message = f"{drops[0] or 'the model'} drops values in evaluation mode, too: its answers are random there"
        advice = "F.dropout(x, p, training=self.training); right only for answers that are drawn on purpose"
        return self.failed(drops[0], message, advice)

    @staticmethod
    def _by_moving(bench: Bench, call: Call, moved: dict[str, Tensor], trained: list[Seen]) -> bool:
        """Whether an evaluation with the buffers that training left gives what training gave."""
        buffers = dict(bench.model.named_buffers())
        with put_back(bench.model), torch.no_grad():
            for name, value in moved.items():
                if name in buffers and buffers[name].shape == value.shape:
                    buffers[name].copy_(value)
            evaluated = bench.look(call)
        return bool(moved) and first_that_differs(evaluated[-1:], trained[-1:], _whole, 4096.0) is None

    @staticmethod
    def _trained(bench: Bench, call: Call, seed: int, moved: dict[str, Tensor], drawn: list[str]) -> list[Seen]:
        """What modules return in training mode, dropout and normalisation layers apart.

        Buffers that the pass changed are added to `moved`, by name; where it drew random numbers, to `drawn`.
        """
        part = bench.model.get_submodule(call.part)
        quiet = modes(bench.model, lambda module: not _is_quiet(module))
        before = {name: buffer.detach().clone() for name, buffer in bench.model.named_buffers()}
        with put_back(bench.model), quiet, torch.no_grad(), bench.alike(seed), bench.place() as place:
            with _drawing(place, drawn), _NoDropout():  # which keeps dropout from being heard
                seen = bench.seen(lambda: part(*call.args, **call.kwargs))
            for name, buffer in bench.model.named_buffers():
                if name in before and buffer.is_floating_point() and not torch.equal(buffer, before[name]):
                    moved[name] = buffer.detach().clone()
        return seen


def _drawing(place: Callable[[], str | None], found: list[str]) -> Listener:
    """Hears functions that draw random numbers: the module that calls one is added to `found`."""

    def heard(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if any(word in getattr(func, "__name__", "") for word in RANDOM):
            found.append(place() or "")

    return Listener(heard)


def _gains(bench: Bench, call: Call) -> Iterable[tuple[str, float, bool]]:
    """Dropout written by hand whose mean in training, <E[y], x> / <x, x> with x in evaluation, is not 1.

    Returns:
        Path, mean, and whether vectors (the last axis) are dropped as wholes.
    """
    own = {
        path: module
        for path, module in bench.model.named_modules()
        if _is_quiet(module) and "drop" in type(module).__name__.lower() and not _is_of_torch(module)
    }
    given: dict[str, tuple[Any, Any]] = {}

    def keep(path: str, args: Any, kwargs: Any) -> None:
        given.setdefault(path, (args, kwargs))

    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, path=path: keep(path, args, kwargs), with_kwargs=True
        )
        for path, module in own.items()
    ]
    try:
        bench.run(call)
    finally:
        for handle in handles:
            handle.remove()
    for path, (args, kwargs) in given.items():
        module = own[path]
        with evaluating(module), torch.no_grad():
            still = module(*args, **kwargs)
        if not isinstance(still, Tensor) or not still.is_floating_point() or not bool(still.any()):
            continue
        x = still.double()
        with modes(module, lambda module: True), torch.no_grad(), bench.alike():
            draws = [module(*args, **kwargs).double() for _ in range(DRAWS)]
        means = torch.stack([(y * x).sum() for y in draws]) / (x * x).sum()
        gain, error = float(means.mean()), float(means.std()) / math.sqrt(DRAWS)
        if abs(gain - 1) > max(OFF, SURE * error):
            lost = (draws[0] == 0) & (x != 0)
            yield display_path(path), gain, bool((lost | (x == 0)).all(-1).eq(lost.any(-1)).all())


def _is_of_training(module: nn.Module) -> bool:
    """Whether a layer drops something, or takes statistics of the batch, in training mode."""
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return dropout or isinstance(module, nn.modules.batchnorm._BatchNorm)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _is_quiet(module: nn.Module) -> bool:
    """Whether a layer is dropout, normalisation or noise, has dropout inside (LSTM), or a normalised weight."""
    if isinstance(module, nn.RNNBase):
        return True
    kinds = [type(module), *(type(hook) for hook in module._forward_pre_hooks.values())]
    named = any(word in kind.__name__.lower() for kind in kinds for word in _QUIET)
    return named and not any(True for _ in module.children())


def _lies_in(path: str, parent: str) -> bool:
    return not parent or path == parent or path.startswith(f"{parent}.")


def _whole(x: Tensor) -> Tensor:
    return x
