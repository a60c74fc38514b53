"""One callback for Lightning's trainer.

trainer = lightning.pytorch.Trainer(callbacks=[FlowscopeCallback(on_alert=print, stop_on="error")])
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowscope.errors import CannotJudgeError, FlowscopeError
from flowscope.integrations.trainer import TrainerWatch, loss_in
from flowscope.records import Alert
from flowscope.torch_internals import scale_of

try:
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        raise ImportError("the script trains with the package of the older name")
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger
except ImportError as error:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
        from pytorch_lightning.loggers import TensorBoardLogger  # type: ignore[assignment]
    except ImportError:
        raise FlowscopeError(
            "flowscope.integrations.lightning needs Lightning, and neither lightning nor pytorch_lightning is "
            'installed: pip install "flowscope[lightning]".'
        ) from error


class FlowscopeCallback(TrainerWatch, Callback):
    """Watches the module that `Trainer.fit` trains.

    Hooks are attached in `on_fit_start`: the first moment at which parameters are on their device, sharded, and in an
    optimizer, and still before the first (compiled) forward.

    Args:
        mode: wrap the residual merges with `flowscope.wrap(module, mode=mode)` before `configure_optimizers` runs, so
            that the new parameters are optimized; on the module's `example_input_array`, where it has one. A module
            that makes its layers in `configure_model` calls `flowscope.wrap` there itself, before it shards them.
        log_dir: where to write; None takes the `log_dir` of the trainer's logger (of several: the TensorBoard logger),
            and writes nothing where it has none.
        every: as in `flowscope.watch`.
        on_alert: as in `flowscope.watch`; `StopTraining` ends the fit like `stop_on`.
        stop_on: alert kinds ("vanishing_gradient") or severities ("error") that end the fit after the current step, one
            or several.
        check: make the trials of `flowscope.check` on a copy of the module and of the first three batches, and print
            what they find; the training, its loader and its random numbers stay as they are.
        **watch_options: passed on to `flowscope.watch`.

    Attributes:
        scope: the `flowscope.Scope` of the current fit, or of the last one; None before.
        check_report: what the trials of the last fit found; None before.
    """

    _restored: dict[str, Any] | None = None
    _loss_comes_early = False
    _micro: tuple[torch.Tensor, ...] = ()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap, if asked to; for every stage, since a checkpoint of the wrapped module needs the wrapped module."""
        if self._mode is not None:
            self._wrap(pl_module, example_inputs=pl_module.example_input_array)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach."""

        def stop(alert: Alert) -> None:
            trainer.should_stop = True

        before = self.scope.state_dict() if self.scope is not None else None
        self._close()
        self._await_batches(_training_loss, partial(_silent, trainer))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # a scaler has multiplied the loss before `on_before_backward`
        self._loss_comes_early = trainer.world_size > 1 and scaler is None and bool(trainer.optimizers)
        options = {"scaler": self._options.get("scaler", scaler), "log_dir": self._find_log_dir(trainer)}
        scope = self._watch(pl_module, trainer.optimizers or None, stop, trainer.global_step, **options)
        # steps go on where the trainer's do: from a checkpoint, in a second fit
        if state := self._restored or (before if trainer.global_step > 0 else None):
            scope.load_state_dict(state)
        self._restored = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on counting from a checkpoint that was made without the callback: its steps are known only now."""
        done = trainer.global_step // max(len(trainer.optimizers), 1)
        if self.scope is not None and done and trainer.optimizers and self.scope.state_dict()["step"] == 0:
            self.scope.step(step=done)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Hand over the loss among other processes: given before the step ends, it becomes the mean of all.

        A module that optimizes by hand returns none: of its losses a step has the mean.
        """
        if not pl_module.automatic_optimization:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._hand_over(trainer, pl_module, loss if scaler is None else loss / scale_of(scaler))
        elif self._loss_comes_early:
            self._hand_over(trainer, pl_module, loss)
        if self._passing is not None:
            self._micro += (loss.detach(),)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Copy one of the first batches, where trials are asked for."""
        if self._passing is not None:
            self._passing.saw(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Tell the trials what the step is made of: nothing is clipped yet, and a scaler has unscaled."""
        micro, self._micro = self._micro, ()
        if (passing := self._passing) is None:
            return
        if passing.last_step:
            scale = float(scale_of(scaler)) if (scaler := getattr(trainer.precision_plugin, "scaler", None)) else 1.0
            divided = trainer.accumulate_grad_batches
            passing.weigh([1 / divided] * len(micro), [float(loss) / scale for loss in micro])
            if len(micro) != divided:
                passing.misses("an epoch ended within it: Lightning divides what is left by as many batches as usual")
        gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        passing.step_begins(pl_module, trainer.optimizers, gradients)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the trials where fewer batches passed than they are given."""
        self._try_batches(pl_module, trainer.optimizers, last=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hand over the loss; the optimizer's step hook counts the steps."""
        loss = loss_in(outputs)
        if not pl_module.automatic_optimization:
            pass  # its losses came before
        elif self.scope is not None and self._loss_comes_early:
            self.scope.step()  # the step has its loss: the next one belongs to the next
        elif isinstance(loss, torch.Tensor):
            self._hand_over(trainer, pl_module, loss)
        self._try_batches(pl_module, trainer.optimizers)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach and finish the files when the fit ends by an exception or Ctrl-C."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach and finish the files."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """The scope's state (step count, baselines, standing alerts), saved in the trainer's checkpoints."""
        return self._restored or {} if self.scope is None else self.scope.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the scope exists: checkpoints are read before `on_fit_start`."""
        self._restored = state_dict

    def _hand_over(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self.scope is not None:
            # Lightning divides each micro-batch's loss by their number; the scope averages them itself
            scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.scope.step(loss=loss.detach() * scale)

    def _find_log_dir(self, trainer: Trainer) -> str | Path | None:
        given: str | Path | None = self._options["log_dir"]
        if given is not None:
            return given
        loggers = sorted(trainer.loggers, key=lambda logger: not isinstance(logger, TensorBoardLogger))
        folders = [folder for logger in loggers if (folder := getattr(logger, "log_dir", None)) is not None]
        # each rank's logger may name its own version: the first rank's counts
        found: str | Path | None = trainer.strategy.broadcast(folders[0] if folders else None)
        return found

    def _close(self) -> None:
        if self.scope is not None:
            self.scope.close()


def _silent(trainer: Trainer, module: Any) -> None:
    """Give the copy of a module the trainer, which copies lack, and let it log nothing."""
    module.trainer = trainer
    module.log = module.log_dict = lambda *args, **kwargs: None


def _training_loss(module: Any, batch: Any) -> torch.Tensor:
    """What `training_step` returns for a batch."""
    if not module.automatic_optimization:
        raise CannotJudgeError("the module optimizes by hand: its training_step is no loss")
    number = [0] if len(inspect.signature(module.training_step).parameters) > 1 else []
    with module.trainer.precision_plugin.train_step_context():
        out = module.training_step(batch, *number)
    loss: torch.Tensor = out["loss"] if isinstance(out, Mapping) else out
    return loss
