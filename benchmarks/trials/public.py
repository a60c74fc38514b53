"""Public training scripts, re-created in `benchmarks/scripts`, unmodified under `flowscope check`: a fail is false.

`python -m benchmarks.trials --scripts` takes all, with names behind it some. Those of trainers/ are TRL's (where it is
installed) and a loop on two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "scripts"
TRAINERS = Path(__file__).parent / "trainers"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass
class Checked:
    """How the command judged one script.

    Attributes:
        name: the script's file without its ending.
        status: of the process.
        findings: as the command printed them.
        left: files that lay in the folder afterwards.
        error: what went wrong, where it judged nothing.
        seconds: wall time.
    """

    name: str
    status: int
    findings: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    def having(self, status: str) -> list[dict[str, Any]]:
        """The findings with a verdict."""
        return [one for one in self.findings if one["status"] == status]

    @property
    def right(self) -> bool:
        """Whether it ended as a healthy script should: status 0, no fail, nothing saved."""
        return self.status == 0 and not self.having("fail") and not self.left and not self.error

    def __str__(self) -> str:
        """The row of the table: trials that passed, notes by trial, what failed."""
        notes = ", ".join(dict.fromkeys(one["trial"] for one in self.having("note"))) or "-"
        fails = "; ".join(f"{one['trial']} at {one['where'] or 'the model'}" for one in self.having("fail"))
        fails = "; ".join([*filter(None, [fails, self.error]), *(f"left {name}" for name in self.left)]) or "none"
        return f"| {self.name} | {self.status} | {len(self.having('pass'))} | {notes} | {fails} |"


def check_script(path: Path, *launcher: str, seconds: float = 600) -> Checked:
    """Return how `flowscope check --json` judges a script in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *launcher, "-m", "flowscope", "check", "--json", str(path)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        left = sorted(one.name for one in Path(folder).iterdir())
    out = Checked(path.stem, done.returncode, left=left, seconds=time.monotonic() - start)
    try:
        out.findings = json.loads(done.stdout)
    except json.JSONDecodeError:
        out.error = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1][:200]
    return out


def chosen(names: list[str]) -> list[Path]:
    """Return the scripts named, or all that train."""
    found = [*SCRIPTS.glob("*.py"), *TRAINERS.glob("*.py")]
    return [path for path in found if (path.stem in names if names else path.stem not in ("data", "tiny"))]


def main(names: list[str]) -> int:
    """Print a row a script, every fail and note, and the sum; returns how many scripts ended otherwise than well."""
    checked = []
    for path in sorted(chosen(names)):
        if path.stem.startswith("trl") and not find_spec("trl"):
            print(f"| {path.stem} | trl is not installed |")
            continue
        one = check_script(path, *(TWO_RANKS if path.stem == "ddp" else ()))
        checked.append(one)
        print(one, f"{one.seconds:.0f} s", flush=True)
        for finding in [*one.having("fail"), *one.having("note")]:
            print(f"    {finding['status']} {finding['trial']} {finding['where']}: {finding['message']}", flush=True)
    wrong = [one.name for one in checked if not one.right]
    print(f"{len(checked)} scripts, {len(wrong)} not right: {', '.join(wrong) or '-'}")
    return len(wrong)
