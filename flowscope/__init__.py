"""flowscope: does gradient reach the early layers, does depth still do work, what fails first, and what to do about it.

    scope = flowscope.watch(model, optimizer, log_dir="runs/a", on_alert=print)
    for batch in loader:
        loss = train_step(batch)          # the loop stays as it was
        scope.step(loss=loss)             # optional: gives the loss
    scope.close()

    watch               attach to a model, return a Scope
    find_flows          what watch would use as the depth axis, printable
    jacobian_spectrum   singular values of the Jacobian of the last hidden state by the first
    WatchConfig         every setting and limit
    Record, Alert       what a sampled step says; what a detector found
    FlowscopeError      the one exception class

Importing flowscope imports neither torch nor tensorboard until one of these names is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flowscope._version import __version__
from flowscope.errors import FlowscopeError

if TYPE_CHECKING:
    from flowscope.config import WatchConfig
    from flowscope.discovery.flows import find_flows
    from flowscope.probes.jacobian import jacobian_spectrum
    from flowscope.records import Alert, Record
    from flowscope.scope import Scope, watch

_HOMES = {
    "watch": "flowscope.scope",
    "Scope": "flowscope.scope",
    "find_flows": "flowscope.discovery.flows",
    "jacobian_spectrum": "flowscope.probes.jacobian",
    "WatchConfig": "flowscope.config",
    "Record": "flowscope.records",
    "Alert": "flowscope.records",
}

__all__ = [
    "Alert",
    "FlowscopeError",
    "Record",
    "Scope",
    "WatchConfig",
    "__version__",
    "find_flows",
    "jacobian_spectrum",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flowscope' has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
