"""Which trials are asked for: on the command line, and in the table [tool.flowscope] of pyproject.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowscope.errors import FlowscopeError
from flowscope.trials.built_in import NAMES


@dataclass(frozen=True)
class Options:
    """What the command was asked for.

    Attributes:
        steps: the trials are made at this optimizer step.
        only: names of the trials to run; none is all.
        skip: names of those to leave out.
        json: whether findings are printed as one JSON array.
    """

    steps: int = 3
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    json: bool = False


def options_of(steps: int, only: str | None, skip: str | None, *, json: bool = False) -> Options:
    """The options of a call; `only` and `skip` not given are those of the project the call is made in.

    Raises:
        FlowscopeError: a number of steps below 1, an unknown trial, or a table that cannot be read.
    """
    if steps < 1:
        raise FlowscopeError(f"flowscope check: --steps: got {steps}, expected 1 or more.")
    table = _project()
    chosen = {
        key: _names(given) if given is not None else tuple(table.get(key, ()))
        for key, given in (("only", only), ("skip", skip))
    }
    if unknown := sorted({*chosen["only"], *chosen["skip"]} - {*NAMES}):
        raise FlowscopeError(f"flowscope check: got the trial {unknown[0]!r}, expected some of {', '.join(NAMES)}.")
    return Options(steps, chosen["only"], chosen["skip"], json)


def _names(given: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(",") if name.strip())


def _project() -> dict[str, Any]:
    """The keys `only` and `skip` of [tool.flowscope] in the nearest pyproject.toml upwards."""
    file = next((f for f in (d / "pyproject.toml" for d in (Path.cwd(), *Path.cwd().parents)) if f.is_file()), None)
    if file is None:
        return {}
    if sys.version_info < (3, 11):
        return {}
    import tomllib  # type: ignore[import-not-found,unused-ignore]

    try:
        table = tomllib.loads(file.read_text()).get("tool", {}).get("flowscope", {})
    except (OSError, ValueError) as error:
        raise FlowscopeError(f"{file}: [tool.flowscope] cannot be read: {error}.") from None
    found = {key: table[key] for key in ("only", "skip") if key in table}
    for key, value in found.items():
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise FlowscopeError(f"{file}: [tool.flowscope] {key}: got {value!r}, expected a list of names of trials.")
    return found
