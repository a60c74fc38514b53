"""flowscope: does gradient reach the early layers, does depth still do work, what fails first, and what to do about it.

    scope = flowscope.watch(model, optimizer, log_dir="runs/a", on_alert=print)
    for batch in loader:
        loss = train_step(batch)          # the loop stays as it was
        scope.step(loss=loss)             # optional: gives the loss
    scope.close()

    watch               attach to a model, return a Scope
    wrap, unwrap        put gates or hyper-connections around the sub-layers of a model, in place; and take them off
    is_wrapped          whether a model is wrapped; connections(model) lists (path, connection)
    bisect              where two recorded runs part: step, phase and place
    compare_connections which connection helps a model: short trainings side by side
    check               try a model on a few batches: facts that no limit can tell
    find_flows          what watch would use as the depth axis, printable
    find_sites          what wrap would replace, printable
    gate_profile        gates by depth over a loader; keep_gates(model) fills gate_value
    skip_by_gates       evaluate a gated model without the branches whose gates are nearly closed
    param_groups        optimizer groups for a wrapped model; warmup_steps, clip_grad_norm_ likewise
    read_run            a recorded run, back from its log_dir
    plot                matplotlib figures of records
    actions             ready-made on_alert callables: log, stop, snapshot, webhook, lower the learning rate
    sinks, integrations where records go; callbacks of trainers, loggers
    jacobian_spectrum   singular values of the Jacobian of the last hidden state by the first
    WatchConfig         every setting and limit
    Record, Alert       what a sampled step says; what a detector found
    FlowscopeError      the one exception class; StopTraining is what an alert may end a run with

Importing flowscope imports neither torch nor tensorboard until one of these names is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flowscope import _moved
from flowscope._version import __version__
from flowscope.errors import FlowscopeError, StopTraining, nearest

_moved.install()

if TYPE_CHECKING:
    from flowscope.comparing.connections_compared import compare_connections
    from flowscope.comparing.verdict import ConnectionComparison
    from flowscope.config import WatchConfig
    from flowscope.extras.skipping import skip_by_gates
    from flowscope.jacobian.spectrum import jacobian_spectrum
    from flowscope.merging.profile import GateProfile, gate_profile, keep_gates
    from flowscope.merging.training import clip_grad_norm_, param_groups, warmup_steps
    from flowscope.merging.wrapping import connections, is_wrapped, unwrap, wrap
    from flowscope.model.flows import find_flows
    from flowscope.model.sites import find_sites
    from flowscope.parting.bisection import Parting, bisect
    from flowscope.records import Alert, Record, Run
    from flowscope.scope import Scope, watch
    from flowscope.sinks.reading import read_run
    from flowscope.trials.findings import CheckReport
    from flowscope.trials.sitting import check

_NAMES = {
    "flowscope.scope": ("watch", "Scope"),
    "flowscope.merging.wrapping": ("wrap", "unwrap", "is_wrapped", "connections"),
    "flowscope.model.sites": ("find_sites",),
    "flowscope.merging.profile": ("gate_profile", "keep_gates", "GateProfile"),
    "flowscope.extras.skipping": ("skip_by_gates",),
    "flowscope.merging.training": ("param_groups", "warmup_steps", "clip_grad_norm_"),
    "flowscope.model.flows": ("find_flows",),
    "flowscope.jacobian.spectrum": ("jacobian_spectrum",),
    "flowscope.config": ("WatchConfig",),
    "flowscope.records": ("Record", "Alert", "Run"),
    "flowscope.sinks.reading": ("read_run",),
    "flowscope.parting.bisection": ("bisect", "Parting"),
    "flowscope.comparing.connections_compared": ("compare_connections",),
    "flowscope.comparing.verdict": ("ConnectionComparison",),
    "flowscope.trials.sitting": ("check",),
    "flowscope.trials.findings": ("CheckReport",),
}
_MODULES = {
    "actions": "flowscope.actions",
    "integrations": "flowscope.integrations",
    "plot": "flowscope.extras.plot",
    "sinks": "flowscope.sinks",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Alert",
    "CheckReport",
    "ConnectionComparison",
    "FlowscopeError",
    "GateProfile",
    "Parting",
    "Record",
    "Run",
    "Scope",
    "StopTraining",
    "WatchConfig",
    "__version__",
    "bisect",
    "check",
    "clip_grad_norm_",
    "compare_connections",
    "connections",
    "find_flows",
    "find_sites",
    "gate_profile",
    "is_wrapped",
    "jacobian_spectrum",
    "keep_gates",
    "param_groups",
    "read_run",
    "skip_by_gates",
    "unwrap",
    "warmup_steps",
    "watch",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        hint = nearest(name, __dir__()) or f" It has: {', '.join(__dir__())}."
        raise AttributeError(f"module 'flowscope' has no attribute {name!r}.{hint}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
