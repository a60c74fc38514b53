"""Calls of attention in one forward of the model: their rows are read at its end, and few gradients are looked for.

Between the kernels of a forward our own operations find cold caches and cost many times what they cost in a row. And a
hook on the gradient of each call costs more than the numbers of the call: calls of one chain of layers follow one
another, so the gradient that reaches the first, or the last, of them says that all were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowscope.hooks.attention_layers import Layer
from flowscope.sums.attention_rows import Seen
from flowscope.torch_internals import backward_under_way, saves_otherwise

OnGradient = Callable[[Tensor, Callable[[Tensor | None], None]], None]


class Later(NamedTuple):
    """A call whose queries and keys are read when the forward has ended.

    Attributes:
        call: which one.
        query, key: likewise.
        versions: how often they had been written to.
        args, kwargs: of `scaled_dot_product_attention`.
    """

    call: Seen
    query: Tensor
    key: Tensor
    versions: tuple[int, int]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def is_unchanged(self) -> bool:
        """Whether queries and keys are what they were."""
        return self.versions == (self.query._version, self.key._version)


def _own(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *rest: Any, **others: Any) -> Any:
    return query, key, attn_mask


def later(call: Seen, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Later | None:
    """The call, where its queries and keys may be read when the forward has ended: its graph keeps them until then.

    Not so without a graph, nor under autocast, which multiplies copies of them, nor where a checkpoint or an offloader
    decides what is kept. A mask is the user's, and may be written to.

    Args:
        call: of `scaled_dot_product_attention`.
        result: what it returned.
        args: its arguments.
        kwargs: likewise.
    """
    query, key, mask = _own(*args, **kwargs)
    if (
        mask is not None
        or not result.requires_grad
        or saves_otherwise()
        or torch.is_autocast_enabled(query.device.type)
    ):
        return None
    return Later(call, query, key, (query._version, key._version), args, kwargs)


class Run:
    """Calls of one chain of layers, each deeper than the one before.

    Args:
        count: takes calls whose pass is trained.
    """

    def __init__(self, count: Callable[[Sequence[Seen]], None]) -> None:
        self.calls: list[Seen] = []
        self._count = count
        self._backward = -1

    def arrived(self, gradient: Tensor | None) -> None:
        """A gradient has reached the first call or the last."""
        del gradient
        if (backward := backward_under_way()) != self._backward:
            self._backward = backward
            self._count(self.calls)


class Pass:
    """One forward of the model that is under way outside of compiled code.

    Args:
        on_gradient: calls a function when a tensor's gradient arrives.
        count: takes calls whose pass is trained.
        read: makes the numbers of calls that have waited.
    """

    def __init__(
        self,
        on_gradient: OnGradient,
        count: Callable[[Sequence[Seen]], None],
        read: Callable[[Sequence[Later]], None],
    ) -> None:
        self._on_gradient, self._count, self._read = on_gradient, count, read
        self._later: list[Later] = []
        self._run = Run(count)
        self._newest: tuple[Layer, Tensor] | None = None

    def wait(self, call: Later) -> None:
        """Read this call at the end."""
        self._later.append(call)

    def join(self, call: Seen, layer: Layer, result: Tensor) -> None:
        """Count this call when its pass is trained."""
        if self._newest is None or not layer.follows(self._newest[0]):
            self._close()
            self._run = Run(self._count)
            self._on_gradient(result, self._run.arrived)
        self._run.calls.append(call)
        self._newest = layer, result

    def _close(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None and len(self._run.calls) > 1:
            self._on_gradient(newest[1], self._run.arrived)

    def end(self) -> None:
        """The forward has ended."""
        self._close()
        waiting, self._later = self._later, []
        self._read(waiting)
