"""From a mode's name to the connection of a block."""

from __future__ import annotations

from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ConnectionContext
from flowscope.merging.gates import HighwayConnection, KeelConnection
from flowscope.merging.hyper import HyperConnection, StaticHyperConnection
from flowscope.merging.manifold import ManifoldConnection
from flowscope.merging.options import MODES, ModeOptions, mode_name, parse_options
from flowscope.merging.postln import DeepNormConnection, KeelPostLNConnection

_CLASSES: dict[str, Any] = {
    connection.mode: connection
    for connection in (
        Connection,
        KeelConnection,
        KeelPostLNConnection,
        HighwayConnection,
        StaticHyperConnection,
        HyperConnection,
        ManifoldConnection,
        DeepNormConnection,
    )
}


def make_connection(mode: str, context: ConnectionContext, options: ModeOptions | None = None) -> Connection:
    """Return the connection of one block.

    Args:
        mode: a name or alias of `MODES`.
        context: where the block stands in its flow.
        options: from `parse_options(mode, ...)`; None for the defaults.

    Raises:
        FlowscopeError: unknown mode, options of another mode, or a block this mode cannot serve.
    """
    name = mode_name(mode)
    options = options if options is not None else parse_options(name)
    if type(options) is not MODES[name]:
        raise FlowscopeError(
            f"make_connection(mode={name!r}): got {type(options).__name__}, expected {MODES[name].__name__}; "
            f"make them with parse_options({name!r}, ...)."
        )
    connection: Connection = _CLASSES[name](context, options)
    return connection


def preserves_output(options: ModeOptions) -> bool:
    """Return whether a freshly wrapped model computes what the original did (design: "output kept at the start")."""
    kept = {"residual": True, "mhc": True, "keel": getattr(options, "preserve", False)}
    prenorm = getattr(options, "init", "") == "prenorm" and getattr(options, "reduce", "") == "mean"
    name = next(mode for mode, model in MODES.items() if type(options) is model)
    return bool(kept.get(name, prenorm and not getattr(options, "output_scale", False)))
