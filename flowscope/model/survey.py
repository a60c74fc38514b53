"""Who merges in a model, whatever its structure: the whole model is followed in one run, as one block.

Structure finds repeated blocks. A loop that adds what its children return (`for attn, ff in layers: x = attn(x) + x`)
adds in the module around them; a model inside a stage, or beside its main stream, is no list of its own. Here each add
that joins a carry with what a branch made of it tells the modules that were under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn

from flowscope.model.example_inputs import Call, fresh, untouched
from flowscope.model.tracing import BlockTrace

Stack = tuple[str, ...]
"""Paths of the modules under way at an add, outermost first."""

MOST = 30_000
"""Operations that are followed; a set of ancestors is as many bits, and every tensor is kept meanwhile."""


def who_adds(model: nn.Module, run: nn.Module, call: Call) -> list[Stack]:
    """Return where each merge with an identity shortcut is made in one run of a model, or of the part of it `run`."""
    root = next((path for path, module in model.named_modules() if module is run), "")
    args, kwargs = fresh(call)
    with untouched(model), BlockTrace(run, args, kwargs, most=MOST) as trace:
        run(*args, **kwargs)
    stacks = [add.modules for add in trace.meetings.adds if add.kind == "identity"]
    return [(root, *(f"{root}.{name}" if root else name for name in stack)) for stack in stacks]


def further_blocks(
    model: nn.Module, adds: Sequence[Stack], found: Collection[str], tried: Collection[str]
) -> list[str]:
    """Return the modules to look at as blocks: the innermost that add, those tried before left out.

    None inside a block that has sites (its inner merges are its branches' own, also where a shared module is called
    from elsewhere too), none that holds such a block. Of two inside one another the one that adds more often. A class
    that merges once in a model that has blocks is incidental.

    Args:
        model: of the paths.
        adds: from `who_adds`.
        found: blocks with sites.
        tried: what has been looked at.
    """
    count: Counter[str] = Counter()
    inside = {id(module) for path in found for module in model.get_submodule(path).modules()}
    for stack in adds:
        owner = next((path for path in reversed(stack) if path not in tried), None)
        if owner is None or any(id(model.get_submodule(path)) in inside for path in stack):
            continue
        if any(holds([owner], block) for block in found):
            continue
        count[owner] += 1
    kinds: Counter[type] = Counter()
    for path, times in count.items():
        kinds[type(model.get_submodule(path))] += times
    chosen: list[str] = []
    for path, times in count.items():
        inner = sum(n for other, n in count.items() if other != path and holds([path], other))
        outer = max((n for other, n in count.items() if other != path and holds([other], path)), default=0)
        alone = kinds[type(model.get_submodule(path))] < 2 and bool(found)
        if inner <= times and outer < sum(n for other, n in count.items() if holds([path], other)) and not alone:
            chosen.append(path)
    return [path for path in chosen if not any(holds([other], path) for other in chosen if other != path)]


def inner_blocks(sites: Collection[str], missed: Collection[str]) -> list[str]:
    """Return the modules to look at in place of the block around them, none where it adds itself.

    A block whose outputs are mixed of several carries (two scales that exchange their class tokens) shows one of them
    alone; where each merge is made in a module of its own, these are the blocks.

    Args:
        sites: modules, inside the block, of its sites.
        missed: modules of the merges that are on no carry found.
    """
    owners = {*sites, *missed}
    if not missed or "" in owners:
        return []
    return [path for path in dict.fromkeys((*sites, *missed)) if not holds(owners - {path}, path)]


def holds(blocks: Collection[str], path: str) -> bool:
    """Whether a path is one of some modules, or inside one."""
    return any(not block or path == block or path.startswith(f"{block}.") for block in blocks)
