"""`train_eval`: training and evaluation mode differ by dropout and normalisation only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flowscope.errors import CannotJudgeError
from flowscope.trials.bench import Bench, Call, Seen, modes
from flowscope.trials.kept import put_back
from flowscope.trials.layout import first_that_differs, name_of
from flowscope.trials.trial import Trial, TrialFinding

_QUIET = ("drop", "norm", "noise")
"""Modules whose class is named so behave otherwise in evaluation by intention."""


class _NoDropout(TorchFunctionMode):
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


class TrainEval(Trial):
    """Run a call in both modes, with dropout and normalisation in evaluation mode in both."""

    name = "train_eval"
    proves = "apart from dropout and normalisation, what is evaluated is what is trained"
    blind = "layers that draw in training only are noted, not judged"

    def findings(self, bench: Bench) -> Iterable[TrialFinding]:
        """One finding: the first module, in the order of the pass, that behaves otherwise."""
        call = bench.calls()[0]
        evaluated = bench.look(call)
        trained, again = self._trained(bench, call, 0), self._trained(bench, call, 1)
        if len(trained[-1].tensors) != len(evaluated[-1].tensors):
            yield self.noted(
                "", "the model returns other tensors in training than in evaluation", "right for detectors"
            )
            return
        if not trained[-1].tensors:
            raise CannotJudgeError("the model returns no floating-point tensor")
        if first_that_differs(trained[-1:], again[-1:], _whole) is not None:
            first = first_that_differs(trained, again, _whole) or trained[-1]
            message = f"{name_of(first)} draws random numbers in training that are no dropout"
            yield self.noted(first.path, message, "right for noise that is meant; it is off in evaluation")
            return
        if first_that_differs(evaluated[-1:], trained[-1:], _whole, 4096.0) is None:
            yield self.passed("with dropout off and normalisation fixed, both modes give the same output")
            return
        first = first_that_differs(evaluated, trained, _whole, 4096.0) or trained[-1]
        message = (
            f"in training {name_of(first)} returns something else than in evaluation, and no dropout or norm is it"
        )
        yield self.failed(
            first.path, message, "look there for self.training, a buffer changed in forward, or averaged weights"
        )

    @staticmethod
    def _trained(bench: Bench, call: Call, seed: int) -> list[Seen]:
        """What modules return in training mode, dropout and normalisation layers apart."""
        part = bench.model.get_submodule(call.part)
        quiet = modes(bench.model, lambda module: not _is_quiet(module))
        with put_back(bench.model), quiet, torch.no_grad(), bench.alike(seed), _NoDropout():
            return bench.seen(lambda: part(*call.args, **call.kwargs))


def _is_quiet(module: nn.Module) -> bool:
    """Whether a layer is dropout, normalisation or noise, or its weight is normalised (spectral_norm)."""
    kinds = [type(module), *(type(hook) for hook in module._forward_pre_hooks.values())]
    named = any(word in kind.__name__.lower() for kind in kinds for word in _QUIET)
    return named and not any(True for _ in module.children())


def _whole(x: Tensor) -> Tensor:
    return x
