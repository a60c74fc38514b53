"""One callback for Keras 3 on torch.

model.fit(x, y, callbacks=[FlowscopeCallback(log_dir="runs/a")])
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowscope.errors import FlowscopeError
from flowscope.integrations.trainer import BareWatch
from flowscope.model.keras_layers import layers_of

try:
    import keras
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.keras needs keras, which is not installed: pip install "flowscope[keras]".'
    ) from error


__all__ = ["FlowscopeCallback", "layers_of"]


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
        self._sums: tuple[Any, Any] = (0.0, 0.0)

    def on_train_begin(self, logs: Any = None) -> None:
        """Attach."""
        self._sums = 0.0, 0.0
        self._begin(self.model)

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


def _number(variable: Any) -> Tensor:
    value: Tensor = variable.value.detach().clone()
    return value
