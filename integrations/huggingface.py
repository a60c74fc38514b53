"""One callback for the Trainer of transformers.

trainer = transformers.Trainer(model, args, callbacks=[FlowscopeCallback(log_dir="runs/a", stop_on="error")], ...)
"""

from __future__ import annotations

import json
from typing import Any

import torch

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.faults import is_off
from flowscope.integrations.model_loss import ModelLoss
from flowscope.integrations.trainer import TrainerWatch, module_in
from flowscope.integrations.tried_steps import TriedSteps, own_loss
from flowscope.records import Alert
from flowscope.steps.optimizers import innermost

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise FlowscopeError(
        "flowscope.integrations.huggingface needs transformers, which is not installed: "
        'pip install "flowscope[huggingface]".'
    ) from error


class FlowscopeCallback(TrainerWatch, TrainerCallback, ExportableState):
    """Watches the model that `Trainer.train` trains; pass it as `Trainer(callbacks=[...])`.

    The loss is the model's own (`output.loss`), so one that is NaN is seen although `logging_nan_inf_filter` keeps it
    out of the Trainer's logs. Where the Trainer computes another (label smoothing, `compute_loss_func`, GRPO, DPO), it
    is that one; of a compiled model that returns none, the logged one.

    Its state goes into the checkpoints and comes back by itself with `resume_from_checkpoint`. (With
    `restore_callback_states_from_checkpoint=True` the Trainer makes the callback anew from what JSON can hold: then
    `on_alert`, `sinks` and an `every` that is a function are lost.)

    Args:
        mode: wrap the residual merges with `flowscope.wrap(model, mode=mode)` when the Trainer is made: before its
            optimizer, so that the new parameters are optimized.
        log_dir: where to write; None writes nothing.
        every: as in `flowscope.watch`.
        on_alert: as in `flowscope.watch`; `StopTraining` ends the training like `stop_on`.
        stop_on: alert kinds ("vanishing_gradient") or severities ("error") that set `control.should_training_stop`.
        check: make the trials of `flowscope.check` on a copy of the model and of its first three inputs, and print what
            they find; the training, its loader and its random numbers stay as they are.
        **watch_options: passed on to `flowscope.watch`.

    Attributes:
        scope: the `flowscope.Scope` of the current training, or of the last one; None before.
        check_report: what the trials of the last training found; None before.
    """

    _stop_asked = False
    _loss: ModelLoss | None = None
    _tried: TriedSteps | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Wrap, if asked to."""
        if self._mode is not None and (model := module_in(kwargs["model"])) is not None:
            self._wrap(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach: the model is prepared, the optimizer made, nothing has run."""
        model, optimizer = module_in(kwargs["model"]), kwargs.get("optimizer")
        if model is None:
            return
        if self._mode is not None and not flowscope.is_wrapped(model):
            raise FlowscopeError(
                f"FlowscopeCallback(mode={self._mode!r}): got a model that is not wrapped, and its optimizer exists "
                "already. Pass the callback as Trainer(callbacks=[...]), not to add_callback; with model_init, call "
                "flowscope.wrap in it."
            )
        self.close()
        self._stop_asked = False
        scaler = self._options.get("scaler", getattr(optimizer, "scaler", None))
        known = next(iter(_optimizers(optimizer)), None)
        scope = self._watch(model, known, self._ask_stop, state.global_step, scaler=scaler)
        self._loss = None if is_off() else ModelLoss(model, scaler)
        self._await_batches(own_loss)
        if self._passing is not None:
            self._tried = TriedSteps(model, self._passing, scaler)
        # a checkpoint's state is here whether or not callbacks are restored; one saved without flowscope lacks ours
        callbacks: Any = state.stateful_callbacks
        saved = callbacks.setdefault(type(self).__name__, self.state())
        saved = saved[0] if isinstance(saved, list) else saved
        if state.global_step > 0 and (restored := saved["attributes"].get("restored")):
            scope.load_state_dict(restored)
        elif state.global_step > 0 and scope.optimizers:  # of a checkpoint made without the callback
            scope.step(step=state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hand over the loss among other processes: given before the step ends, it becomes the mean of all."""
        if self._tried is not None:
            self._tried.step_begins(_optimizers(kwargs.get("optimizer")))
        if args.world_size > 1 and self.scope is not None and self.scope.optimizers:
            self._hand_over(args)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hand over the loss; the optimizer's step hook counts the steps."""
        if self.scope is None or self._loss is None:
            return
        if args.world_size == 1 or not self.scope.optimizers:
            self._hand_over(args)
        elif self._loss.seen:
            self.scope.step()  # the step has its loss: the next one belongs to the next

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hand over the logged loss where the model returns none."""
        logged = kwargs.get("logs", {}).get("loss")
        if logged is not None and self.scope is not None and self._loss is not None and not self._loss.seen:
            self.scope.step(loss=float(logged))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Stop, if an alert asked for it."""
        control.should_training_stop |= self._stop_asked
        self._try_inputs(kwargs)
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the trials, if there was no time for them before; detach and finish the files."""
        self._try_inputs(kwargs, last=True)
        self.close()

    def _try_inputs(self, given: dict[str, Any], *, last: bool = False) -> None:
        if self._tried is not None and self._passing is not None and (last or self._passing.full):
            self._tried.close()
            self._try_batches(given["model"], _optimizers(given.get("optimizer")), last=last)

    def close(self) -> None:
        """Detach and finish the files; the Trainer has no event for a training that ends by an exception."""
        if self.scope is not None:
            self.scope.close()
        if self._loss is not None:
            self._loss.close()
        if self._tried is not None:
            self._tried.close()
        self._loss = self._tried = None

    def __getstate__(self) -> dict[str, Any]:
        """Likewise."""
        return super().__getstate__() | {"_loss": None, "_tried": None}

    def state(self) -> dict[str, Any]:
        """The scope's state (step count, baselines, standing alerts), for the Trainer's checkpoints."""
        arguments = {"mode": self._mode, "stop_on": self._stop_on, **self._options}
        live = self.scope is not None and not self.scope.closed
        return {
            "args": {name: value for name, value in arguments.items() if _is_json(value)},
            "attributes": {"restored": self.scope.state_dict() if self.scope is not None and live else None},
        }

    def _hand_over(self, args: TrainingArguments) -> None:
        if self.scope is not None and self._loss is not None:
            loss = self._loss.take(args.world_size if args.average_tokens_across_devices else 1)
            # without a loss the step stays open for the one that `on_log` may bring
            if loss is not None or not self.scope.optimizers:
                self.scope.step(loss=loss)

    def _ask_stop(self, alert: Alert) -> None:
        self._stop_asked = True


def _optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """The optimizer itself, without what accelerate puts around it; none where it is none of torch's."""
    inner = innermost(given)
    return [inner] if isinstance(inner, torch.optim.Optimizer) else []


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
