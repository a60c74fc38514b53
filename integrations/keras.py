"""One callback for Keras 3 on torch.

model.fit(x, y, callbacks=[FlowscopeCallback(log_dir="runs/a")])
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.integrations.trainer import BareWatch

try:
    import keras
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.keras needs keras, which is not installed: pip install "flowscope[keras]".'
    ) from error


class FlowscopeCallback(BareWatch, keras.callbacks.Callback):
    """Watches the layers of the model that `fit` trains, under Keras' names.

    Args:
        **options: those of `flowscope.watch`, and `stop_on`, which sets `model.stop_training`.
    """

    def __init__(self, **options: Any) -> None:
        if keras.backend.backend() != "torch":
            raise FlowscopeError(
                f"FlowscopeCallback(): got Keras on {keras.backend.backend()}, expected torch: set the environment "
                "variable KERAS_BACKEND=torch before the first import of keras."
            )
        keras.callbacks.Callback.__init__(self)
        BareWatch.__init__(self, **options)
        self._layers: nn.Module | None = None
        self._sums: tuple[Any, Any] = (0.0, 0.0)

    def on_train_begin(self, logs: Any = None) -> None:
        """Attach."""
        self._layers, self._sums = layers_of(self.model), (0.0, 0.0)
        self._begin(self._layers)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras' mean of the losses begins anew."""
        self._sums = 0.0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The optimizer has stepped: hand over the loss of this batch; stop, if an alert asked for it."""
        if self.scope is not None:
            self.scope.step(loss=self._loss())
        if self._stop_asked:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """Detach and finish the files."""
        self._end()

    def _loss(self) -> Any:
        """What the batch added to Keras' mean of the losses: the sum and its weight, without waiting for a device."""
        mean = self.model._loss_tracker
        now = _number(mean.total), _number(mean.count)
        before, self._sums = self._sums, now
        return (now[0] - before[0]) / (now[1] - before[1])


def layers_of(model: Any) -> nn.Module:
    """The layers of a Keras model in order, by their names: Keras keeps them in lists of its own.

    Args:
        model: a `keras.Model`; models in it are opened.
    """
    held = nn.Sequential()
    for layer in model._flatten_layers(include_self=False, recursive=False):
        inner = getattr(layer, "_layers", ())
        held.add_module(layer.name, layers_of(layer) if isinstance(layer, keras.Model) and inner else layer)
    return held


def _number(variable: Any) -> Tensor:
    value: Tensor = variable.value.detach().clone()
    return value
