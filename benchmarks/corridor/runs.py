"""The runs, trained once and kept in `runs/corridor`."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from benchmarks.corridor.programs import train

FOLDER = Path("runs/corridor")
SEEDS = 24
"""Nineteen of a group, and five that are judged by it."""
CHANGED_SEEDS = 3
"""From 100 on: no changed run shares its data with one of its group."""


def folder_of(program: str, seed: int, change: str = "", root: Path = FOLDER) -> Path:
    """Where one run is kept."""
    return root / program / (change.replace(" ", "_").replace("/", "over") or "good") / f"seed{seed}"


def kept(program: str, seed: int, change: str = "", root: Path = FOLDER) -> Path:
    """The folder of a run, which is trained where it is not there."""
    folder = folder_of(program, seed, change, root)
    if not (folder / "flowscope.jsonl").exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(program, seed, part, change)
        part.rename(folder)
    return folder
