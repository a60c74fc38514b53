"""Check that what `wrap` promised happens: every wrapped block runs, every site fires, the output is what it says."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.model.nested import nested_tensors
from flowscope.model.sites import SitePlan, Trial, untouched


def check_run(model: nn.Module, plan: SitePlan, trial: Trial) -> Any:
    """Run the woven model once as before; return its output.

    Raises:
        FlowscopeError: a promised block did not run or a site did not fire.
    """
    ran: set[str] = set()

    def note(path: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        ran.add(path)
        return forward(*args, **kwargs)

    with untouched(model), contextlib.ExitStack() as stack:
        for block in plan.blocks:
            module = model.get_submodule(block.path)
            module.forward = functools.partial(note, block.path, module.forward)  # some models call forward directly
            stack.callback(vars(module).pop, "forward", None)
        try:
            output = trial.module(*trial.call[0], **trial.call[1])
        except FlowscopeError:
            raise
        except Exception as error:
            raise FlowscopeError(
                f"wrap: the wrapped model could not be run ({type(error).__name__}: {error}); it is as it was."
            ) from error
    refuse_idle(ran, [block.path for block in plan.blocks])
    return output


def refuse_idle(ran: set[str], promised: list[str]) -> None:
    """Raise where a promised block did not run."""
    idle = [path for path in promised if path not in ran]
    if idle:
        raise FlowscopeError(
            f"wrap: {len(idle)} of {len(promised)} wrapped blocks did not run in this forward: {', '.join(idle[:5])}. "
            "Leave them out with where=, or pass example_inputs that use them."
        )


class FirstForward:
    """Checks after the model's first forward that each block found by structure alone has run."""

    def __init__(self, promised: list[str]) -> None:
        self.promised = promised
        self.ran: set[str] = set()
        self.done = False

    @classmethod
    def attach(cls, model: nn.Module, promised: list[str]) -> None:
        """Watch the model's first forward."""
        check = cls(promised)
        model.register_forward_hook(check)
        for path in promised:
            model.get_submodule(path).register_forward_hook(BlockRan(check, path))

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Check once, after the forward of the whole model."""
        if self.done or torch.compiler.is_compiling():
            return
        self.done = True
        remove_hooks(module, FirstForward, BlockRan)
        refuse_idle(self.ran, self.promised)


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
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, kinds):
                del module._forward_hooks[key]


def difference(before: Any, after: Any) -> float:
    """Return the largest relative difference between two outputs of the model."""
    pairs = zip(nested_tensors(before), nested_tensors(after), strict=False)
    return max((relative(a, b) for a, b in pairs if a.is_floating_point() and a.shape == b.shape), default=0.0)


def relative(a: Tensor, b: Tensor) -> float:
    """Return max |a - b| over max |a|."""
    if a.is_meta or not a.numel():
        return 0.0
    scale = a.abs().max().item()
    return (a.double() - b.double()).abs().max().item() / (scale or 1.0)
