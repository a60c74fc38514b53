"""A fault of ours never stops a run: it is caught, reported once, and switches the faulty part off."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from flowscope.errors import StopTraining

LOGGER = logging.getLogger("flowscope")


def is_off() -> bool:
    """Whether the environment turns flowscope off: `watch`, callbacks and `flowscope run` then observe nothing."""
    return os.environ.get("FLOWSCOPE_OFF") == "1"


class Faults:
    """Knows which parts (a probe, a detector, a sink, a callback) failed; `FLOWSCOPE_STRICT=1` raises instead."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    @property
    def strict(self) -> bool:
        """Whether a fault raises."""
        return os.environ.get("FLOWSCOPE_STRICT") == "1"

    def report(self, part: str, error: BaseException) -> None:
        """Note that `part` failed with `error`: logged once, the part is off from now on."""
        if self.strict:
            raise error
        if part not in self.failed:
            self.failed[part] = f"{type(error).__name__}: {error}"
            LOGGER.error(
                "flowscope: %s failed and is switched off; training goes on. %s: %s",
                part,
                type(error).__name__,
                error,
                exc_info=LOGGER.isEnabledFor(logging.DEBUG),
            )

    def guard(self, part: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call `function(*args, **named)` unless the part has failed; a fault is reported and None returned.

        `StopTraining` is no fault: the user asked for it.
        """
        if part in self.failed:
            return None
        try:
            return function(*args, **named)
        except StopTraining:
            raise
        except Exception as error:
            self.report(part, error)
            return None
