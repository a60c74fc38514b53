"""The one walk through what modules take and return: tensors in tuples, lists, mappings and dataclasses, nested."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, in order."""
    waiting = [value]  # no recursion: hooks ask in every call of a module
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            waiting += item[::-1]
        elif isinstance(item, dict):
            waiting += [*item.values()][::-1]
        elif item is not None and not isinstance(item, (bool, int, float, str)):
            waiting += [inner for _, inner in reversed(_items(item))]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with each tensor in it changed; what holds none that changes is returned as it is."""
    if isinstance(value, Tensor):
        return change(value)
    items = [(key, item, map_tensors(item, change)) for key, item in _items(value)]
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


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, type):
        return []
    return [(name, getattr(value, name, None)) for name in getattr(value, "__dataclass_fields__", ())]
