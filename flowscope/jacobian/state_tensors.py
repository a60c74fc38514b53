"""Finding the hidden state inside what modules take and return: a tensor, a tuple, a mapping, a dataclass, nested."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowscope.model.nested import map_tensors, nested_tensors


def first_tensor(value: Any, like: Tensor | None = None) -> Tensor | None:
    """Return the hidden state in a module's arguments or result, or None where there is none.

    It is the first floating tensor with at least two axes, in order of position (`(args, kwargs)` searches positional
    arguments first). With `like`, a floating tensor of the same shape comes before it.
    """
    first = None
    for tensor in nested_tensors(value):
        if not tensor.is_floating_point() or tensor.dim() < 2:
            continue
        if like is None or tensor.shape == like.shape:
            return tensor
        first = tensor if first is None else first
    return first


def replace_first(value: Any, new: Tensor, like: Tensor | None = None) -> Any:
    """Return `value` with the tensor that `first_tensor(value, like)` finds replaced by `new`; `value` is not changed.

    Every occurrence of that same tensor object is replaced: `attention(x, x, x)` has one hidden state, not three.
    """
    old = first_tensor(value, like)
    return value if old is None else map_tensors(value, lambda tensor: new if tensor is old else tensor)
