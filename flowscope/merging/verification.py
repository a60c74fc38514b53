"""Check that what `wrap` promised happens: every wrapped block runs, every site fires, the output is kept."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import torch
from torch import nn

from flowscope.errors import FlowscopeError
from flowscope.merging.comparison import first_difference, plain_run, run, woven_connections
from flowscope.merging.difference import alike, difference, tolerance
from flowscope.model.example_inputs import untouched
from flowscope.model.sites import SitePlan, Trial


class BlockError(FlowscopeError):
    """A wrapped block that cannot run; the others may."""

    def __init__(self, path: str, error: Exception) -> None:
        said = str(error) if isinstance(error, FlowscopeError) else f"{type(error).__name__}: {error}"
        super().__init__(f"wrap: {path}: the wrapped block could not be run ({said}); the model is as it was.")
        self.path = path
        self.reason = f"the wrapped block could not be run ({said})"


class PromiseError(FlowscopeError):
    """The wrapped model does not do what its mode says."""


def check_run(model: nn.Module, plan: SitePlan, trial: Trial) -> float:
    """Run the woven model once as before; return by how much its output moved.

    Raises:
        BlockError: a site of a block did not fire, or its code failed.
        FlowscopeError: a promised block did not run, the output has other tensors than before, or the mode keeps the
            output and it moved.
    """
    ran: set[str] = set()

    def note(path: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        ran.add(path)
        try:
            return forward(*args, **kwargs)
        except (BlockError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise BlockError(path, error) from error

    with untouched(model), contextlib.ExitStack() as stack:
        for path in plan.paths:
            module = model.get_submodule(path)
            module.forward = functools.partial(note, path, module.forward)  # some models call forward directly
            stack.callback(vars(module).pop, "forward", None)
        try:
            output = run(trial)
        except FlowscopeError:
            raise
        except Exception as error:
            raise FlowscopeError(
                f"wrap: the wrapped model could not be run ({type(error).__name__}: {error}); it is as it was."
            ) from error
    refuse_idle(ran, plan.paths)
    return check_kept(model, trial, output)


def check_kept(model: nn.Module, trial: Trial, output: Any) -> float:
    """Return by how much the output moved.

    A model may move as much by rounding alone (a router that flips, a depth of hundreds) or by itself (it draws noise
    from elsewhere than torch): then nothing can be said, and nothing is. The control is the plain model with each
    merge rounded once more.

    Raises:
        PromiseError: it moved, and the mode keeps it; or it has other tensors than before.
    """
    change, promised = difference(trial.output, output), all(c.keeps_output() for c in woven_connections(model))
    if not promised and alike(trial.output, output):
        return change
    if change <= tolerance(model, trial.output) or change <= 3 * difference(trial.output, plain_run(model, trial)):
        return change
    mode = woven_connections(model)[0].mode
    moved = "tensors of other shapes come out" if change == float("inf") else f"it moved by {change:.1e} relative"
    promise = "promises to keep the output" if promised else "may change values, not shapes"
    raise PromiseError(
        f"wrap(mode={mode!r}) {promise}, but on these inputs {moved}; it begins {first_difference(model, trial)}. "
        "Leave that block out with where=..., or use mode='keel' with preserve=True."
    )


def refuse_idle(ran: set[str], promised: list[str]) -> None:
    """Raise where a promised block did not run."""
    idle = [path for path in promised if path not in ran]
    if idle:
        raise FlowscopeError(
            f"wrap: {len(idle)} of {len(promised)} wrapped blocks did not run in this forward: {', '.join(idle[:5])}. "
            "Leave them out with where=, or pass example_inputs that use them."
        )


def __getattr__(name: str) -> Any:
    """Return a class that stood here in 0.1, whose pickles name it."""
    if name in ("FirstForward", "BlockRan"):
        return getattr(importlib.import_module("flowscope.merging.first_forward"), name)
    raise AttributeError(name)
