"""`python -m benchmarks.stacks [NAME...] [--write FILE] [--python PATH]...`: each stack in an environment of its own.

An environment is made in `.stacks/NAME` at its first run: torch first, then flowscope's own needs, then the stack's
packages. Where one cannot be made, or `--python` names interpreters and none has the packages, the stack is skipped by
name, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from .programs import STACKS

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
OWN = ("tensorboard>=2.21", "numpy", "scipy", "pydantic>=2")
COLUMNS = ("works", "steps", "loss", "gradient", "false alarms")
BEGIN, END = "<!-- stacks -->", "<!-- end of stacks -->"
MARK = "STACK "


def environment(name: str) -> Path | str:
    """The interpreter of a stack, or why there is none."""
    folder = ROOT / ".stacks" / name
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", TORCH],
        [str(python), "-m", "pip", "install", "-q", TORCH, *OWN, *STACKS[name].packages],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            return "does not install: " + (done.stderr.strip().splitlines() or ["?"])[-1][:120]
    (folder / "ready").touch()
    return python


def run(name: str, pythons: list[Path]) -> dict[str, str]:
    """A stack's row; {"skipped": reason} without one."""
    if pythons:
        found: list[Path | str] = [python for python in pythons if _has(python, name)]
        python = found[0] if found else "its packages are in none of the interpreters given"
    else:
        python = environment(name)
    if isinstance(python, str):
        return {"skipped": python}
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
    rows = {}
    for name in given.names:
        rows[name] = run(name, given.python)
        print(name, rows[name], flush=True)
    text = table(rows)
    print(text)
    if given.write is not None:
        page = given.write.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        given.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return int(any(row.get("works", "yes") != "yes" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
