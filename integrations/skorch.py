"""One callback for the nets of skorch.

net = skorch.NeuralNetClassifier(Module, callbacks=[FlowscopeCallback(log_dir="runs/a")])
net.fit(X, y)
"""

from __future__ import annotations

from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.integrations.trainer import BareWatch

try:
    from skorch.callbacks import Callback
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.skorch needs skorch, which is not installed: pip install "flowscope[skorch]".'
    ) from error


class FlowscopeCallback(BareWatch, Callback):
    """Watches `net.module_` from `on_train_begin` on: `fit` makes module and optimizer anew before it.

    Args:
        **options: those of `flowscope.watch`, and `stop_on`, which ends the fit as Ctrl-C does in skorch.
    """

    def __init__(self, **options: Any) -> None:
        BareWatch.__init__(self, **options)
        self._given = options

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """None that a search may set."""
        return {}

    def __sklearn_clone__(self) -> FlowscopeCallback:
        """One with the same options, for another net: a search makes one for each fit."""
        return type(self)(**self._given)

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Attach."""
        self._begin(net.module_, getattr(net, "optimizer_", None))

    def on_batch_end(self, net: Any, batch: Any = None, training: bool = False, **kwargs: Any) -> None:
        """Hand over the loss; stop, if an alert asked for it."""
        if training and self.scope is not None:
            self.scope.step(loss=kwargs.get("loss"))
            if self._stop_asked:
                raise KeyboardInterrupt

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Detach and finish the files."""
        self._end()
