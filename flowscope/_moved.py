"""Modules of earlier versions and where their names are now: a model that was wrapped and pickled then still loads."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED: dict[str, tuple[str, ...]] = {
    "flowscope.plot": ("flowscope.extras.plot",),
    "flowscope.merging.skipping": ("flowscope.extras.skipping",),
    "flowscope.merging.skipped_block": ("flowscope.extras.skipped_block",),
    "flowscope.merging.options": (
        "flowscope.merging.connection",
        "flowscope.merging.modes",
        "flowscope.merging.gates",
        "flowscope.merging.streams",
        "flowscope.merging.hyper",
        "flowscope.merging.manifold",
        "flowscope.merging.postln",
    ),
    "flowscope.probes.jacobian": ("flowscope.jacobian.spectrum",),
    "flowscope.probes.layout": ("flowscope.model.hidden_state",),
    "flowscope.probes.norms": ("flowscope.sums.vector_norms",),
    "flowscope.probes.products": ("flowscope.instruments.gate_products",),
    "flowscope.probes.site_summaries": ("flowscope.sums.site_metrics",),
    "flowscope.probes.summaries": ("flowscope.sums.point_metrics",),
    "flowscope.probes.tensors": ("flowscope.jacobian.state_tensors",),
}
"""Old module -> the modules that hold its names now, asked in this order."""
FOLDERS: dict[str, tuple[str, ...]] = {
    "flowscope.discovery": ("flowscope.model",),
    "flowscope.panels": ("flowscope.views",),
    "flowscope.probes": (
        "flowscope.sums",
        "flowscope.hooks",
        "flowscope.observation",
        "flowscope.jacobian",
        "flowscope",
    ),
}
"""Old folder -> where its other modules are now, by their old names."""


def homes(old: str) -> tuple[str, ...]:
    """The modules that hold the names of an old one; none for one that was only a folder."""
    folder, _, name = old.rpartition(".")
    places = [f"{now}.{name}" for now in FOLDERS.get(folder, ())]
    return MOVED.get(old) or tuple(place for place in places if importlib.util.find_spec(place))


class MovedModules(MetaPathFinder, Loader):
    """Finds the modules of `MOVED`, and the packages they were in, where Python finds none of that name."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Return how an old module is made, None for any other."""
        if homes(name) or any(old == name or old.startswith(f"{name}.") for old in (*MOVED, *FOLDERS)):
            return ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Let a module answer for each name with what bears it in the modules of today."""
        old = module.__name__

        def moved(name: str) -> Any:
            for home in () if name.startswith("__") else homes(old):
                if hasattr(found := importlib.import_module(home), name):
                    return getattr(found, name)
            raise AttributeError(f"module {old!r} has no attribute {name!r}")

        vars(module)["__getattr__"] = moved


def install() -> None:
    """Ask for moved modules last."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
