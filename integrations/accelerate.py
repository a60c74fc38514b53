"""`flowscope.watch` for what `Accelerator.prepare` returned.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scope = flowscope.integrations.accelerate.watch(accelerator, model, optimizer, stop_on="error")
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.integrations.trainer import AlertAction, with_stop
from flowscope.records import Alert

try:
    from accelerate import Accelerator
except ImportError as error:
    raise FlowscopeError(
        "flowscope.integrations.accelerate needs accelerate, which is not installed: "
        'pip install "flowscope[accelerate]".'
    ) from error


def watch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any = None,
    *,
    on_alert: AlertAction | Iterable[AlertAction] | None = None,
    stop_on: str | Iterable[str] | None = None,
    **watch_options: Any,
) -> flowscope.Scope:
    """Attach to a prepared model, after `accelerator.prepare` and before its first call.

    Names are those of the unwrapped model, steps those of the optimizer (accumulated micro-batches are one step),
    gradients unscaled (the accelerator's scaler is used). `accelerator.register_for_checkpointing(scope)` puts the
    scope's state into the accelerator's checkpoints.

    Args:
        accelerator: the `accelerate.Accelerator`.
        model: as prepared.
        optimizer: as prepared; one, or a list in the order they step.
        on_alert: as in `flowscope.watch`; `StopTraining` sets the trigger like `stop_on`.
        stop_on: alert kinds ("vanishing_gradient") or severities ("error") that call `accelerator.set_trigger()`; the
            loop ends itself: `if accelerator.check_trigger(): break`.
        **watch_options: passed on to `flowscope.watch`; `log_dir` is the folder of the accelerator's TensorBoard
            tracker, where it has one and none is given.
    """

    def stop(alert: Alert) -> None:
        accelerator.set_trigger()

    options = {"scaler": accelerator.scaler, **watch_options}
    if options.get("log_dir") is None:
        folders = [tracker.logging_dir for tracker in accelerator.trackers if tracker.name == "tensorboard"]
        options["log_dir"] = folders[0] if folders else None
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    return flowscope.watch(inner, optimizer, **with_stop(options, stop, on_alert, stop_on))
