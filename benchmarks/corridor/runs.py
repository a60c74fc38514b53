"""The runs, trained once and kept in `runs/corridor`."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.corridor.programs import CHANGES, HELD_OUT, train

FOLDER = Path("runs/corridor")
SEEDS = 23
"""Nineteen of a group, and four that are judged by it."""
CHANGED_SEEDS = 3


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


def wanted() -> list[tuple[str, int, str]]:
    """All runs of the table: (program, seed, change)."""
    good = [(program, seed, "") for program in HELD_OUT for seed in range(SEEDS)]
    good += [(program, seed, "") for program in CHANGES for seed in range(SEEDS - 4)]
    # seeds of their own, so that no changed run shares its data with one of its group
    changed = [
        (program, 100 + seed, change)
        for program, changes in CHANGES.items()
        for change in changes
        for seed in range(CHANGED_SEEDS)
    ]
    return [*good, *changed]


def main() -> None:
    """Train what is missing."""
    torch.set_num_threads(1)
    for program, seed, change in wanted():
        kept(program, seed, change)


if __name__ == "__main__":
    main()
