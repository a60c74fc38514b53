"""`flowscope try train.py --modes keel,dhc`: an unmodified script's training, short, with one connection after another.

Imports no torch before a script is there to be run.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowscope.comparing.outcomes import Candidate, Outcome, Store
from flowscope.comparing.verdict import ConnectionComparison
from flowscope.comparing.workers import ended, in_process, run_all
from flowscope.errors import FlowscopeError


def add_parser(commands: Any) -> None:
    """Add `try` to the command line."""
    words = "train a script's model for some steps with one connection after the other, and say which helps"
    trying = commands.add_parser("try", help=words)
    modes = "modes of wrap, separated by commas; the plain model is always the base line (default: %(default)s)"
    trying.add_argument("--modes", default="keel,dhc,mhc", metavar="NAMES", help=modes)
    trying.add_argument("--steps", type=int, default=300, metavar="N", help="of each training (default: %(default)s)")
    seeds = "trainings a mode; further ones move what the script seeds torch with (default: %(default)s)"
    trying.add_argument("--seeds", type=int, default=3, metavar="N", help=seeds)
    words = "keeps what ended, so that an interrupted call goes on; and the figure (default: runs/try-SCRIPT)"
    trying.add_argument("--folder", metavar="FOLDER", help=words)
    trying.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    trying.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script and its arguments")
    trying.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Print the table and the recommendation; exit status 1 where no training ended."""
    if not arguments.script:
        raise FlowscopeError("flowscope try: no script was given; expected flowscope try train.py [ARGS...].")
    folder = Path(arguments.folder or Path("runs") / f"try-{Path(arguments.script[0]).stem}").absolute()
    modes = [name for name in arguments.modes.split(",") if name]
    found = try_script(arguments.script, modes, arguments.steps, arguments.seeds, folder, module=arguments.module)
    print(found)
    try:
        found.plot(folder / "comparison.png")
        print(f"figure: {folder / 'comparison.png'}")
    except ImportError:
        print("no figure: pip install flowscope[plot]")
    return int(all(outcome.error for outcome in found.outcomes))


def try_script(
    script: Sequence[str], modes: Sequence[str], steps: int, seeds: int, folder: Path, *, module: bool = False
) -> ConnectionComparison:
    """Train a script's model with one connection after the other, each in a process of its own.

    Args:
        script: its path or the module's name, and its arguments.
        modes: names as `wrap` takes them.
        steps: of each training; the script is ended there, its own end (saving, testing) does not come.
        seeds: how many trainings a mode.
        folder: keeps each training's outcome; the same call takes what is there and goes on.
        module: whether `script[0]` is a module's name.

    Raises:
        FlowscopeError: a wrong mode or number, or there is no such script.
    """
    from flowscope.comparing.connections_compared import candidates_of

    candidates = candidates_of(modes)
    if steps < 1 or seeds < 1:
        raise FlowscopeError(f"flowscope try: got --steps {steps}, --seeds {seeds}, expected at least one of each.")
    if not module and not Path(script[0]).exists():
        raise FlowscopeError(
            f"flowscope try: there is no file {script[0]!r}; expected a Python script, or -m and a module."
        )
    store = Store(folder, {"steps": steps, "script": list(script)})

    def train(candidate: Candidate, seed: int, progress: Callable[[int, float], None]) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="flowscope-") as place:
            path = Path(place) / "task.pickle"
            task = {"candidate": candidate, "seed": seed, "steps": steps, "command": list(script), "module": module}
            path.write_bytes(pickle.dumps(task))
            process = in_process(
                ["-m", "flowscope.comparing.script_training", str(path)], path.with_suffix(".progress"), progress
            )
            try:
                outcome: Outcome = pickle.loads(path.with_suffix(".outcome").read_bytes())
            except OSError:
                return Outcome(candidate.label, seed, error=ended(process))
            return outcome

    outcomes = run_all(candidates, range(seeds), steps, train, store, progress=True)
    order = {candidate.label: number for number, candidate in enumerate(candidates)}
    return ConnectionComparison(tuple(sorted(outcomes, key=lambda o: (order[o.label], o.seed))), steps)
