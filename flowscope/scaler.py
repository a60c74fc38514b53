"""A GradScaler skips the optimizer when it finds inf, and no optimizer hook fires: its `update` tells.

One scaler may serve several optimizers: those of this model make its step, and one of them that finds inf spoils it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flowscope.errors import FlowscopeError

FRAMES = 16


def scale_of(scaler: Any) -> Any:
    """The scale of a GradScaler, without waiting for a device."""
    scale = getattr(scaler, "_scale", None)  # a disabled scaler has none
    return scale.detach().clone() if scale is not None else float(scaler.get_scale())


def scale_of_caller() -> Any:
    """The scale of the GradScaler that is making the optimizer step, None where none is.

    A scaler that `watch` was not given leaves no other trace, and its unscaling would look like clipping.
    """
    frame = inspect.currentframe()
    for _ in range(FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "step" and isinstance(scaler := frame.f_locals.get("self"), torch.amp.GradScaler):
            return scale_of(scaler)
        frame = frame.f_back
    return None


class ScalerWatch:
    """Wraps one GradScaler instance's `update` until `close`; reports skipped steps, keeps the scale of each step.

    Args:
        scaler: the GradScaler.
        on_skip: called where the step of our (last) optimizer was left out.
        on_found: called in every `update` with what our optimizers' gradients were found to hold: inf where above 0.
        optimizers: those of this model, as far as they are known.
    """

    def __init__(
        self,
        scaler: Any,
        on_skip: Callable[[], None],
        on_found: Callable[[list[torch.Tensor]], None],
        optimizers: Callable[[], Sequence[Any]],
    ) -> None:
        if not all(callable(getattr(scaler, name, None)) for name in ("update", "get_scale", "is_enabled")):
            raise FlowscopeError(
                f"watch(scaler=...): got {type(scaler).__name__}, expected the torch.amp.GradScaler of the loop."
            )
        self._scaler, self._on_skip, self._on_found, self._optimizers = scaler, on_skip, on_found, optimizers
        self._stepped = False
        self._update = scaler.update
        scaler.update = self._watched_update

    def scale(self) -> Any:
        """The loss scale used in this step's backward (a tensor copied on the device, or a number)."""
        return scale_of(self._scaler)

    def take_scale(self) -> Any:
        """The same: a step was made."""
        self._stepped = True
        return self.scale()

    def _watched_update(self, *args: Any, **kwargs: Any) -> Any:
        states = dict(getattr(self._scaler, "_per_optimizer_states", None) or {})
        if known := {id(optimizer) for optimizer in self._optimizers()}:
            states = {key: state for key, state in states.items() if key in known}
        if states:  # else the update is that of another model's optimizer
            stepped, self._stepped = self._stepped, False
            if not stepped:
                self._on_skip()
                self._stepped = False
            self._on_found([t for state in states.values() for t in state.get("found_inf_per_device", {}).values()])
        return self._update(*args, **kwargs)

    def close(self) -> None:
        """Give the scaler its own `update` back."""
        if self._scaler.__dict__.get("update") == self._watched_update:
            del self._scaler.update
