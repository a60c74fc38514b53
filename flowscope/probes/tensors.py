"""Finding the hidden state inside what modules take and return: a tensor, a tuple, a mapping, a dataclass, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def first_tensor(value: Any, like: Tensor | None = None) -> Tensor | None:
    """Return the hidden state in a module's arguments or result, or None where there is none.

    It is the first floating tensor with at least two axes, in order of position (`(args, kwargs)` searches positional
    arguments first). With `like`, a floating tensor of the same shape comes before it.
    """
    first = None
    for tensor in _floating(value):
        if like is None or tensor.shape == like.shape:
            return tensor
        first = tensor if first is None else first
    return first


def replace_first(value: Any, new: Tensor, like: Tensor | None = None) -> Any:
    """Return `value` with the tensor that `first_tensor(value, like)` finds replaced by `new`; `value` is not changed.

    Every occurrence of that same tensor object is replaced: `attention(x, x, x)` has one hidden state, not three.
    """
    old = first_tensor(value, like)
    return value if old is None else _replaced(value, old, new)


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() >= 2:
            yield value
    else:
        for _, item in _items(value):
            yield from _floating(item)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    items = [(key, item, _replaced(item, old, new)) for key, item in _items(value)]
    if all(item is after for _, item, after in items):
        return value
    if isinstance(value, tuple):
        after = [item for _, _, item in items]
        return value._make(after) if hasattr(value, "_make") else tuple(after)
    changed = copy.copy(value)
    for key, _, item in items:
        if isinstance(changed, (Mapping, list)):
            changed[key] = item  # type: ignore[index]
        else:
            # not setattr: the dataclass may be frozen
            object.__setattr__(changed, key, item)
    return changed
