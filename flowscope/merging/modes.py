"""From a mode (a name, or a rule's class) to the rule, its options, and the connection of a block."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from flowscope.errors import FlowscopeError, nearest
from flowscope.merging.block_attention import BlockAttentionResidualsConnection
from flowscope.merging.connection import Connection, ConnectionContext, ModeOptions
from flowscope.merging.depth_attention import AttentionResidualsConnection
from flowscope.merging.gates import HighwayConnection, KeelConnection
from flowscope.merging.hyper import HyperConnection, StaticHyperConnection
from flowscope.merging.kronecker import KroneckerConnection
from flowscope.merging.layerscale import LayerScaleConnection
from flowscope.merging.manifold import ManifoldConnection
from flowscope.merging.periln import PeriLNConnection
from flowscope.merging.permutations import PermutationConnection
from flowscope.merging.postln import DeepNormConnection, KeelPostLNConnection
from flowscope.merging.rezero import ReZeroConnection

Rule = type[Connection]
BUILT_IN: tuple[Rule, ...] = (
    Connection,
    KeelConnection,
    KeelPostLNConnection,
    HighwayConnection,
    StaticHyperConnection,
    HyperConnection,
    ManifoldConnection,
    DeepNormConnection,
    PermutationConnection,
    KroneckerConnection,
    PeriLNConnection,
    ReZeroConnection,
    LayerScaleConnection,
    AttentionResidualsConnection,
    BlockAttentionResidualsConnection,
)
"""In the order of the documentation."""
MODES: dict[str, Rule] = {rule.mode: rule for rule in BUILT_IN}
"""Every rule that can be named: the built-in ones, and what `register` was given."""


def register(rule: Rule) -> Rule:
    """Let a rule from outside be named: `wrap(model, mode=rule.mode)`. Returns the class: it can stand as a decorator.

    Raises:
        FlowscopeError: no rule, or its name is a built-in's.
    """
    MODES[_own_name(rule)] = rule
    return rule


def rule_of(mode: Any) -> Rule:
    """Return the rule of a mode: a class, or a name or alias (case and underscores do not matter).

    Raises:
        FlowscopeError: no such mode (the message lists them), or a class from outside that bears a built-in's name.
    """
    if isinstance(mode, type) and issubclass(mode, Connection):
        if mode not in BUILT_IN:
            _own_name(mode)
        return mode
    name = mode.strip().lower().replace("_", "-") if isinstance(mode, str) else None
    for rule in MODES.values():
        if name in (rule.mode, *rule.aliases):
            return rule
    raise FlowscopeError(
        f"wrap(mode=...): got {mode!r}, expected one of {', '.join(MODES)}, or a class of your own."
        f"{nearest(str(mode), MODES)}"
    )


def _own_name(rule: Any) -> str:
    if not (isinstance(rule, type) and issubclass(rule, Connection)):
        raise FlowscopeError(f"register: got {rule!r}, expected a subclass of flowscope.merging.connection.Connection.")
    taken = {name for built_in in BUILT_IN for name in (built_in.mode, *built_in.aliases)}
    for name in (rule.mode, *rule.aliases):
        if name in taken:
            raise FlowscopeError(
                f"wrap(mode={rule.__name__}): {name!r} is a built-in mode; give the class a `mode` of its own."
            )
    return rule.mode


def parse_options(mode: str | Rule, **options: Any) -> ModeOptions:
    """Return the checked options of a mode, defaults filled in.

    Raises:
        FlowscopeError: an unknown mode (lists the modes), an option the mode does not have (lists its own and says
            which mode has it), or a value out of range.
    """
    rule = rule_of(mode)
    known = rule.Options.names()
    own = f"Options of {rule.mode}: {', '.join(known) or 'none'}."
    for option in options:
        if option not in known:
            owners = [other.mode for other in MODES.values() if option in other.Options.names()]
            hint = f" {option} is an option of mode {', '.join(owners)}." if owners else nearest(option, known)
            raise FlowscopeError(f"wrap(mode={rule.mode!r}): unknown option {option!r}. {own}{hint}")
    try:
        return rule.Options(**options)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise FlowscopeError(f"wrap(mode={rule.mode!r}): {wrong}. {own}") from None


def make_connection(mode: str | Rule, context: ConnectionContext, options: ModeOptions | None = None) -> Connection:
    """Return the connection of one block.

    Args:
        mode: a name, an alias or a class.
        context: where the block stands in its flow.
        options: from `parse_options(mode, ...)`; None for the defaults.

    Raises:
        FlowscopeError: unknown mode, options of another mode, or a block this mode cannot serve.
    """
    rule = rule_of(mode)
    options = options if options is not None else parse_options(rule)
    if type(options) is not rule.Options:
        raise FlowscopeError(
            f"make_connection(mode={rule.mode!r}): got {type(options).__name__}, expected {rule.Options.__name__}; "
            f"make them with parse_options({rule.mode!r}, ...)."
        )
    return rule(context, options)
