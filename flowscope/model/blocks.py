"""Repeated blocks: lists, sequences and numbered attributes of alike modules; stages of them; DenseNet; recurrence."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise

from torch import nn

from flowscope.model.plan import Flow, display_path
from flowscope.model.structure import (
    LISTS,
    Named,
    children,
    family,
    has_forward,
    has_parameters,
    is_atom,
    is_block,
    is_layer_sequence,
    is_norm,
    is_parallel,
    is_part,
    is_plain_sequential,
    is_recurrent,
    is_step,
    is_towers,
    join,
    signature,
    size,
    steps_inside,
    unwrap,
    unwrapped,
    whole_number,
    widths,
)

_NUMBERED = re.compile(r"^(.*?)[_.]?\d+[a-z]?(?:[-_]\d+)?$")
_ALONE = re.compile(r"^(shared_?)?(block|layer|cell)s?$")
_ROLES = re.compile(r"(en|de)coder|generator|discriminator|actor|critic|teacher|student|online|target|query|key", re.I)


@dataclass
class Candidate:
    """Flows that belong together (a network with its stages), with what is needed to rank them."""

    flows: list[Flow]
    parameters: int
    steps: int  # layers with weights in the richest block


@dataclass
class Search:
    """Walks a model from the outside in; what lies inside a chosen block is never a flow."""

    model: nn.Module
    candidates: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def visit(self, path: str, module: nn.Module) -> None:
        """Take the flows at this module, or look inside."""
        path, module = unwrapped(path, module)
        if id(module) in self.seen:
            return  # registered twice, or a cycle
        self.seen.add(id(module))
        if is_recurrent(module):
            self.candidates.append(_time(path, module))
            return
        if is_atom(module):
            return
        name = path.rpartition(".")[2]
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and is_parallel(name):
            if len(module) > 1:
                self.notes.append(f"{display_path(path)}: side by side by its name, not one behind the other")
            return
        rest = dict(children(module))
        if isinstance(module, LISTS):
            if not is_towers(name, module) and _is_list(module) and self._take(path, _members(path, module), module):
                return
        else:
            self._lockstep(path, rest)
            self._numbered(path, rest)
        for child_name, child in rest.items():
            self.visit(join(path, child_name), child)

    def _numbered(self, path: str, rest: dict[str, nn.Module]) -> None:
        """Attributes that differ by a number only (layer1 ... layer4); takes them out of `rest`."""
        for prefix, named in _numbered(rest):
            items = [(join(path, name), child) for name, child in named]
            if self._take(join(path, prefix) if prefix else path, items, None):
                for name, _ in named:
                    del rest[name]

    def _lockstep(self, path: str, rest: dict[str, nn.Module]) -> None:
        """Sibling lists of equal length that hold the parts of one block each (XLM: attentions, norms, ffns, norms)."""
        by_length: dict[int, list[str]] = defaultdict(list)
        for name, child in rest.items():
            # entries that are None have a length, and are no children
            if isinstance(child, nn.ModuleList) and (count := sum(1 for _ in child.children())) > 1:
                by_length[count].append(name)
        for names in by_length.values():
            parts = [n for n in names if all(is_part(c) or is_norm(c) for c in rest[n].children())]
            branches = [n for n in parts if all(is_block(c) for c in rest[n].children()) and not is_parallel(n)]
            whole = any(all(is_block(c) for c in rest[n].children()) for n in names if n not in parts)
            if len(names) < 2 or not parts or not (whole or len(branches) >= 2):
                continue
            if not whole:
                if _pyramid([_members(join(path, n), rest[n]) for n in branches]):
                    beside = ", ".join(branches)
                    self.notes.append(f"{display_path(path)}: {beside} run beside each other, as their widths say")
                else:
                    self._take_parts(path, names, branches, rest)
            for name in parts:
                if whole and not is_norm(next(rest[name].children())):
                    self.notes.append(f"{display_path(join(path, name))}: a part of each block beside it")
                del rest[name]

    def _take_parts(self, path: str, names: list[str], branches: list[str], rest: dict[str, nn.Module]) -> None:
        """The flow of blocks whose parts are in sibling lists: the last norms where they close a block."""
        norms = [names[-1]] if is_norm(next(rest[names[-1]].children())) else branches
        items = [item for row in zip(*(_members(join(path, n), rest[n]) for n in norms), strict=True) for item in row]
        parts = [item for n in branches for item in _members(join(path, n), rest[n])]
        name = display_path(join(path, norms[0]))
        flow = Flow(name, "blocks", _paths(items), parts[0][0])
        self.candidates.append(Candidate([flow], _size(parts), _richest(parts) * 2))
        self.notes.append(f"{name}: a block's parts are in sibling lists ({', '.join(names)})")

    def _take(self, container: str, items: list[Named], module: nn.Module | None) -> bool:
        """Take one list of modules as stages, concatenated layers or blocks, if it is any of these."""
        ordered = module is None or isinstance(module, nn.Sequential)
        blocks = [item for item in items if _is_composition(item[1])] if ordered else items
        stages = _stages([item for item in blocks if is_block(item[1])], numbered=module is None)
        if stages:
            self._take_stages(container, stages)
            return True
        found = family(blocks, ordered=ordered)
        if not found or (module is None and any(_inner(*item) for item in found)):
            return False
        concat = _is_concat(found)
        found = found if concat else self._callable(container, found)
        if found:
            flow = _flow(container, "concat" if concat else "blocks", found)
            self.candidates.append(Candidate([flow], _size(found), _richest(found)))
        return bool(found)

    def _callable(self, container: str, found: list[Named]) -> list[Named]:
        """Lists of lists are never called: their members stand for them."""
        if any(has_forward(m) for _, m in found):
            return found
        members = [item for path, m in found for item in _members(path, m) if is_block(item[1]) or is_step(item[1])]
        if members:
            self.notes.append(
                f"{display_path(container) or 'network'}: its blocks are lists, which are never called, so the outputs "
                "of their members are the points (where the model adds them outside, these are branches, not states)"
            )
        return members

    def _take_stages(self, container: str, stages: list[list[Named]]) -> None:
        """One flow over all stages and one a stage of two blocks and more; dense blocks are a flow each."""
        kinds = [("concat" if _is_concat(stage) else "stage", stage) for stage in stages]
        chained = [item for kind, stage in kinds for item in stage if kind == "stage"]
        flows = [_flow(container, "network", chained)] if chained else []
        flows += [_flow(stage[0][0].rpartition(".")[0], kind, stage) for kind, stage in kinds if len(stage) >= 2]
        blocks = [item for stage in stages for item in stage]
        self.candidates.append(Candidate(flows, _size(blocks), _richest(blocks)))


def _flow(container: str, kind: str, items: list[Named]) -> Flow:
    """The flow through modules of a container, whose name it bears."""
    return Flow(display_path(container) or "network", kind, _paths(items), items[0][0])


def _richest(items: list[Named]) -> int:
    """How many layers with weights are in the one that has most."""
    return max(steps_inside(module) for _, module in items)


def _numbered(named: dict[str, nn.Module]) -> list[tuple[str, list[Named]]]:
    """Compositions whose names differ by a number only, by prefix; not those that stand side by side by their name."""
    groups: dict[str, list[Named]] = defaultdict(list)
    for name, child in named.items():
        match = _NUMBERED.match(name)
        if match and _is_composition(child):
            groups[match[1]].append((name, child))
    alike = ((prefix, items) for prefix, items in groups.items() if len(items) > 1)
    return [(prefix, items) for prefix, items in alike if not (is_parallel(prefix) or is_towers(prefix))]


def find_lone_blocks(model: nn.Module) -> list[Flow]:
    """For a model without any list of blocks: siblings of one class, or the one block that is called several times."""
    inside = list(_compositions("", model))
    flows = (flow for find in (_siblings, _alone) for path, module in inside if (flow := find(path, module)))
    return list(islice(flows, 1))


def _siblings(path: str, module: nn.Module) -> Flow | None:
    """Children of one class whose names give them no role of their own."""
    by_class: dict[type, list[Named]] = defaultdict(list)
    for name, child in children(module):
        if _is_composition(child) and not _ROLES.search(name) and not is_parallel(name):
            by_class[type(unwrap(child))].append((join(path, name), child))
    for kind, items in by_class.items():
        if len(items) >= 2 and not isinstance(module, LISTS) and not issubclass(kind, LISTS):
            return _flow(path, "blocks", items)
    return None


def _alone(path: str, module: nn.Module) -> Flow | None:
    """A list of one block, or a child called block, layer or cell: the trace counts how often it is called."""
    if isinstance(module, nn.ModuleList) and len(module) == 1 and not is_parallel(path):
        items = _members(path, module)[:1]
        if _is_composition(items[0][1]) and _richest(items) >= 2:
            return _flow(path, "blocks", items)
    for name, child in children(module):
        if _ALONE.match(name) and _is_composition(child) and not isinstance(unwrap(child), LISTS):
            at = join(path, name)
            kind, entry = ("time", None) if "cell" in name else ("blocks", at)
            return Flow(display_path(at), kind, (at,), entry)
    return None


def blocks_of(container: str, module: nn.Module) -> Flow | None:
    """The flow of a container the user named: each child with weights is a block, whatever its class."""
    if is_recurrent(unwrap(module)):
        return _time(container, module).flows[0]
    inside = [item for item in _members(*unwrapped(container, module)) if has_parameters(item[1])]
    return _flow(container, "concat" if _is_concat(inside) else "blocks", inside) if inside else None


def _compositions(path: str, module: nn.Module) -> Iterator[Named]:
    """The module and what is inside, outermost first, without layers."""
    path, module = unwrapped(path, module)
    level, seen = [(path, module)], {id(module)}
    while level:
        yield from level
        below = [unwrapped(join(p, name), child) for p, m in level for name, child in children(m)]
        level = [(p, m) for p, m in below if not is_atom(m) and has_parameters(m) and id(m) not in seen]
        seen.update(id(m) for _, m in level)


def _members(path: str, module: nn.Module) -> list[Named]:
    path, module = unwrapped(path, module)
    return [(join(path, name), child) for name, child in children(module)]


def _paths(items: list[Named]) -> tuple[str, ...]:
    """The paths, a shared module's first one only."""
    first = {id(m): path for path, m in reversed(items)}
    return tuple(dict.fromkeys(first[id(m)] for _, m in items))


def _size(items: list[Named]) -> int:
    return sum(size(m) for m in {id(m): m for _, m in items}.values())


def _is_list(module: nn.Module) -> bool:
    """Not a plain ModuleDict with names for keys: those are named parts or tasks."""
    if isinstance(module, nn.ModuleDict):
        return all(_NUMBERED.match(name) for name in module)
    return True


def _is_composition(module: nn.Module) -> bool:
    """A block that is not a mere sequence of layers (those are parts of a chain)."""
    return is_block(module) and not is_atom(module) and not is_layer_sequence(module)


def _time(path: str, module: nn.Module) -> Candidate:
    fused = isinstance(unwrap(module), nn.RNNBase)
    flow = Flow(display_path(path) or "network", "time", (path,), None, fused)
    return Candidate([flow], size(module), 0)


def _inner(path: str, module: nn.Module, depth: int = 2) -> list[Named]:
    """The blocks inside a stage: its own members, or those of its largest list, at most `depth` levels down."""
    path, module = unwrapped(path, module)
    if is_atom(module):
        return []
    groups = [items for _, items in _numbered(dict(children(module)))]
    if isinstance(module, LISTS):
        groups = [[(name, child) for name, child in children(module) if _is_composition(child)]]
    for items in groups:
        blocks = [(join(path, name), child) for name, child in items if has_forward(child)]
        found = family(blocks, ordered=isinstance(module, nn.Sequential)) or (blocks if len(blocks) == 1 else [])
        if found and _richest(found) >= 2:
            return found
    if not depth:
        return []
    lists = [_inner(p, m, depth - 1) for p, m in _members(path, module) if not is_parallel(p, m)]
    return max(lists, key=lambda items: (_size(items), len(items)), default=[])


def _stages(items: list[Named], *, numbered: bool) -> list[list[Named]]:
    """The blocks of each stage where the items are stages; empty where they are blocks themselves.

    Blocks of one flow repeat each other exactly (all but the first or last); stages differ in width, so the two are
    told apart by the parameter shapes. Bare containers of alike blocks are stages whatever their width.
    """
    found = [(item, _inner(*item)) for item in items]
    found = [(item, inner) for item, inner in found if inner and 10 * _size(inner) >= 3 * size(item[1])]
    if len(found) < 2 or max(len(inner) for _, inner in found) < 2 or 2 * len(found) < len(items):
        return []
    outer = [signature(m) for (_, m), _ in found]
    if len(set(outer)) < len(outer):
        bare = all(_is_bare(m) for (_, m), _ in found)
        shapes = [[signature(m) for _, m in inner] for _, inner in found]
        alike = any(len(set(s)) < len(s) for s in shapes)
        if not (bare and alike):
            return []
    elif numbered and not all(_is_bare(m) or len(inner) > 1 for (_, m), inner in found):
        return []
    return [inner for _, inner in found]


def _is_bare(module: nn.Module) -> bool:
    inner = unwrap(module)
    return is_plain_sequential(inner) or not has_forward(inner)


def _pyramid(lists: list[list[Named]]) -> bool:
    """Whether lists of layers that are run in turns cannot be one row: what one gives the next does not take."""
    parts = [module for row in zip(*lists, strict=True) for _, module in row]
    ends = [_ends(part) for part in parts if is_layer_sequence(part) or is_step(part)]
    return len(ends) == len(parts) and any(out and into and out != into for (_, out), (into, _) in pairwise(ends))


def _is_concat(items: list[Named]) -> bool:
    """Whether the layers' input width grows by what each layer adds (DenseNet)."""
    ends = [_ends(m) for _, m in items]
    if len(ends) < 2 or not all(a and b for a, b in ends):
        return False
    growth = {b[0] - a[0] for a, b in pairwise(ends)}
    return growth == {ends[0][1]} and len({out for _, out in ends}) == 1


def _ends(module: nn.Module) -> tuple[int, int]:
    """Features into the first layer and out of the last one with weights."""
    layers = [m for m in module.modules() if not m._modules and has_parameters(m)]
    steps = [m for m in layers if is_step(m)]
    if not steps:
        return 0, 0
    first = layers[0]
    return whole_number(first, "num_features") or widths(first)[0], widths(steps[-1])[1]
