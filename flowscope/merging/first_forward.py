"""What can only be checked at the first forward of a model that was wrapped without example inputs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.merging.comparison import plain_run, run, woven_connections
from flowscope.merging.connection import Connection
from flowscope.merging.verification import check_kept, refuse_idle
from flowscope.model.example_inputs import untouched
from flowscope.model.sites import Trial
from flowscope.torch_internals import no_training_pass


class FirstForward:
    """Checks after the model's first forward what could not be checked without example inputs.

    That each block found by structure alone has run; and that the output is kept, where the mode promises it, nothing
    was trained or loaded yet, and the arguments can be passed again (tensors and plain values: no cache that fills).
    """

    start: list[dict[str, Tensor]] | None = None  # pickles of 0.1 have none: nothing to compare with

    def __init__(self, promised: list[str]) -> None:
        self.promised = promised
        self.ran: set[str] = set()
        self.done = False

    @classmethod
    def attach(cls, model: nn.Module, promised: list[str]) -> None:
        """Watch the model's first forward."""
        check = cls(promised)
        check.start = [copy.deepcopy(connection.state_dict()) for connection in woven_connections(model)]
        model.register_forward_hook(check, with_kwargs=True)
        for path in promised:
            model.get_submodule(path).register_forward_hook(BlockRan(check, path))

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Check once, after the forward of the whole model (hooked by 0.1, it gets no keyword arguments)."""
        if self.done or torch.compiler.is_compiling():
            return
        self.done = True
        remove_hooks(module, FirstForward, BlockRan)
        refuse_idle(self.ran, self.promised)
        if self.can_compare(module, (args, kwargs)):
            trial = Trial(module, (args, kwargs), None)
            with untouched(module):
                again = run(trial)
            check_kept(module, replace(trial, output=plain_run(module, trial, Connection)), again)

    def can_compare(self, module: nn.Module, call: Any) -> bool:
        """Whether the model can be run again on these arguments, plain and wrapped, and should give the same."""
        found = woven_connections(module)
        if self.start is None or not all(c.keeps_output() for c in found) or no_training_pass():
            return False
        plain = is_plain(call) and all(type(p) is nn.Parameter for p in module.parameters())  # no sharded ones
        now = (connection.state_dict() for connection in found)
        return plain and all(same(a, b) for a, b in zip(self.start, now, strict=True))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are equal."""
    return all(torch.equal(value.to(b[name]), b[name]) for name, value in a.items())


def is_plain(value: Any) -> bool:
    """Whether a value holds nothing but tensors and constants."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


class BlockRan:
    """Notes that a block ran."""

    def __init__(self, check: FirstForward, path: str) -> None:
        self.check, self.path = check, path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note it."""
        if not self.check.done and not torch.compiler.is_compiling():
            self.check.ran.add(self.path)


def remove_hooks(model: nn.Module, *kinds: type) -> None:
    """Take the forward hooks of these classes off a model."""
    for module in model.modules():
        for hooks, keyed in (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        ):
            for key, hook in list(hooks.items()):
                if isinstance(hook, kinds):
                    del hooks[key]
                    keyed.pop(key, None)
