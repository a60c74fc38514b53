"""Where a mixture of experts sends its tokens: the load of each expert and how sure the router is.

A router is recognised by what it gives, never by one library's class: indices of the chosen experts, a mask of them, or
a score per expert.

Axis letters: N tokens, E experts, K experts chosen for a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.discovery.plan import display_path
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.hooks import Hooks, Switch
from flowscope.probes.payload import local
from flowscope.probes.statistics import full_precision

Array = NDArray[np.float64]

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
TOLERANCE = 1e-2
"""Scores that are nowhere negative and add up to 1 within this (bf16 rounds to 4e-3) are probabilities."""


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


def find_routers(model: nn.Module) -> list[Router]:
    """Return the routers of a model, in module order, from its structure alone.

    A router stands beside a child whose name ends in "experts" (its name says router or gate, or it is a linear layer
    with an output per expert), or its class name ends in Router.
    """
    found: dict[int, Router] = {}
    for path, module in model.named_modules():
        for name, router, experts in _beside_experts(module):
            chosen = _number((router, module, _config(module), _config(router)), _CHOSEN) or 1
            where = f"{path}.{name}" if path else name
            found.setdefault(id(router), Router(where, router, experts, min(chosen, experts)))
        if path and id(module) not in found and _ROUTER_CLASS.search(type(module).__name__):
            outputs = _number((module, _config(module)), _COUNTS) or _outputs(module) or 0
            if outputs > 1:
                chosen = _number((module, _config(module)), _CHOSEN) or 1
                found[id(module)] = Router(path, module, outputs, min(chosen, outputs))
    order = {id(module): at for at, module in enumerate(model.modules())}
    outer = [r for r in found.values() if not any(_inside(r, other) for other in found.values())]
    return sorted(outer, key=lambda router: order[id(router.module)])


def _inside(router: Router, other: Router) -> bool:
    return router.path.startswith(other.path + ".")


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
    return getattr(module, "config", None) or getattr(module, "cfg", None)


def _number(holders: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    """The first attribute of these names that is a whole number above 0."""
    for holder in holders:
        for name in names if holder is not None else ():
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


class RoutingObserver:
    """The routers of a model: loads and entropies, added up over the training forwards of a step.

    Counted in the forward, as indices carry no gradient: a recomputed forward counts twice, which changes no ratio.
    """

    PART = "routing"
    HEAD = 2
    """Sum of the tokens' entropies, tokens; then the load of each expert."""

    def __init__(self, routers: list[Router], switch: Switch, hooks: Hooks) -> None:
        self._switch, self._routers = switch, routers
        self.labels = [display_path(router.path) for router in routers]
        self.buffer = DepositBuffer(self.HEAD + max(router.experts for router in routers))
        for row, router in enumerate(routers):
            self.buffer.new_row()
            hooks.after(router.module, self.PART, partial(self._after, row, router), switch)

    def _after(self, row: int, router: Router, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del args, kwargs
        if self._switch.paused or not module.training or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            sums = route_sums(output, router.experts, router.chosen)
        if sums is not None:
            self.buffer.add(row, 0, sums)

    def metrics(self, sums: Array) -> dict[str, Array]:
        """The metrics of `route_metrics`, one entry a router; NaN where no token was seen."""
        out = {name: np.full(len(self._routers), np.nan) for name in METRICS}
        for row, router in enumerate(self._routers):
            if row < len(sums):
                values = route_metrics(sums[row], router.experts)
                for name, value in zip(METRICS, values, strict=True):
                    out[name][row] = value
        return out


METRICS = ("route_entropy", "route_max_violation", "route_dead", "route_load")


def route_metrics(sums: Array, experts: int) -> tuple[float, float, float, float]:
    """Return mean entropy / log E, largest load / mean load - 1, share of experts without a token, mean load."""
    entropy, tokens = sums[:2]
    load = sums[2 : 2 + experts]
    certain = float(entropy / tokens / np.log(experts)) if tokens > 0 else float("nan")
    if not load.sum() > 0:
        return certain, float("nan"), float("nan"), float("nan")
    return certain, float(load.max() / load.mean() - 1.0), float((load == 0).mean()), float(load.mean())


def route_sums(output: Any, experts: int, chosen: int) -> Tensor | None:
    """Return [2 + E]: sum of the tokens' entropies, tokens that have one, load of each expert.

    An integer tensor is the choice: a mask where its last axis is E (and K is not), else indices. A floating tensor
    whose last axis is E is a score per expert: probabilities where its rows are, else logits; of two, the one that is
    negative somewhere. Without a choice, the K best scores of a token are it. Nothing is read on the host.

    Args:
        output: what a router returned.
        experts: E.
        chosen: K.
    """
    tensors = [local(tensor) for tensor in _tensors(output)]
    whole = [t for t in tensors if not t.is_floating_point() and not t.is_complex() and t.dim() and t.numel()]
    scores = [t for t in tensors if t.is_floating_point() and t.dim() and t.shape[-1] == experts and t.numel()]
    choice = next((t for t in whole if t.shape[-1] in (experts, chosen)), whole[0] if whole else None)
    if choice is None and not scores:
        return None
    reference = choice if choice is not None else scores[0]
    with full_precision(reference):
        logits = _logits(scores) if scores else None
        entropy = _entropy(logits) if logits is not None else reference.new_zeros(2, dtype=torch.float32)
        if choice is None:
            assert logits is not None
            choice = logits.topk(chosen, dim=-1).indices
        return torch.cat([entropy, _load(choice, experts, chosen)])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


def _logits(scores: list[Tensor]) -> Tensor:
    """[N, E] fp32 of the scores to read, the last of two only where the first is nowhere negative."""
    first = scores[0].detach().float().flatten(0, -2)
    alike = [t for t in scores[1:] if t.numel() == scores[0].numel()]
    if not alike:
        return first
    return torch.where((first < 0).any(), first, alike[0].detach().float().reshape(first.shape))


def _entropy(scores: Tensor) -> Tensor:
    """Return [2]: sum over tokens of the entropy of each, and how many have one."""
    total = scores.sum(-1, keepdim=True)
    given = ((scores >= 0).all() & ((total - 1.0).abs() < TOLERANCE).all()) & torch.ones_like(total, dtype=torch.bool)
    chance = torch.where(given, scores / total, scores.softmax(-1))
    entropy = torch.special.entr(chance).sum(-1)
    finite = entropy.isfinite()
    return torch.stack([torch.where(finite, entropy, 0.0).sum(), finite.sum().to(entropy.dtype)])


def _load(choice: Tensor, experts: int, chosen: int) -> Tensor:
    """Return [E]: how many tokens each expert gets."""
    if choice.shape[-1] == experts and chosen != experts:
        return choice.detach().reshape(-1, experts).float().sum(0)
    index = choice.detach().reshape(-1).long()
    # an index that is no expert (padding, another rank's) goes to a place of its own
    index = torch.where((index >= 0) & (index < experts), index, experts)
    ones = torch.ones(index.shape, dtype=torch.float32, device=index.device)
    counted = torch.zeros(experts + 1, dtype=torch.float32, device=index.device)
    return counted.scatter_add(0, index, ones)[:experts]
