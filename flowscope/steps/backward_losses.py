"""The losses of one model, told by the backward passes of the process: those whose gradients its optimizer steps with.

Which loss is whose shows only at the step. Of a generator and a discriminator both are run for the generator's loss,
and the discriminator's gradients of it are thrown away before its own; an agent may be trained through methods alone.
So a loss waits for the step of each model whose gradients its backward has changed, and is dropped where these are
taken away before.
"""

from __future__ import annotations

from torch import Tensor

from flowscope.model.parameters import ParameterList
from flowscope.steps.losses import Value

LOOKED_AT = 128
"""The gradients of so many parameters, evenly spaced, tell whether a backward has reached the model."""

Marks = list[tuple[int, int] | None]


class BackwardLosses:
    """The losses that wait for the step of one model.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: ParameterList) -> None:
        self._parameters = parameters
        self._waiting: list[Value] = []
        self._under_way: Value | None = None
        self._before: Marks = []
        self._left: Marks = self._marks()

    def begins(self, loss: Value) -> None:
        """The backward of a loss begins."""
        self._before = self._marks()
        if self._before != self._left:
            self._waiting = []  # the gradients of the losses that wait were zeroed
        self._under_way = loss

    def ended(self) -> None:
        """It has ended."""
        loss, self._under_way = self._under_way, None
        self._left = self._marks()
        if loss is not None and self._left != self._before:
            self._waiting.append(loss)

    def take(self) -> list[Value]:
        """The losses of the step that ends now; where it ends inside a backward, also of that one."""
        taken, self._waiting = self._waiting, []
        if self._under_way is not None:
            taken.append(self._under_way)
            self._under_way = None
        return taken

    def _marks(self) -> Marks:
        """Which gradient each parameter holds, and how often it was written to."""
        return [_mark(p) for p in self._parameters.some(LOOKED_AT).values()]


def _mark(parameter: Tensor | None) -> tuple[int, int] | None:
    gradient = None if parameter is None else parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)
