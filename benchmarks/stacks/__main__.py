"""`python -m benchmarks.stacks [NAME...] [--write FILE] [--python PATH]...`: each stack in an environment of its own.

All environments see one below them, `.stacks/base`, with torch and flowscope's own needs. Each adds its stack's
packages to it, one upon the other, so that stacks share what they have in common. Where an environment cannot be made,
or `--python` names interpreters and none has the packages, the stack is skipped by name, with the reason. Where NAMEs
are given, the rows of the other stacks are those of their last run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from .case import COLUMNS
from .programs import STACKS

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
OWN = ("tensorboard>=2.21", "numpy", "scipy", "pydantic>=2")
BEGIN, END = "<!-- stacks -->", "<!-- end of stacks -->"
MARK = "STACK "
PLACE = "import sysconfig; print(sysconfig.get_path('purelib'))"


class NotInstalledError(Exception):
    """An environment cannot be made; says why."""


@functools.cache
def environment(packages: tuple[str, ...] = ()) -> Path:
    """The interpreter that has torch, flowscope's own needs and these packages; made at its first use.

    It sees the environment with all of the packages but the last, and holds what that one adds.
    """
    folder = ROOT / ".stacks" / ("_".join(re.findall(r"[\w-]+", " ".join(packages))) or "base")
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        below = [environment(packages[:count]) for count in range(len(packages) - 1, -1, -1)]
        _call(sys.executable, "-m", "venv", "--clear", *(["--without-pip"] if below else []), str(folder))
        if below:
            place, *seen = (_call(str(one), "-c", PLACE).strip() for one in (python, *below))
            Path(place, "below.pth").write_text("\n".join(seen))
        pip = [str([python, *below][-1]), "-m", "pip", "--python", str(python), "install", "-q", "--no-compile", TORCH]
        if not below:
            _call(*pip)  # first and alone: resolved together with the rest, it may be replaced by a larger build
        _call(*pip, *(packages[-1:] or OWN))
        (folder / "ready").touch()
    return python


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise NotInstalledError("does not install: " + (done.stderr.strip().splitlines() or ["?"])[-1][:120])
    return done.stdout


def run(name: str, pythons: list[Path]) -> dict[str, str]:
    """A stack's row; {"skipped": reason} without one."""
    try:
        python = (
            next((one for one in pythons if _has(one, name)), None) if pythons else environment(STACKS[name].packages)
        )
    except (NotInstalledError, subprocess.TimeoutExpired) as error:
        return {"skipped": str(error)}
    if python is None:
        return {"skipped": "its packages are in none of the interpreters given"}
    surroundings = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}",
        "OMP_NUM_THREADS": "1",
        "KERAS_BACKEND": "torch",
    }
    surroundings |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    command = [str(python), "-W", "ignore", "-m", "stacks.one", name]
    try:
        done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return {"skipped": "took more than 15 minutes"}
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not told:
        last = (done.stderr.strip().splitlines() or ["?"])[-1][:160]
        return {"works": f"NO: {last}"}
    row: dict[str, str] = json.loads(told[-1].removeprefix(MARK))
    return row


def _has(python: Path, name: str) -> bool:
    names = ", ".join(f'"{module}"' for module in STACKS[name].imports)
    code = f"import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in [{names}]))"
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0


def table(rows: dict[str, dict[str, str]]) -> str:
    """The rows as the documentation has them, then what was skipped and why."""
    lines = ["| stack | how | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 2)]
    for name, row in rows.items():
        if "skipped" not in row:
            cells = [row.get(column, "-").replace("|", "/") for column in COLUMNS]
            lines.append(f"| {name} | {STACKS[name].how} | " + " | ".join(cells) + " |")
    skipped = [f"{name}: {row['skipped']}" for name, row in rows.items() if "skipped" in row]
    return "\n".join([*lines, "", "Skipped: " + ("; ".join(skipped) or "none") + "."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*STACKS])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--python", action="append", type=Path, default=[])
    given = parser.parse_args()
    kept = ROOT / ".stacks" / "rows.json"
    kept.parent.mkdir(exist_ok=True)
    rows: dict[str, dict[str, str]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in given.names:
        rows[name] = run(name, given.python)
        kept.write_text(json.dumps(rows))
        print(name, rows[name], flush=True)
    text = table({name: rows[name] for name in STACKS if name in rows})
    print(text)
    if given.write is not None:
        page = given.write.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        given.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return int(any(row.get("works", "yes") != "yes" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
