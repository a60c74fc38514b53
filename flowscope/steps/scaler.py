"""A GradScaler skips the optimizer when it finds inf, and no optimizer hook fires: its `update` tells.

One scaler may serve several optimizers: those of this model make its step, and one of them that finds inf spoils it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowscope.errors import FlowscopeError
from flowscope.faults import CallBefore
from flowscope.hooks.hooks import Hooks
from flowscope.torch_internals import found_by, scale_of


class ScalerWatch:
    """Looks at one GradScaler before each `update`; reports skipped steps, keeps the scale of each step.

    Args:
        scaler: the GradScaler.
        on_skip: called where the step of our (last) optimizer was left out.
        on_found: called before every `update` with what our optimizers' gradients were found to hold: inf above 0.
        hooks: knows the optimizers of this model, and takes this off at the end.
    """

    def __init__(
        self, scaler: Any, on_skip: Callable[[], object], on_found: Callable[[list[Tensor]], None], hooks: Hooks
    ) -> None:
        if not all(callable(getattr(scaler, name, None)) for name in ("update", "get_scale", "is_enabled")):
            raise FlowscopeError(
                f"watch(scaler=...): got {type(scaler).__name__}, expected the torch.amp.GradScaler of the loop."
            )
        self._scaler, self._on_skip, self._on_found, self._hooks = scaler, on_skip, on_found, hooks
        self._stepped = False
        hooks.keep(CallBefore(scaler, "update", self._updates, hooks.faults))

    def scale(self) -> Any:
        """The loss scale used in this step's backward (a tensor copied on the device, or a number)."""
        return scale_of(self._scaler)

    def stepped(self) -> None:
        """A step was made."""
        self._stepped = True

    def take_scale(self) -> Any:
        """The scale of a step that was made."""
        self.stepped()
        return self.scale()

    def _updates(self) -> None:
        # where nobody knows whose gradients these were, they are ours
        found = self._hooks.faults.attempt("scaler", found_by, self._scaler, otherwise={0: []})
        if 0 not in found and (known := {id(optimizer) for optimizer in self._hooks.optimizers()}):
            found = {key: tensors for key, tensors in found.items() if key in known}
        if found:  # else the update is that of another model's optimizer
            stepped, self._stepped = self._stepped, False
            if not stepped:
                self._on_skip()
                self._stepped = False
            self._on_found([tensor for tensors in found.values() for tensor in tensors])
