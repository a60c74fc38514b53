"""`flowscope golden`: profiles of good runs, and whether a run stays with its group. Imports no torch.

What judges (`flowscope.corridor`) is imported by the command that needs it: scipy takes half a second.

flowscope golden add RUN... --name RECIPE    keep good runs of a recipe as golden/RECIPE.npz
flowscope golden list                        the profiles there are
flowscope golden check RUN REFERENCE         what differs, and whether, when and where the run parts
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flowscope.errors import FlowscopeError
from flowscope.records import RunHeader
from flowscope.sinks import Run, read_run
from flowscope.terminal import block, shown, tell

if TYPE_CHECKING:
    from flowscope.corridor import Corridor, Departure


def add_parser(commands: Any) -> None:
    """Add `golden` to the commands of `flowscope`."""
    parser = commands.add_parser("golden", help="profiles of good runs, and whether a run stays with them")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--folder", help="where profiles lie (default: golden)")

    adding = actions.add_parser("add", parents=[where], help="keep good runs of one recipe as a profile")
    adding.add_argument("runs", metavar="RUN", nargs="+", help="the log_dir of a good run; three at least")
    adding.add_argument("--name", required=True, metavar="RECIPE", help="the profile's name")
    adding.set_defaults(command=_add)

    actions.add_parser("list", parents=[where], help="the profiles there are").set_defaults(command=_list)

    checking = actions.add_parser(
        "check", help="whether, when and where a run parts; exit status 1: it does, 2: cannot tell"
    )
    checking.add_argument("run", metavar="RUN", help="the log_dir of the run")
    checking.add_argument("reference", metavar="REFERENCE", help="a profile's name or file, or a folder of good runs")
    checking.set_defaults(command=_check)


def _add(arguments: argparse.Namespace) -> None:
    from flowscope.corridor import golden

    file = golden.add(arguments.runs, arguments.name, arguments.folder or golden.FOLDER)
    print(shown(f"{file} ({file.stat().st_size / 1000:.0f} kB, {len(arguments.runs)} runs)"))


def _list(arguments: argparse.Namespace) -> None:
    from flowscope.corridor import golden

    folder = arguments.folder or golden.FOLDER
    found = golden.listed(folder)
    print(block(map(str, found)) or shown(f"no profile in {folder}; flowscope golden add makes one"))


def _check(arguments: argparse.Namespace) -> int:
    try:
        lines, departure = judged(arguments.run, arguments.reference)
    except FlowscopeError as error:
        tell(f"flowscope: {error}")
        return 2
    print(block(lines))
    return int(departure is not None and departure.certain)


def judged(path: str, reference: str) -> tuple[list[str], Departure | None]:
    """What there is to say of a finished run beside a group, and whether it parts.

    Raises:
        FlowscopeError: one of them cannot be read, or they have no step in common.
    """
    from flowscope.corridor import opened

    run, group = read_run(path), opened(reference)
    shared = sum(record.step in group.steps for record in run.records)
    if not shared:
        raise FlowscopeError(f"{path}: no record at a step of {group.name}, so there is nothing to compare.")
    departure = group.judge(run.records)
    return told(run, group, departure, shared), departure


def told(run: Run, group: Corridor, departure: Departure | None, steps: int) -> list[str]:
    """What there is to say of a run beside its group, line by line."""
    from flowscope.corridor.detector import changes, stale

    headers = group.header, run.header or RunHeader()
    old = stale(*headers)
    lines = [*([old] if old else []), *(f"differs: {change}" for change in changes(*headers))]
    counts = f"{len(group.stacks)} metrics at {steps} steps, {group.runs} good runs"
    if departure is None:
        return [*lines, f"stays with its group ({counts})"]
    level = "warning" if departure.certain else "note"
    rows = [f"  step {one.step:>6}  {one.metric:<24} {one.times:6.2g}x  {one.where}" for one in departure.beyond]
    return [*lines, f"{level}: the run {departure} ({counts})", f"  {departure.odds}", *rows]
