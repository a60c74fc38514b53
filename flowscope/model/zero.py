"""Parameters that DeepSpeed's ZeRO keeps elsewhere, told by the marks it leaves on them (tried with 0.19.8).

Stages 1 and 2 step flat copies and write them back (`_hp_mapping`); stage 3 leaves an empty tensor in a parameter's
place while no layer uses it (`ds_id`). Gradients leave `.grad` during the backward pass.
"""

from __future__ import annotations

from typing import Any


def steps_as_copy(parameter: object) -> bool:
    """Whether a copy of it is stepped, and its gradient is kept elsewhere."""
    return hasattr(parameter, "_hp_mapping") or is_elsewhere(parameter)


def is_elsewhere(parameter: object) -> bool:
    """Whether its values are elsewhere, too."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape that it has for its layer."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def optimizer_of(engine: Any) -> Any:
    """DeepSpeed's optimizer, of the engine that holds the parameters; None of any other module."""
    return getattr(engine, "optimizer", None) if any(map(steps_as_copy, engine.parameters())) else None
