"""The one exception class that flowscope raises on purpose."""

from __future__ import annotations


class FlowscopeError(Exception):
    """A request flowscope cannot fulfil: says what, where, got, expected, and the call that fixes it."""
