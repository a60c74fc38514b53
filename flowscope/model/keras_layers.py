"""The layers of a Keras 3 model on torch: modules with hooks, which Keras keeps in lists of its own (3.15.1 tried).

What is watched is a module that holds them under their names and is never called itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from flowscope.model.plan import display_path

_HELD, _PARAMETERS = "_flowscope_layers", "_torch_params"


def is_keras(model: object) -> bool:
    """Whether it is a Keras model; Keras is not imported to tell."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, getattr(keras, "Model", ()))


def layers_of(model: Any) -> nn.Module:
    """The layers of a Keras model in order, by their names.

    Args:
        model: a `keras.Model`; models in it are opened.
    """
    held = nn.Sequential()
    for layer in model._flatten_layers(include_self=False, recursive=False):
        for inner in layer._flatten_layers():
            # a model that was built as a whole has registered no weight with its layers: asking does
            getattr(inner, "torch_params" if inner.built else "name", None)
        opens = is_keras(layer) and bool(getattr(layer, "_layers", ()))
        held.add_module(layer.name, layers_of(layer) if opens else layer)
    return held


def opened(model: Any) -> nn.Module:
    """What `watch` looks at: the layers of a Keras model, the same module each time; any other model itself."""
    if not is_keras(model):
        return model  # type: ignore[no-any-return]
    held = layers_of(model)
    known: nn.Module | None = vars(model).get(_HELD)
    if known is None or _layers(known) != _layers(held):
        vars(model)[_HELD] = known = held  # it lives as long as the model: a scope keeps none alive
    return known


def _layers(held: nn.Module) -> list[int]:
    return [id(module) for module in held.modules() if type(module) is not nn.Sequential]


def untrained(held: nn.Module) -> Iterator[str]:
    """The names of what Keras keeps as parameters and nobody trains: running means, states of random numbers."""
    if "keras" not in sys.modules:
        return
    for path, layer in held.named_modules():
        if _PARAMETERS in layer._modules and getattr(layer, "trainable", False):
            fixed = [variable.path for variable in layer.variables if not variable.trainable]
            yield from (display_path(f"{path}.{key}" if path else key) for key in fixed)
