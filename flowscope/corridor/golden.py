"""Golden profiles: a group of good runs in one file of at most 50 kB, JSON and numpy, that goes beside the code.

Values are kept to a tenth of the spread of the good runs; what does not fit is thinned out, steps and depth in turn.

Axis letters: N good runs, K steps, R rows.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowscope.corridor.curves import Stack, thinned
from flowscope.corridor.group import LEAST_RUNS, Corridor
from flowscope.corridor.spread import usual
from flowscope.errors import FlowscopeError
from flowscope.records import RunHeader, strict_json
from flowscope.sinks import read_run

FOLDER = "golden"
"""Where profiles lie unless told otherwise, below the current folder."""
SUFFIX = ".npz"
MOST_BYTES = 50_000
GRAIN = 0.1
"""Values are kept in these parts of a row's usual deviation."""
SIZES = ((64, 32), (48, 16), (32, 16), (24, 12), (16, 12), (16, 8), (12, 6), (8, 4), (6, 2), (4, 1))
"""Steps and rows of each metric, tried until the file fits."""
TOLD = ("key", "steps", "recorded", "labels", "phase", "per_flow", "in_logs", "unit")
MOST_GRAINS, MISSING = 32_000, -32_768
"""The largest number of grains, and what stands for a row that a run did not see."""
LARGEST_ENTRY = 16_000
"""An entry of the set-up that is longer as JSON (the shapes of all weights) is left out."""


def add(paths: Sequence[str | Path], name: str, folder: str | Path = FOLDER) -> Path:
    """Write the profile of good runs.

    Args:
        paths: the runs, `log_dir`s of `flowscope.watch`.
        name: of the recipe; a profile of this name is replaced.
        folder: where profiles lie.

    Returns:
        The file.

    Raises:
        FlowscopeError: too few runs, or runs that have nothing in common, or a name that is no file's.
    """
    file = file_of(name, folder)
    group = Corridor.of_runs(name, [read_run(path) for path in paths])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(packed(group))
    return file


def file_of(name: str, folder: str | Path = FOLDER) -> Path:
    """The file of a profile."""
    if not name or Path(name).name != name:
        raise FlowscopeError(f"golden: got the name {name!r}, expected that of a recipe, such as gpt2-small.")
    return Path(folder) / f"{name.removesuffix(SUFFIX)}{SUFFIX}"


def packed(group: Corridor) -> bytes:
    """The group as a file, thinned until it fits.

    Raises:
        FlowscopeError: it does not fit at all.
    """
    for steps, rows in SIZES:
        data = _packed(group, [thinned(stack, steps, rows) for stack in group.stacks.values()])
        if len(data) <= MOST_BYTES:
            return data
    raise FlowscopeError(f"golden: {group.name}: {len(data)} bytes at the least, more than {MOST_BYTES}: fewer runs.")


def _packed(group: Corridor, stacks: Sequence[Stack]) -> bytes:
    told = [{name: getattr(stack, name) for name in TOLD} | {"rows": stack.values.shape[2]} for stack in stacks]
    words = {"name": group.name, "runs": group.runs, "recipe": recipe(group.header), "stacks": told}
    text = json.dumps(strict_json(words), separators=(",", ":"), allow_nan=False).encode()
    centres, grains, offs = zip(*map(_grains, stacks), strict=True)
    file = io.BytesIO()
    np.savez_compressed(
        file, words=np.frombuffer(text, np.uint8), centre=_joined(centres), grain=_joined(grains), off=_joined(offs)
    )
    return file.getvalue()


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([array.ravel() for array in arrays])


def _grains(stack: Stack) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Centre [K, R], grain [R], and how many grains each run lies off the centre, [N, K, R]."""
    centre, scale = usual(stack.values, stack.unit, stack.in_logs)
    seen = np.isfinite(scale)
    sizes = np.where(seen, scale, 0.0).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
    grain = np.where(sizes > 0, GRAIN * sizes, 1.0).astype(np.float32)
    base = np.nan_to_num(centre).astype(np.float32)
    with np.errstate(invalid="ignore"):
        off = np.clip(np.rint((stack.values - base) / grain), -MOST_GRAINS, MOST_GRAINS)
    return base, grain, np.where(np.isfinite(off), off, MISSING).astype(np.int16)


def load(file: str | Path) -> Corridor:
    """The corridor of a profile.

    Raises:
        FlowscopeError: there is no such file, or it is no profile.
    """
    try:
        with np.load(file, allow_pickle=False) as data:
            words = json.loads(bytes(data["words"]))
            stacks = _stacks(words, {name: data[name].astype(np.float64) for name in ("centre", "grain", "off")})
        if words["runs"] < LEAST_RUNS:
            raise ValueError(f"{words['runs']} runs")
        return Corridor(str(words["name"]), RunHeader.from_json(words["recipe"]), stacks)
    except Exception as error:  # of a damaged file zipfile, zlib, tokenize and numpy each raise their own
        raise FlowscopeError(f"{file}: {error}; expected a profile that flowscope golden add wrote.") from None


def _stacks(words: Mapping[str, Any], data: Mapping[str, NDArray[Any]]) -> list[Stack]:
    shapes = [(len(told["steps"]), told.pop("rows")) for told in words["stacks"]]
    centres = _split(data["centre"], shapes)
    grains = _split(data["grain"], [(rows,) for _, rows in shapes])
    offs = _split(data["off"], [(words["runs"], *shape) for shape in shapes])
    stacks = []
    for told, centre, grain, off in zip(words["stacks"], centres, grains, offs, strict=True):
        known: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in told.items()}
        stacks.append(Stack(values=np.where(off == MISSING, np.nan, centre + grain * off), **known))
    return stacks


def _split(numbers: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    """The inverse of `_joined`."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = np.split(numbers, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def recipe(header: RunHeader) -> dict[str, Any]:
    """What of a header says how the runs were made, JSON-ready; `RunHeader.from_json` reads it."""
    told = header.to_json()
    setup = {name: said for name, said in told["setup"].items() if len(json.dumps(said)) <= LARGEST_ENTRY}
    return {**{name: told[name] for name in ("type", "version", "flows", "environment")}, "setup": setup}


@dataclass(frozen=True)
class Profile:
    """A golden profile in a few words: its name, how many runs, metrics and steps, its size in bytes, its versions."""

    name: str
    runs: int
    metrics: int
    steps: int
    size: int
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """One line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.environment.items())
        counts = f"{self.runs} runs, {self.metrics} metrics, {self.steps} steps, {self.size / 1000:.0f} kB"
        return f"{self.name}: {counts}; {versions}"


def listed(folder: str | Path = FOLDER) -> list[Profile]:
    """The profiles of a folder, by name; files that are none are left out."""
    found = []
    for file in sorted(Path(folder).glob(f"*{SUFFIX}")):
        try:
            group = load(file)
        except FlowscopeError:
            continue
        counts = group.runs, len(group.stacks), len(group.steps), file.stat().st_size
        found.append(Profile(file.stem, *counts, group.header.environment))
    return found
