"""The routers of a mixture of experts, from a model's structure: by name, width and what stands beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flowscope.model.structure import Named, attribute, join, whole_number
from flowscope.model.zero import whole_shape
from flowscope.torch_internals import world_size

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
        part: path of the experts where this process holds some of them and other processes the rest, else empty.
    """

    path: str
    module: nn.Module
    experts: int
    chosen: int
    part: str = ""


def find_routers(modules: Sequence[Named]) -> list[Router]:
    """Return the routers among the modules of a model, in module order.

    A router stands beside a child whose name ends in "experts" (its name says router or gate, or it is a linear layer
    with an output per expert), or its class name ends in Router.
    """
    found: dict[int, Router] = {}
    for path, module in modules:
        for name, router, experts, part in _beside_experts(module):
            chosen = _number((router, module, _config(module), _config(router)), _CHOSEN) or 1
            held = join(path, part) if part else ""
            found.setdefault(id(router), Router(join(path, name), router, experts, min(chosen, experts), held))
        if path and id(module) not in found and _ROUTER_CLASS.search(type(module).__name__):
            outputs = _number((module, _config(module)), _COUNTS) or _outputs(module) or 0
            if outputs > 1:
                chosen = _number((module, _config(module)), _CHOSEN) or 1
                found[id(module)] = Router(path, module, outputs, min(chosen, outputs))
    order = {id(module): at for at, (_, module) in enumerate(modules)}
    inside = tuple(f"{router.path}." for router in found.values())
    outer = [router for router in found.values() if not router.path.startswith(inside)]
    return sorted(outer, key=lambda router: order[id(router.module)])


def _beside_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module, int, str]]:
    """The child of a mixture that routes, the number of experts, and the child that holds a part of them, else ""."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    for name, child in children.items():
        if not _EXPERTS.search(name) or _SHARED.search(name):
            continue
        here, counts = _expert_counts(module, child)
        routing = ((*found, experts) for experts in counts for found in children.items() if found[1] is not child)
        for other, candidate, experts in routing:
            if _routes(other, candidate, experts, counts):
                yield other, candidate, experts, name if here < experts else ""
                break


def _expert_counts(mixture: nn.Module, experts: nn.Module) -> tuple[int, list[int]]:
    """How many experts a child holds, and how many there may be in all: most likely first, empty where it has none.

    What it holds is its length, or what it, the mixture or the configuration says. Of many processes each may hold as
    many.
    """
    said = _number((experts, mixture, _config(mixture)), _COUNTS)
    if isinstance(experts, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        held = [*experts.children()]
        if len({type(expert) for expert in held}) != 1 or len(experts) < 2:
            return 0, []
        here, counts = len(held), [len(experts)]
    else:
        shapes = [p.shape for p in experts._parameters.values() if p is not None and p.dim() == 3]
        here, counts = min((shape[0] for shape in shapes), default=said or 0), [said] if said and said > 1 else []
        if world_size() == 1 or not counts or counts[0] % max(here, 1):
            return said or 0, counts
    parts = [parts * here for parts in range(2, world_size() + 1) if world_size() % parts == 0]
    return here, [*counts, *(count for count in parts if count not in counts)]


def _routes(name: str, module: nn.Module, experts: int, counts: Sequence[int]) -> bool:
    """Whether a child is the router of so many experts, of those that there may be."""
    named = bool(_ROUTER.search(name) or _ROUTER.search(type(module).__name__)) and not _SHARED.search(name)
    likely = experts == counts[0]
    if isinstance(module, nn.Linear):
        return module.out_features == experts and (named or likely)
    return named and (_outputs(module) == experts or (likely and _outputs(module) not in counts))


def _outputs(module: nn.Module) -> int | None:
    """How many outputs a router's own weight has."""
    weight: Any = module._parameters.get("weight")
    if weight is None:
        linear = next((child for child in module.modules() if isinstance(child, nn.Linear)), None)
        weight = None if linear is None else linear.weight
    return int(whole_shape(weight)[0]) if isinstance(weight, Tensor) and len(whole_shape(weight)) == 2 else None


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
