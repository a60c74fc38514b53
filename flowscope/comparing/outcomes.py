"""What one short training came to, and the folder that keeps such outcomes: what is there is not trained again."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowscope.errors import FlowscopeError

NAN = float("nan")
LAST = 0.1
"""The loss of a training is the mean over this share of its steps, the last ones."""


@dataclass(frozen=True)
class Candidate:
    """A mode with options, as `wrap` takes them.

    Attributes:
        mode: its name, or a class of one's own.
        options: the rest.
    """

    mode: Any
    options: dict[str, Any]

    @property
    def label(self) -> str:
        """Its name in tables: the mode, and what was chosen."""
        name = self.mode if isinstance(self.mode, str) else self.mode.mode
        return " ".join([str(name), *(f"{key}={value}" for key, value in self.options.items())])


@dataclass(frozen=True)
class Outcome:
    """One training.

    Attributes:
        label: of the candidate.
        seed: of the training.
        losses: of its steps.
        gradient_product: share of the last block's gradient that arrives at the first, at the last look; NaN unseen.
        step_seconds: median over the steps.
        saved_bytes: what one step keeps for backward, beside the parameters.
        parameters: of the model, with its connections.
        error: why it did not end; "" where it did.
    """

    label: str
    seed: int
    losses: tuple[float, ...] = ()
    gradient_product: float = NAN
    step_seconds: float = NAN
    saved_bytes: float = NAN
    parameters: int = 0
    error: str = ""

    @property
    def loss(self) -> float:
        """Mean of the last tenth; NaN where one of these was not finite, or none was made."""
        if self.error or not self.losses:
            return NAN
        last = self.losses[-max(1, round(LAST * len(self.losses))) :]
        return statistics.fmean(last) if all(map(math.isfinite, last)) else NAN


class Store:
    """A folder with a JSON file a training.

    Attributes:
        folder: where; None keeps nothing.
        about: what the trainings have in common; outcomes of others are not taken.
    """

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, json.loads(json.dumps(about))
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FlowscopeError(f"{folder}: cannot be made ({error.strerror}); expected a folder.") from None

    def path(self, label: str, seed: int) -> Path | None:
        """Where an outcome is kept."""
        name = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in f"{label}-{seed}")
        return None if self.folder is None else self.folder / f"{name}.json"

    def find(self, label: str, seed: int) -> Outcome | None:
        """Return the outcome of a training that ended before, if it was the same."""
        path = self.path(label, seed)
        if path is None or not path.exists():
            return None
        try:
            kept = json.loads(path.read_text())
            outcome = outcome_of(kept["outcome"])
        except (ValueError, KeyError, TypeError):
            return None  # cut short while it was written
        same = kept.get("about") == self.about and (outcome.label, outcome.seed) == (label, seed)
        return outcome if same and not outcome.error else None

    def keep(self, outcome: Outcome) -> None:
        """Write an outcome, whole or not at all."""
        path = self.path(outcome.label, outcome.seed)
        if path is not None:
            write_whole(path, {"about": self.about, "outcome": dataclasses.asdict(outcome)})


def outcome_of(values: dict[str, Any]) -> Outcome:
    """Return an outcome read from JSON."""
    return Outcome(**{**values, "losses": tuple(values["losses"])})


def write_whole(path: Path, values: dict[str, Any]) -> None:
    """Write JSON that another process sees whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    partial.replace(path)


def telling(path: Path, every: float = 0.3) -> Callable[[int, float], None]:
    """Return what writes a training's progress to a file now and then."""
    last = 0.0

    def tell(step: int, loss: float) -> None:
        nonlocal last
        if time.monotonic() - last > every:
            last = time.monotonic()
            write_whole(path, {"step": step, "loss": loss})

    return tell
