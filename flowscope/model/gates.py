"""Which modules of a model may be gates, from its structure; how their outputs are used decides (`gate_products.py`).

A gate is a value in [0, 1] that something is multiplied by: of a squeeze-and-excitation block, an attention gate, a
highway layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from flowscope.model.structure import LISTS, Named, is_ours

MOST = 256
"""So many modules are looked at, evenly spaced over the model."""
_SIGMOID = re.compile(r"^h(ard)?_?sigmoid$|^sigmoid$", re.IGNORECASE)
_GATE_NAME = re.compile(r"(^|_)gat(e|ing)s?(_|\d|$)", re.IGNORECASE)
_GATE_CLASS = re.compile(r"Gat(e|ing)(?![a-z])|^gat(e|ing)$")


@dataclass(frozen=True)
class GateCandidate:
    """A module whose output may be a gate.

    Attributes:
        path: module path.
        module: it.
        sigmoid: its class alone says that its output lies in [0, 1] (nn.Sigmoid, nn.Hardsigmoid and alike).
        named: its own name, or that of the Sequential it ends, says gate.
    """

    path: str
    module: nn.Module
    sigmoid: bool
    named: bool


def find_gates(modules: Sequence[Named], apart: Iterable[str] = ()) -> list[GateCandidate]:
    """Return those among the modules of a model that may be gates, in module order.

    Sigmoids, and modules of the user's own classes whose name or class name says gate. Not: the model itself, layers of
    torch (a `gate_proj` that is nn.Linear), what `wrap` added, what stands inside a path of `apart` (routers).
    """
    closed = [*apart, *(path for path, module in modules if is_ours(module))]
    by_path = dict(modules)
    found = []
    for path, module in modules:
        if not path or any(path == other or path.startswith(other + ".") for other in closed):
            continue
        named = _says_gate(path, module, by_path)
        if is_sigmoid(module):
            found.append(GateCandidate(path, module, True, named))
        elif named and not isinstance(module, LISTS) and not type(module).__module__.startswith("torch."):
            found.append(GateCandidate(path, module, False, True))
    return found[:: max(1, -(-len(found) // MOST))]


def is_sigmoid(module: nn.Module) -> bool:
    """Whether a module is a sigmoid or a hard one, by class or class name (every library writes its own)."""
    kind = type(module)
    return isinstance(module, nn.Sigmoid | nn.Hardsigmoid) or bool(_SIGMOID.search(kind.__name__))


def _says_gate(path: str, module: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """Whether a module's name says gate; the last of a Sequential has the Sequential's name."""
    above, _, name = path.rpartition(".")
    if _GATE_NAME.search(name) or _GATE_CLASS.search(type(module).__name__):
        return True
    parent = modules[above]
    return (
        bool(above)
        and isinstance(parent, nn.Sequential)
        and next(reversed(parent._modules), None) == name
        and _says_gate(above, parent, modules)
    )
