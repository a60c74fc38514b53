"""`flowscope.watch` for the engine of Ignite.

trainer = ignite.engine.create_supervised_trainer(model, optimizer, loss_fn)
with flowscope.integrations.ignite.attach(trainer, model, optimizer, stop_on="error") as scope:
    trainer.run(loader, max_epochs=5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.integrations.trainer import AlertAction, LossReader, with_stop
from flowscope.records import Alert

try:
    from ignite.engine import Engine, Events
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.ignite needs Ignite, which is not installed: pip install "flowscope[ignite]".'
    ) from error


def attach(
    engine: Engine,
    model: nn.Module,
    optimizer: Any = None,
    *,
    output_transform: Callable[[Any], Any] = lambda output: output,
    on_alert: AlertAction | Iterable[AlertAction] | None = None,
    stop_on: str | Iterable[str] | None = None,
    **watch_options: Any,
) -> flowscope.Scope:
    """Watch the model that an engine trains, from its next iteration until the scope is closed.

    The scope closes itself when the run completes. Use it as a context manager, so that it is closed after an exception
    too: a handler of ours for exceptions would keep Ignite from raising them. A `Checkpoint(to_save={"scope": scope})`
    saves its state.

    Args:
        engine: the trainer.
        model: the model it trains.
        optimizer: as in `flowscope.watch`.
        output_transform: from `engine.state.output` to the loss. What `create_supervised_trainer` returns is one, and
            in a mapping or a list of such (MONAI's) its "loss" is found; else it is told once that none is seen.
        on_alert: as in `flowscope.watch`; `StopTraining` ends the run like `stop_on`.
        stop_on: alert kinds ("vanishing_gradient") or severities ("error") that call `engine.terminate()`.
        **watch_options: passed on to `flowscope.watch`; `scaler` is the engine's own where it made one.
    """

    def stop(alert: Alert) -> None:
        engine.terminate()

    def completed(_: Engine) -> None:
        if not scope.closed:
            losses.hand_over(scope, output_transform(engine.state.output))

    losses = LossReader("pass output_transform=lambda output: ... to attach")
    options = {"scaler": getattr(engine.state, "scaler", None), **watch_options}
    scope = flowscope.watch(model, optimizer, **with_stop(options, stop, on_alert, stop_on))
    if engine.state.iteration > 0:
        scope.resumes()
    engine.add_event_handler(Events.ITERATION_COMPLETED, completed)
    engine.add_event_handler(Events.COMPLETED, scope.close)
    return scope
