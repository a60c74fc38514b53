"""The trials that come with flowscope; a new one is a file of its name, with one class, and its name here."""

from __future__ import annotations

import importlib

from flowscope.trials.trial import Trial

NAMES = (
    "causality",
    "samples",
    "padding",
    "gradient",
    "loss_path",
    "update",
    "recomputation",
    "determinism",
    "accumulation",
    "loss_start",
    "labels",
    "targets",
    "data",
    "train_eval",
    "saving",
    "overfit",
    "signal",
)
"""In the order they run."""


def built_in() -> list[type[Trial]]:
    """Their classes; imports torch."""
    modules = [importlib.import_module(f"flowscope.trials.{name}") for name in NAMES]
    own = [[c for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__] for m in modules]
    return [c for classes in own for c in classes if issubclass(c, Trial)]
