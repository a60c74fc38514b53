"""The command `flowscope` (also `python -m flowscope`): look at a run's files; needs no model and imports no torch.

    flowscope summary RUN                           a few lines: what stands, and where
    flowscope runs DIR                              one line a run: verdict, first alert, place, loss, steps, cost
    flowscope export RUN --csv -o run.csv           its numbers as CSV
    flowscope report RUN -o report.html             one HTML file, opens from disk
    flowscope compare RUN_A RUN_B -o compare.html   runs on top of each other, in one HTML file
    flowscope bisect GOOD BAD                       where two runs part: step, phase and place
    flowscope diagnose RUN                          judge its records again, with other limits if asked
    flowscope run train.py [ARGS...]                run an unmodified training script and watch its models
    flowscope check train.py [ARGS...]              try what a script trains: facts, within a minute
    flowscope try train.py [ARGS...]                train its model with one connection after the other: which helps
    flowscope golden check RUN REFERENCE            whether a run stays with a group of good ones (add, list: make one)
    flowscope live RUN                              follow a run in this terminal while it trains in another

RUN is the `log_dir` that `flowscope.watch` was given, or the `flowscope.jsonl` in it. Exit status: 0 done, 1 a run
cannot be read or a file not written, 2 a wrong call. `diagnose`: 0 no alert of level error stands at the end, 1 one
does, 2 the run cannot be read or a limit is wrong. `bisect`: 0 the runs are equal, 1 they part, 2 they cannot be
compared. `golden check`: 0 the run stays with its group, 1 it parts, 2 it cannot be told. `run`: the script's own; with
`--fail-on error` 1 where it ended with 0 and such an alert was raised.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowscope._version import __version__
from flowscope.comparing.try_command import add_parser as add_try
from flowscope.config import WatchConfig, make_config
from flowscope.detectors import DETECTORS, Detector, check_asked
from flowscope.detectors.coverage import Mute
from flowscope.errors import FlowscopeError
from flowscope.golden_command import add_parser as add_golden
from flowscope.records import ALL_DIGITS, RunHeader, strict_json
from flowscope.sinks import Run, read_run
from flowscope.sinks.jsonl import FILE_NAME
from flowscope.sinks.reading import file_of, is_run, runs_below
from flowscope.terminal import block, paragraph, shown, tell

REPLAYED = 100
"""So many records of an old run are judged again to say what its silence covers."""
LISTED = 8
"""How many runs below a folder an error names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments without the program's name; None is those of the process.

    Returns:
        The exit status; a wrong call leaves by SystemExit(2), as argparse does.
    """
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int | None] = arguments.command
    if command in (_run, _check):
        return command(arguments)  # its streams, signals and status are the script's
    for stream in (sys.stdout, sys.stderr):
        # a terminal that cannot show the bars of a profile gets question marks, not a traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        status = command(arguments) or 0
        sys.stdout.flush()
    except FlowscopeError as error:
        tell(f"flowscope: {error}")
        return 2 if command in (_diagnose, _bisect) else 1
    except BrokenPipeError:
        # the reader (head, a pager) has seen enough; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flowscope", description="Look at runs recorded by flowscope.watch(log_dir=...).")
    parser.add_argument("--version", action="version", version=f"flowscope {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run_help = f"the log_dir of a run, or its {FILE_NAME}"
    of_a_run = argparse.ArgumentParser(add_help=False)
    of_a_run.add_argument("run", metavar="RUN", help=run_help)
    reading = [of_a_run]

    words = "a few lines: last profiles, standing alerts, missing gradients"
    commands.add_parser("summary", parents=reading, help=words).set_defaults(command=_summary)

    runs = commands.add_parser("runs", help="a line for each run in a folder: verdict, first alert, place, loss, cost")
    runs.add_argument("folder", metavar="DIR", nargs="?", default="runs", help="the folder (default: %(default)s)")
    runs.add_argument("--sort", default="run", metavar="COLUMN", help="such as verdict, loss, since (default: run)")
    runs.add_argument("--json", action="store_true", help="one JSON array of objects instead of a table")
    runs.set_defaults(command=_runs)

    report = commands.add_parser("report", parents=reading, help="one self-contained HTML file of a run")
    report.add_argument("-o", "--output", default="report.html", help="the file to write (default: %(default)s)")
    report.add_argument("--title", help="the page's title (default: the run's name)")
    report.set_defaults(command=_report)

    compare = commands.add_parser("compare", help="one self-contained HTML file of runs on top of each other")
    several = f"{run_help}, or a folder of runs: all below it"
    compare.add_argument("run", metavar="RUN_A", help=several)
    compare.add_argument("others", metavar="RUN_B", nargs="*", help="further runs")
    compare.add_argument("-o", "--output", default="compare.html", help="the file to write (default: %(default)s)")
    compare.add_argument("--title", help="the page's title (default: the runs' names)")
    compare.set_defaults(command=_report)

    words = "the numbers of a run as CSV, a line each: step, metric, flow, row, name, value"
    export = commands.add_parser("export", parents=reading, help=words)
    export.add_argument("--csv", action="store_true", help="as CSV, which is the default")
    export.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: standard output)")
    export.add_argument(
        "--only", metavar="WHAT", help='one metric, "loss", or "alerts" (default: loss and all profiles)'
    )
    export.add_argument("--flow", help="of that metric (default: the first that has it)")
    export.set_defaults(command=_export)

    words = "the first step, phase and place at which two runs part; exit status 1: they do"
    parting = commands.add_parser("bisect", help=words)
    parting.add_argument("good", metavar="GOOD", help=run_help)
    parting.add_argument("bad", metavar="BAD", help="the run that is in doubt")
    size = "a run that differs from GOOD by rounding alone (GOOD/rounding* are found by themselves)"
    parting.add_argument("--rounding", metavar="RUN", action="append", default=[], help=size)
    parting.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parting.set_defaults(command=_bisect)

    words = "judge a run again, from its records; exit status 1: an error stands"
    diagnose = commands.add_parser("diagnose", parents=reading, help=words)
    diagnose.add_argument(
        "--set",
        metavar="LIMIT=VALUE",
        action="append",
        default=[],
        help="another limit, a field of WatchConfig, such as vanishing_product=1e-5; may be repeated",
    )
    own = "a detector of your own, beside the built-in ones"
    diagnose.add_argument("--detector", metavar="MODULE:CLASS", action="append", default=[], help=own)
    diagnose.add_argument("--json", action="store_true", help="the alerts as JSON, one a line, instead of text")
    diagnose.set_defaults(command=_diagnose)

    run = commands.add_parser("run", help="run a training script as it is, and watch its models")
    run.add_argument("--log-dir", help="where to write (default: runs/SCRIPT-DATE-TIME)")
    run.add_argument("--every", type=int, metavar="N", help="sample each n-th step (default: as the budget asks for)")
    words = "the share of a step's time that flowscope may take (default: 0.01, but each 80th step at the least)"
    run.add_argument("--budget", type=float, metavar="SHARE", help=words)
    run.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a field of WatchConfig")
    reference = "a good run of this recipe, a folder of them, or a golden profile: tells where this run parts from them"
    run.add_argument("--reference", metavar="GOOD", help=reference)
    words = "move the first hidden state by one ulp and write to RUN/rounding: shows bisect how much of RUN is rounding"
    run.add_argument("--rounding", metavar="RUN", help=words)
    words = "end with status 1 where the script ends with 0 and an alert of this kind or severity was raised"
    run.add_argument("--fail-on", metavar="KIND", action="append", default=[], help=f"{words}; may be repeated")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    run.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script and its arguments")
    run.set_defaults(command=_run)

    trying = commands.add_parser("check", help="run a training script to its third step, and try what it trains")
    trying.add_argument("--steps", type=int, default=3, metavar="N", help="try at the n-th step (default: %(default)s)")
    names = "names of trials, separated by commas"
    trying.add_argument("--only", metavar="NAMES", help=f"{names}: these only")
    trying.add_argument("--skip", metavar="NAMES", help=f"{names}: all but these")
    trying.add_argument("--json", action="store_true", help="one JSON array of findings instead of a table")
    trying.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    trying.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script and its arguments")
    trying.set_defaults(command=_check)

    add_golden(commands)
    add_try(commands)

    words = "follow a run in this terminal while it trains in another; Ctrl-C ends"
    commands.add_parser("live", parents=reading, help=words).set_defaults(command=_live)
    return parser


# -- commands ---------------------------------------------------------------------------------------------------------


def _summary(arguments: argparse.Namespace) -> None:
    from flowscope.detectors.replay import replay
    from flowscope.summary import summarize

    run = _read(arguments.run)
    header = run.header or RunHeader()
    if not header.coverage and run.records:  # a run of 0.1, or one of a few records
        _, detectors = replay(header, run.records[:REPLAYED], _limits(header.config, ()))
        header = replace(header, coverage=detectors.covered(header))
    print(summarize(header, run.records, run.alerts, {}, f"The file is {arguments.run}."))


def _runs(arguments: argparse.Namespace) -> None:
    from flowscope.runs_table import rows_of, table

    rows = rows_of(arguments.folder, arguments.sort)
    if arguments.json:
        print(json.dumps(strict_json([vars(row) for row in rows], ALL_DIGITS), allow_nan=False))
    else:
        print(block(table(rows)))


def _export(arguments: argparse.Namespace) -> None:
    from flowscope.frames import columns_of, write_csv

    columns = columns_of(_read(arguments.run), arguments.only, arguments.flow)
    if arguments.output is None:
        write_csv(columns, sys.stdout)
        return
    try:
        with Path(arguments.output).open("w", encoding="utf-8", newline="") as file:
            write_csv(columns, file)
    except OSError as error:
        raise FlowscopeError(
            f"export -o {arguments.output}: {error.strerror}; expected a file that can be written."
        ) from error
    print(shown(f"{arguments.output} ({Path(arguments.output).stat().st_size / 1e6:.1f} MB)"))


def _report(arguments: argparse.Namespace) -> int:
    from flowscope.views.report import write_report

    paths = [arguments.run]
    if hasattr(arguments, "others"):
        asked = [*paths, *arguments.others]
        paths = [path for one in asked for path in ([one] if is_run(one) else map(str, runs_below(one)) or [one])]
        if len(paths) < 2:
            tell(f"flowscope compare: got {', '.join(asked)}, expected two runs or a folder of them; report shows one.")
            return 2
    runs = {name: _read(path) for name, path in zip(run_names(paths), paths, strict=True)}
    for name, run in runs.items():
        if not run.records:
            raise FlowscopeError(f"{name}: no record yet, so there is nothing to draw; wait for the first step.")
    _tell_differences({name: run.header or RunHeader() for name, run in runs.items()})
    file = write_report(runs, arguments.output, title=arguments.title)
    print(shown(f"{file} ({file.stat().st_size / 1e6:.1f} MB)"))
    return 0


def _tell_differences(headers: Mapping[str, RunHeader]) -> None:
    """What each run after the first was set up with otherwise."""
    from flowscope.parting.differences import differences

    (first, start), *others = headers.items()
    for name, header in others:
        told = differences(start, header)
        head = f"what differs, {first} -> {name}: {'nothing that the headers say' if not told else ''}".rstrip()
        print(block([head, *(f"  {line}" for line in told)]))


def _diagnose(arguments: argparse.Namespace) -> int:
    from flowscope.detectors.replay import replay, stride
    from flowscope.diagnosis import diagnosis
    from flowscope.sinks.jsonl import encode_event

    run = _read(arguments.run)
    header = run.header or RunHeader()
    own = [_class_at(path) for path in arguments.detector]
    config = _limits(header.config, arguments.set, {detector.kind for detector in own})
    records = [*run.records, *run.unsampled]
    alerts, detectors = replay(header, records, config, own)
    if arguments.json:
        sys.stdout.writelines(encode_event(alert).decode() for alert in alerts)
    else:
        ends = (
            f"{len(run.records)} records, steps {run.records[0].step} to {run.records[-1].step}" if run.records else ""
        )
        ends += f"; one of {nth} is judged" if (nth := stride(len(records))) > 1 else ""
        print(block([f"{arguments.run}: {ends or 'no record'}", *diagnosis(alerts), detectors.covered(header)]))
    return int(any(alert.severity == "error" for alert in detectors.standing))


def _bisect(arguments: argparse.Namespace) -> int:
    from flowscope.parting.bisection import bisect

    _read(arguments.good)
    _read(arguments.bad)
    found = bisect(arguments.good, arguments.bad, rounding=arguments.rounding)
    if arguments.json:
        print(json.dumps(strict_json(found.to_json(), ALL_DIGITS), allow_nan=False))
    else:
        print(paragraph(str(found)))
    return int(found.phase is not None)


def _class_at(path: str) -> type[Detector]:
    """The detector class that MODULE:CLASS names; modules of the current folder come first."""
    module, _, name = path.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise FlowscopeError(f"diagnose --detector: got {path!r} ({error}), expected MODULE:CLASS.") from None
    finally:
        sys.path.pop(0)
    if not isinstance(found, type) or not issubclass(found, Detector):
        raise FlowscopeError(f"diagnose --detector: got {path!r}, expected a subclass of flowscope.detectors.Detector.")
    return found


def _limits(recorded: Mapping[str, Any], changes: Sequence[str], own: Collection[str] = ()) -> WatchConfig:
    """The run's own configuration with some limits changed; what this version does not take is left out.

    So are limits of detectors that are not among `own`.
    """
    config = {key: value for key, value in recorded.items() if _is_taken(key, value)}
    known = make_config(config)
    config["limits"] = {kind: limit for kind, limit in known.limits.items() if kind in own}
    kinds = {*own, *(detector.kind for detector in DETECTORS)}
    config["mute"] = [pattern for pattern in known.mute if not Mute([pattern]).unknown(kinds)]
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise FlowscopeError(
                f"diagnose --set: got {change!r}, expected LIMIT=VALUE, such as vanishing_product=1e-5."
            )
        config[name] = value
    return make_config(config)


def _is_taken(key: str, value: Any) -> bool:
    """Whether a setting of a run is one of this version."""
    try:
        make_config({key: value})
    except FlowscopeError:
        return False
    return True


def _run(arguments: argparse.Namespace) -> int:
    """The script's own streams, arguments, exceptions and exit status; a wrong call of ours is 2."""
    import time

    from flowscope.corridor.detector import place_of
    from flowscope.launch import run_script

    try:
        if not arguments.script:
            raise FlowscopeError("flowscope run: no script was given; expected flowscope run train.py [ARGS...].")
        config: dict[str, Any] = {"console": "off"}
        if arguments.rounding:
            _read(arguments.rounding)
            arguments.log_dir, config["nudge"] = file_of(arguments.rounding).parent / "rounding", True
        options: dict[str, Any] = {
            "every": arguments.every,
            "budget": arguments.budget,
            "config": _limits(config, arguments.set),
        }
        if arguments.reference:
            one = is_run(arguments.reference)  # an absolute path: the script may change its folder
            options["reference"] = Path(arguments.reference).absolute() if one else place_of(arguments.reference)
        name = f"{Path(arguments.script[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        log_dir = Path(arguments.log_dir) if arguments.log_dir else Path("runs") / name
        check_asked("flowscope run --fail-on", arguments.fail_on, ["parted_from_reference"])
        asked = {"module": arguments.module, "options": options, "fail_on": arguments.fail_on}
        return run_script(arguments.script, log_dir.absolute(), **asked)
    except FlowscopeError as error:
        tell(f"flowscope: {error}")
        return 2


def _check(arguments: argparse.Namespace) -> int:
    """Ends the process itself: 0 right, 1 something failed, 2 not judged, or a wrong call."""
    from flowscope.trials.command import check_script
    from flowscope.trials.settings import options_of

    try:
        if not arguments.script:
            raise FlowscopeError("flowscope check: no script was given; expected flowscope check train.py [ARGS...].")
        options = options_of(arguments.steps, arguments.only, arguments.skip, json=arguments.json)
        check_script(arguments.script, options, module=arguments.module)
    except FlowscopeError as error:
        tell(f"flowscope: {error}")
        return 2


def _live(arguments: argparse.Namespace) -> None:
    from flowscope.live import follow, show

    _read(arguments.run)
    show(follow(arguments.run), sys.stdout)


# -- runs -------------------------------------------------------------------------------------------------------------


def run_names(paths: Sequence[str]) -> list[str]:
    """A name per run: the folder's own, with so many of its parents as tell the runs apart.

    Raises:
        FlowscopeError: two paths are the same run.
    """
    folders = [Path(path).resolve() for path in paths]
    folders = [folder.parent if folder.name == FILE_NAME else folder for folder in folders]
    if len(set(folders)) < len(folders):
        raise FlowscopeError(f"compare: got {' and '.join(paths)}, which are the same run; expected different ones.")
    several = (["/".join(folder.parts[-count:]) for folder in folders] for count in itertools.count(1))
    return next(names for names in several if len(set(names)) == len(names))


def _read(path: str) -> Run:
    """The run, or an error that says what there is instead; incomplete lines are told on stderr."""
    try:
        run = read_run(path)
    except FlowscopeError as error:
        below = sorted(str(file.parent) for file in Path(path).glob(f"**/{FILE_NAME}")) if Path(path).is_dir() else []
        if not below:
            raise
        more = f" and {len(below) - LISTED} more" if len(below) > LISTED else ""
        raise FlowscopeError(f"{error} Runs below it: {', '.join(below[:LISTED])}{more}.") from None
    except OSError as error:
        raise FlowscopeError(f"{path}: cannot be read ({error.strerror}).") from None
    if run.skipped_lines and run.header is None and not run.records:
        raise FlowscopeError(
            f"{path}: none of its {run.skipped_lines} lines is flowscope's; expected the {FILE_NAME} that "
            "flowscope.watch(model, log_dir=...) writes."
        )
    if run.skipped_lines:
        tell(f"flowscope: {path}: {run.skipped_lines} unreadable line(s) left out.")
    return run


if __name__ == "__main__":
    sys.exit(main())
