"""Trainers in place of packages that are not installed: what their callbacks are called with, in which order.

Each file has `MODULES`, by path and name, with as much of its package as `tests/test_adapters.py` and the docs
use. That a stand-in calls as the package does is recorded in `tests/test_adapters.py` (CONTRACTS), and compared with it
where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

STAND_INS = sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))
"""The packages."""


@contextlib.contextmanager
def standing_in(package: str) -> Iterator[None]:
    """Within it the package's stand-in is imported in its place, and flowscope's adapter for it anew."""
    adapter = f"flowscope.integrations.{package}"
    with pytest.MonkeyPatch.context() as patch:
        sys.modules.pop(adapter, None)
        for path, held in importlib.import_module(f"stand_ins.{package}").MODULES.items():
            patch.setitem(sys.modules, path, ModuleType(path))
            vars(sys.modules[path]).update(held)
        yield
        sys.modules.pop(adapter, None)
