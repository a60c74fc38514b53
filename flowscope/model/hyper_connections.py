"""The hyper-connections of known packages, recognised by class, without importing the package.

hyper-connections (PyPI, 0.4), the mHC modules of transformers (DeepSeek-V4, GLM-5, Hunyuan-V4) and of Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from flowscope.model.plan import Flow, display_path
from flowscope.model.structure import Named, whole_number

_CLASSES = {
    ("hyper_connections.hyper_connections", "HyperConnections"): "dynamic",
    ("hyper_connections.manifold_constrained_hyper_connections", "ManifoldConstrainedHyperConnections"): "manifold",
    ("megatron.core.transformer.hyper_connection", "HyperConnectionModule"): "packed",
}
_COUNTS = {"returned": "hc_mult", "carried": "hc_mult", "packed": "n"}
"""Names of the number of streams, of those that give their coefficients back."""
_SINKHORN = ("sinkhorn_knopps", "log_domain_sinkhorn_knopps")


@dataclass(frozen=True)
class KnownConnection:
    """One merge site.

    Attributes:
        path: module path.
        module: of the package.
        kind: "dynamic" and "manifold" (hyper-connections); "returned" (transformers: it gives its coefficients back),
            "carried" (it gives the branch's weights back; the streams are carried on as they are); "packed" (Megatron:
            it gives its coefficients back, and the streams are one axis with the features).
        streams: how many.
    """

    path: str
    module: nn.Module
    kind: str
    streams: int


def find_hyper_connections(modules: Iterable[Named]) -> list[KnownConnection]:
    """Return the connections of known packages in module order.

    Not those with several fractions or input views, or with a constraint of the user's own on the residual mapping:
    their coefficients are no S x S matrix, or code we must not run a second time.
    """
    found = []
    for path, module in modules:
        kind = _kind(module)
        streams = whole_number(module, _COUNTS.get(kind, "num_residual_streams")) if kind else None
        if streams is not None and streams > 1 and (kind in _COUNTS or _plain(module)):
            found.append(KnownConnection(path, module, kind, streams))
    return found


def _kind(module: nn.Module) -> str:
    for base in type(module).__mro__:
        if (kind := _CLASSES.get((base.__module__, base.__name__))) is not None:
            return kind
        if base.__module__.startswith("transformers.models.") and base.__name__.endswith("HyperConnection"):
            return "carried" if base.__name__.startswith("HYV4") else "returned"
    return ""


def _plain(module: nn.Module) -> bool:
    if getattr(module, "num_fracs", None) != 1 or getattr(module, "num_input_views", None) != 1:
        return False
    constraint = getattr(module, "residual_mix_constraint_fn", None)
    return constraint is None or getattr(getattr(constraint, "func", None), "__name__", "") in _SINKHORN


def by_flow(found: Iterable[KnownConnection], flows: Sequence[Flow]) -> list[tuple[str, list[KnownConnection]]]:
    """Sort connections by the watched flow whose blocks they are or stand in: (its name, connections in order).

    Those in no watched flow are named after the list that holds them. A flow keeps one number of streams: that of its
    first connection.
    """
    own = {path: f.name for f in sorted(flows, key=lambda f: f.kind != "network") for path in f.outputs}
    groups: dict[str, list[KnownConnection]] = {}
    for connection in found:
        parts = connection.path.split(".")
        above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        held = next((own[path] for path in above if path in own), None)
        numbered = next((n for n in range(len(parts) - 1, 0, -1) if parts[n].isdigit()), len(parts) - 1)
        name = held or display_path(".".join(parts[:numbered])) or display_path(connection.path)
        group = groups.setdefault(name, [])
        if not group or group[0].streams == connection.streams:
            group.append(connection)
    return list(groups.items())
