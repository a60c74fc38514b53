"""Where each block stands in its flow: what a connection must know when it is made."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ConnectionContext, NormKind
from flowscope.merging.interception import BlockRule
from flowscope.model.hidden_state import feature_axis
from flowscope.model.sites import BlockSites, Key, SitePlan


def servable(plan: SitePlan, rule: type[Connection]) -> SitePlan:
    """Return the plan without the blocks a rule cannot serve."""
    return without(plan, {block.key: reason for block in plan.blocks if (reason := rule.refusal(block))})


def without(plan: SitePlan, refused: dict[Key, str]) -> SitePlan:
    """Return the plan without some carries of blocks; streams end before each and begin anew after it."""
    kept = []
    for number, block in enumerate(plan.blocks):
        before = plan.blocks[number - 1].key in refused if number else True
        after = plan.blocks[number + 1].key in refused if number + 1 < len(plan.blocks) else True
        if block.key not in refused:
            kept.append(replace(block, first=block.first or before, last=block.last or after))
    told = dict.fromkeys((path, reason) for (path, _), reason in refused.items())
    return SitePlan(tuple(kept), (*plan.refused, *told), plan.traced)


def stretches(plan: SitePlan) -> Iterator[list[BlockSites]]:
    """Yield the consecutive blocks between which streams travel, two and more."""
    stretch: list[BlockSites] = []
    for block in plan.blocks:
        stretch = [block] if block.first else [*stretch, block]
        if block.last and len(stretch) > 1:
            yield stretch


def stretch_places(plan: SitePlan) -> dict[Key, tuple[int, int]]:
    """Return how many sites are before each block since streams were expanded, and in all until they are reduced."""
    places: dict[Key, tuple[int, int]] = {}
    stretch: list[BlockSites] = []
    for block in plan.blocks:
        stretch = [block] if block.first else [*stretch, block]
        counts = [len(one.traced.sites) for one in stretch]
        places |= {one.key: (sum(counts[:number]), sum(counts)) for number, one in enumerate(stretch)}
    return places


def block_rule(model: nn.Module, block: BlockSites, expands: bool) -> BlockRule:
    """Return how the woven block finds its sites.

    Raises:
        FlowscopeError: both names the connection could be registered under are taken.
    """
    module = model.get_submodule(block.path)
    names = [f"{name}{block.lane + 1 if block.lane else ''}" for name in ("connection", "flow_connection")]
    child = next((name for name in names if not hasattr(module, name)), None)
    if child is None:
        raise FlowscopeError(f"wrap: {block.path} already has attributes {' and '.join(names)}.")
    traced = block.traced
    rules = tuple(site.rule for site in traced.sites)
    deferred = rules[0].fresh and (expands or traced.argument is None)
    position, name = (-1, "") if traced.argument is None else argument_place(module, traced.argument)
    return BlockRule(
        rules=rules,
        position=position,
        name=name,
        output=traced.output,
        child=child,
        taggable=block.taggable,
        deferred=deferred,
        dims=0 if not expands or deferred else len(block.shape) + (not block.first),
        path=block.path,
    )


def argument_place(block: nn.Module, argument: int | str) -> tuple[int, str]:
    """Return position and name of the argument in which the carried x comes in; -1 where it has no position."""
    names = list(inspect.signature(block.forward).parameters)
    if isinstance(argument, str):
        return (names.index(argument) if argument in names else -1), argument
    return argument, names[argument] if argument < len(names) else ""


def contexts(model: nn.Module, plan: SitePlan) -> Iterator[tuple[BlockSites, ConnectionContext]]:
    """Yield each block with where it stands in its flow."""
    blocks: Counter[str] = Counter()
    sites: Counter[str] = Counter()
    for block in plan.blocks:  # a shared block is a layer at each of its calls
        blocks[block.flow] += block.calls
        sites[block.flow] += block.calls * len(block.traced.sites)
    roles = {flow: "encoder" if "encoder" in flow.lower() else "decoder" for flow in blocks}
    seen: Counter[str] = Counter()
    offset: Counter[str] = Counter()
    places = stretch_places(plan)
    for block in plan.blocks:
        module, flow, traced = model.get_submodule(block.path), block.flow, block.traced.sites
        axis = feature_axis(module, block.shape)
        place = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
        yield (
            block,
            ConnectionContext(
                features=block.shape[axis],
                sites=len(traced),
                block=seen[flow],
                blocks=blocks[flow],
                first=block.first,
                last=block.last,
                calls=block.calls,
                offset=offset[flow],
                total_sites=sites[flow],
                behind=places[block.key][0],
                between=places[block.key][1],
                feature_axis=axis,
                norm_kinds=tuple(cast(NormKind, site.norm) for site in traced),
                outer_norms=tuple(module.get_submodule(s.outer_norm) if s.outer_norm else None for s in traced),
                overwritten=block.traced.overwritten,
                role=cast(Any, roles[flow]),
                other_blocks=sum(n for other, n in blocks.items() if roles[other] != roles[flow]),
                dtype=place.dtype,
                device=place.device,
            ),
        )
        seen[flow] += block.calls
        offset[flow] += block.calls * len(traced)
