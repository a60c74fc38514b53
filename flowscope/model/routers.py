"""The routers of a mixture of experts, from a model's structure: by name, width and what stands beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flowscope.model.structure import Named, attribute, join, whole_number

_EXPERTS = re.compile(r"(^|_)experts$", re.IGNORECASE)
_SHARED = re.compile(r"shared|dense", re.IGNORECASE)
_ROUTER = re.compile(r"router|gate|gating|(^|_)wg$", re.IGNORECASE)
_ROUTER_CLASS = re.compile(r"router$", re.IGNORECASE)
_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
    "experts_num",
)
_CHOSEN = (
    "top_k",
    "topk",
    "k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "n_activated_experts",
    "num_selects",
)


@dataclass(frozen=True)
class Router:
    """One router.

    Attributes:
        path: module path.
        module: whose output says where tokens go.
        experts: E.
        chosen: K, used where only scores are given.
    """

    path: str
    module: nn.Module
    experts: int
    chosen: int


def find_routers(modules: Sequence[Named]) -> list[Router]:
    """Return the routers among the modules of a model, in module order.

    A router stands beside a child whose name ends in "experts" (its name says router or gate, or it is a linear layer
    with an output per expert), or its class name ends in Router.
    """
    found: dict[int, Router] = {}
    for path, module in modules:
        for name, router, experts in _beside_experts(module):
            chosen = _number((router, module, _config(module), _config(router)), _CHOSEN) or 1
            found.setdefault(id(router), Router(join(path, name), router, experts, min(chosen, experts)))
        if path and id(module) not in found and _ROUTER_CLASS.search(type(module).__name__):
            outputs = _number((module, _config(module)), _COUNTS) or _outputs(module) or 0
            if outputs > 1:
                chosen = _number((module, _config(module)), _CHOSEN) or 1
                found[id(module)] = Router(path, module, outputs, min(chosen, outputs))
    order = {id(module): at for at, (_, module) in enumerate(modules)}
    inside = tuple(f"{router.path}." for router in found.values())
    outer = [router for router in found.values() if not router.path.startswith(inside)]
    return sorted(outer, key=lambda router: order[id(router.module)])


def _beside_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The child of a mixture that routes, with the number of experts."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    for name, child in children.items():
        if not _EXPERTS.search(name) or _SHARED.search(name):
            continue
        experts = _expert_count(module, child)
        if experts is None or experts < 2:
            continue
        for other, candidate in children.items():
            if candidate is not child and _routes(other, candidate, experts):
                yield other, candidate, experts
                break


def _expert_count(mixture: nn.Module, experts: nn.Module) -> int | None:
    """How many experts a child holds: its length, or what it, the mixture or the configuration says."""
    if isinstance(experts, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        alike = {type(expert) for expert in experts.children()}
        return len(experts) if len(alike) == 1 and len(experts) > 1 else None
    return _number((experts, mixture, _config(mixture)), _COUNTS)


def _routes(name: str, module: nn.Module, experts: int) -> bool:
    if isinstance(module, nn.Linear):
        return module.out_features == experts
    return bool(_ROUTER.search(name) or _ROUTER.search(type(module).__name__)) and not _SHARED.search(name)


def _outputs(module: nn.Module) -> int | None:
    """How many outputs a router's own weight has."""
    weight: Any = module._parameters.get("weight")
    if weight is None:
        linear = next((child for child in module.modules() if isinstance(child, nn.Linear)), None)
        weight = None if linear is None else linear.weight
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _config(module: nn.Module) -> Any:
    return attribute(module, "config") or attribute(module, "cfg")


def _number(holders: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    """The first attribute of these names that is a whole number above 0."""
    for holder in holders:
        for name in names if holder is not None else ():
            value = whole_number(holder, name)
            if value is not None and value > 0:
                return value
    return None
