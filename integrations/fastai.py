"""One callback for fastai's Learner.

learn = fastai.vision.all.vision_learner(loaders, resnet18, cbs=FlowscopeCallback(log_dir="runs/a"))
"""

from __future__ import annotations

from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.integrations.trainer import BareWatch

try:
    from fastai.callback.core import Callback, CancelFitException
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.fastai needs fastai, which is not installed: pip install "flowscope[fastai]".'
    ) from error


class FlowscopeCallback(BareWatch, Callback):
    """Watches `learn.model` in each fit; fastai's own optimizers and torch's.

    Accumulated micro-batches (`GradientAccumulation`) are one step. `lr_find` is not watched.

    Args:
        **options: those of `flowscope.watch`, and `stop_on`.
    """

    def __init__(self, **options: Any) -> None:
        Callback.__init__(self)
        BareWatch.__init__(self, **options)
        self._attached = False

    def before_fit(self) -> None:
        """A fit begins, or an evaluation: that has the same event, and shall not end what is seen of the fit."""
        self.run = not hasattr(self.learn, "lr_finder")
        self._attached = False

    def before_train(self) -> None:
        """Attach, in the first epoch."""
        if not self._attached:
            self._attached = True
            self._begin(self.learn.model)

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if self.scope is not None:
            self.scope.step(loss=self.learn.loss)

    def after_batch(self) -> None:
        """Stop, if an alert asked for it."""
        if self._stop_asked and self.learn.training:
            raise CancelFitException

    def after_fit(self) -> None:
        """Detach and finish the files."""
        self._end()
