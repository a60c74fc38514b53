"""The commands that read a run, as functions: what they print, and whether they keep to what they promise."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.patience import OutOfPatience, patience
from flowscope import live
from flowscope.cli import main
from flowscope.errors import FlowscopeError

ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal would obey."""


def _once(seconds: float) -> None:
    raise StopIteration


def followed(folder: Path) -> str:
    """Both views of `flowscope live` over what the file has now."""
    batches = list(itertools.islice(_ending(live.follow(folder, sleep=_once)), 10_000))
    view, lines = live.LiveView(), io.StringIO()
    for events in batches:
        for event in events:
            view.write(event)
    live.show(iter(batches), lines)
    return view.text(80) + "\n" + lines.getvalue()


def _ending(batches: live.Iterator[list[live.Event]]) -> live.Iterator[list[live.Event]]:
    # a generator turns the StopIteration of `_once` into a RuntimeError
    with contextlib.suppress(RuntimeError):
        yield from batches


def commands(folder: Path, other: Path) -> dict[str, Callable[[], object]]:
    """Name -> what reads the run in `folder`; `other` is an intact one beside it."""
    return {
        "summary": lambda: main(["summary", str(folder)]),
        "diagnose": lambda: main(["diagnose", str(folder)]),
        "diagnose --json": lambda: main(["diagnose", str(folder), "--json"]),
        "live": lambda: print(followed(folder)),
        "report": lambda: main(["report", str(folder), "-o", str(folder / "report.html")]),
        "compare": lambda: main(["compare", str(folder), str(other), "-o", str(folder / "compare.html")]),
    }


def broken(name: str, command: Callable[[], object], seconds: float = 20) -> str:
    """What a command did that it must not do; empty where it answered, or said clearly why it cannot."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
            patience(seconds),
        ):
            warnings.simplefilter("ignore")
            command()
    except (SystemExit, FlowscopeError):
        pass
    except (Exception, OutOfPatience) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.name}, line {where.lineno} of {where.filename})"
    told = out.getvalue() + err.getvalue()
    if "Traceback" in told:
        return "a traceback is printed"
    if found := ORDERS.search(told):
        return f"the terminal gets {found[0]!r}"
    return _strict(out.getvalue()) if name.endswith("--json") else ""


def _strict(text: str) -> str:
    try:
        [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]
    except ValueError as error:
        return f"no strict JSON: {error}"
    return ""


def _refuse(token: str) -> None:
    raise ValueError(token)


def large(folder: Path, most: float = 5.0) -> Mapping[str, float]:
    """The pages of a folder above so many MB, and their size."""
    sizes = {page.name: page.stat().st_size / 1e6 for page in folder.glob("*.html")}
    return {name: size for name, size in sizes.items() if size > most}
