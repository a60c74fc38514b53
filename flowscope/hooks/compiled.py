"""What differs under torch.compile: how hooks run there, what they cannot see, and how a record says so.

A compiled hook may only add to preallocated tensors. So calls are not counted in Python, a module that runs k times is
one row, and units and slow metrics are not measured. Hooks that were not there when the model was compiled never fire.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowscope.records import Array, few
from flowscope.torch_internals import HOOKED_INTERMEDIATES as HOOKED_INTERMEDIATES

NOT_MEASURED = "compiled: units and slow metrics are not measured, cosine_to_input and calls only outside of the graph"
FORWARD_ONLY = (
    "compiled on a torch that cannot trace gradient hooks (before 2.13): activation gradients are not seen, forward "
    "statistics count every forward with gradient; parameter metrics are whole"
)
NO_ATTENTION = "compiled on a torch before 2.13: attention inside of compiled code is not seen"
IN_PLACE = "compiled: an operation in place hides the gradient of {points}: not seen"
NEVER_FIRED = (
    "no hook fired in flow {flow}, though its parameters got gradients: its points are not seen (that is not zero). "
    "Either the model, or another of its class, was compiled and called before flowscope.watch: call watch before the "
    "first compiled call, or torch.compiler.reset() right after watch. Or blocks are called as block.forward(x): call "
    "block(x). Gradients by torch.func (grad, vmap) are not seen either. In the first record only: watch came between "
    "a step's forward and its optimizer"
)


def was_traced(seen: NDArray[np.bool_], calls: Array) -> bool:
    """Whether some point deposited without having been called in Python: it ran in compiled code."""
    return bool((seen & (calls == 0)).any())


def with_calls(labels: Sequence[str], backwards: Array, forwards: int) -> tuple[str, ...]:
    """The labels, `xk` behind a module that ran k times in each of `forwards` forwards and is one point."""
    if forwards < 1:
        return tuple(labels)
    times = backwards / forwards
    whole = (times >= 2) & (times == np.round(times))
    return tuple(f"{label} x{int(k)}" if many else label for label, k, many in zip(labels, times, whole, strict=True))


def hidden_points(labels: Sequence[str], hidden: NDArray[np.bool_]) -> str:
    """The note on points whose gradient an in-place operation hides, "" where there is none."""
    names = [label for label, missing in zip(labels, hidden, strict=True) if missing]
    return IN_PLACE.format(points=few(names)) if names else ""


def got_gradient(paths: Sequence[str], names: Sequence[str], grad_norms: Array) -> bool:
    """Whether a parameter inside one of the modules at `paths` got a gradient that is not zero."""
    inside = tuple(f"{path}." for path in paths)
    return any(norm > 0 and name.startswith(inside) for name, norm in zip(names, grad_norms, strict=True))
