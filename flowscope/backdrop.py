"""What is drawn behind a run that has a reference: the good run as a line, several good runs as a band.

It stands in the run's header (`RunHeader.behind`), so that who draws the run needs no other file.

Axis letters: Q lines (one, or the low, the middle and the high one of a band), K steps, R rows.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowscope.records import Array

LOSS = "loss"
"""The key of `Record.loss` among the curves."""
GRAINS = 32_000
"""Values are kept in so many parts of a curve's range."""
MARKS = {-1: math.nan, -2: -math.inf, -3: math.inf}
"""What is no number is kept as one of these."""
MOST_NUMBERS = 4_000_000
"""More are not unpacked: a file may say anything."""


@dataclass(frozen=True)
class Behind:
    """One metric of the reference.

    Attributes:
        steps: [K], rising.
        values: [Q, K, R]; NaN is "not seen". R may differ from that of the run: rows are at the same relative depth.
    """

    steps: tuple[int, ...]
    values: Array

    def at(self, step: int) -> tuple[int, Array]:
        """The kept step that is nearest, and its lines [Q, R]."""
        near = min(range(len(self.steps)), key=lambda k: abs(self.steps[k] - step))
        return self.steps[near], self.values[:, near]


@dataclass(frozen=True)
class Backdrop:
    """What is known of a reference: its name, of how many runs it is made, and its curves by key."""

    name: str
    runs: int
    curves: Mapping[str, Behind]

    @property
    def words(self) -> str:
        """What it is called where it is drawn."""
        return f"{self.name} ({self.runs} runs)" if self.runs > 1 else self.name


def packed(name: str, runs: int, curves: Mapping[str, Behind], logs: Iterable[str] = ()) -> dict[str, Any]:
    """The backdrop as the header holds it, JSON-ready; `read` is the inverse.

    Args:
        name: of the reference.
        runs: how many.
        curves: by key.
        logs: the keys of those that are kept as logarithms.
    """
    told, parts = [], []
    for key, curve in curves.items():
        values = _logs(curve.values) if key in logs else curve.values
        seen = values[np.isfinite(values)]
        if seen.size:
            low = float(seen.min())
            grain = float(seen.max() - low) / GRAINS or 1.0
            with np.errstate(invalid="ignore"):
                grains = np.where(np.isfinite(values), np.rint((values - low) / grain), -1)
            grains[np.isneginf(values)], grains[np.isposinf(values)] = -2, -3
            parts.append(grains.astype("<i2").tobytes())
            shape = list(values.shape)
            told.append([key, key in logs, low, grain, shape, list(curve.steps)])
    data = base64.b64encode(zlib.compress(b"".join(parts), 9)).decode()
    return {"name": name, "runs": runs, "curves": told, "data": data}


def _logs(values: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: Array = np.log(values)
    return logs


def read(behind: Mapping[str, Any]) -> Backdrop | None:
    """The backdrop of a header; None where it has none, or one that cannot be read."""
    try:
        return _read(behind) if behind else None
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, zlib.error):
        return None


def _read(behind: Mapping[str, Any]) -> Backdrop:
    shapes = [tuple(int(size) for size in shape) for *_, shape, _ in behind["curves"]]
    count = sum(math.prod(shape) for shape in shapes)
    if count > MOST_NUMBERS or any(len(shape) != 3 or min(shape) < 1 for shape in shapes):
        raise ValueError("too many numbers")
    data = zlib.decompressobj().decompress(base64.b64decode(behind["data"], validate=True), 2 * count + 1)
    numbers, begin, curves = np.frombuffer(data, "<i2").astype(np.float64), 0, {}
    for (key, log, low, grain, _, steps), shape in zip(behind["curves"], shapes, strict=True):
        grains = numbers[begin : begin + math.prod(shape)].reshape(shape)
        begin += grains.size
        if len(steps) != shape[1]:
            raise ValueError("as many steps as there are")
        values = float(low) + float(grain) * grains
        for mark, meant in MARKS.items():
            values[grains == mark] = meant
        curves[str(key)] = Behind(tuple(int(step) for step in steps), np.exp(values) if log else values)
    return Backdrop(str(behind["name"]), int(behind["runs"]), curves)
