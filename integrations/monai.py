"""One handler for the trainers of MONAI.

trainer = monai.engines.SupervisedTrainer(..., train_handlers=[FlowscopeHandler(log_dir="runs/a")])
"""

from __future__ import annotations

from typing import Any

import flowscope
from flowscope.errors import FlowscopeError

try:
    import monai  # noqa: F401
    from ignite.engine import Events

    from flowscope.integrations.ignite import attach
except ImportError as error:
    raise FlowscopeError(
        'flowscope.integrations.monai needs monai and Ignite, which are not installed: pip install "flowscope[monai]".'
    ) from error


class FlowscopeHandler:
    """`flowscope.integrations.ignite.attach`, as a handler: network, optimizer and loss are the trainer's own.

    Args:
        **options: those of `flowscope.integrations.ignite.attach`, which `flowscope.watch` takes too.

    Attributes:
        scope: of the trainer; None before.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.scope: flowscope.Scope | None = None

    def attach(self, engine: Any) -> None:
        """Called while the trainer is made: it has no network yet."""
        engine.add_event_handler(Events.STARTED, self._begin)

    def _begin(self, engine: Any) -> None:
        before = self.scope.state_dict() if self.scope is not None and engine.state.iteration > 0 else None
        options = {"scaler": getattr(engine, "scaler", None), **self._options}
        self.scope = attach(engine, engine.network, engine.optimizer, **options)
        if before:  # a trainer that is run on
            self.scope.load_state_dict(before)
