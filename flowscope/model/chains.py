"""Plain chains: layers one behind the other, without repeated blocks.

A point is the output of a layer with weights after the normalisation and the activation that follow it directly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import nn

from flowscope.model.plan import Flow, display_path
from flowscope.model.structure import (
    Named,
    attribute,
    children,
    is_activation,
    is_atom,
    is_dynamics,
    is_embedding,
    is_norm,
    is_parallel,
    is_plain_sequential,
    is_step,
    is_towers,
    join,
    unwrap,
    widths,
)

_PROJECTED = re.compile(r"(^|[._])(q|k|v|query|key|value|queries|keys|values)([._](proj|lin|linear))?$")


@dataclass
class _Leaf:
    path: str
    module: nn.Module
    parent: str  # path of the outermost plain Sequential around it, else of its parent
    ordered: bool  # whether that parent is a Sequential, so that registration order is execution order
    tower: str  # path of the network around it where several stand side by side


@dataclass
class _Chain:
    points: list[str] = field(default_factory=list)
    steps: list[_Leaf] = field(default_factory=list)


def find_chains(modules: Sequence[Named], path: str, module: nn.Module) -> tuple[list[Flow], list[str]]:
    """Return the chains of at least two layers in a module, longest first where names collide, and notes.

    Args:
        modules: all of the model.
        path: of the module in it.
        module: where to look.
    """
    leaves = list(_leaves(module, path, None, {}, (), ""))
    # a solver evaluates its right-hand side at states and stages, which are no chain (instruments/ode.py)
    inside = tuple(f"{at}." for at, module in modules if at and is_dynamics(module))
    outside = [leaf for leaf in leaves if not leaf.path.startswith(inside)]
    apart = bool(inside) and any(len(chain.points) > 1 for chain in _split(outside)[0])
    leaves = outside if apart else leaves
    chains, skipped = _split(leaves)
    notes = [
        f"{display_path(at[:-1])}: forward(t, y) is taken for a solver's right-hand side" for at in inside if apart
    ]
    notes += [f"{display_path(p)} is beside the chain (its input is that of the layer before it)" for p in skipped]
    total = sum(len(chain.steps) for chain in chains) + len(skipped)
    flows: dict[str, Flow] = {}
    for chain in sorted(chains, key=lambda c: -len(c.points)):
        if len(chain.points) < 2:
            continue
        whole = len(chain.steps) == total and not path
        name = "network" if whole else display_path(_common_parent([s.path for s in chain.steps])) or "network"
        outputs = tuple(dict.fromkeys(chain.points))
        if name in flows:
            notes.append(f"a second chain in {name} ({outputs[0]} ... {outputs[-1]}) was not taken")
        else:
            flows[name] = Flow(name, "chain", outputs)
    order = {leaf.path: i for i, leaf in enumerate(leaves)}
    return sorted(flows.values(), key=lambda f: order.get(f.outputs[0], 0)), notes


def _leaves(
    module: nn.Module, path: str, sequence: str | None, first: dict[int, str], above: tuple[nn.Module, ...], tower: str
) -> Iterator[_Leaf]:
    """All layers in registration order, parallel lists left out, the first path of a shared layer for each call."""
    inner = unwrap(module)
    if is_atom(inner):
        parent = sequence if sequence is not None else path.rpartition(".")[0]
        yield _Leaf(first.setdefault(id(module), path), module, parent, sequence is not None, tower)
        return
    if not is_plain_sequential(inner):
        sequence = None
    elif sequence is None:
        sequence = path
    for name, child in children(module):
        beside = isinstance(child, nn.ModuleList | nn.ModuleDict) and is_parallel(name)
        if not beside and not any(child is m for m in above):
            at = join(path, name)
            inside = at if is_towers(path.rpartition(".")[2], inner) else tower
            yield from _leaves(child, at, sequence, first, (*above, module), inside)


def _split(leaves: list[_Leaf]) -> tuple[list[_Chain], list[str]]:
    """Cut the layers into chains where widths say that one does not feed the next."""
    calls = Counter(id(leaf.module) for leaf in leaves)
    chains, skipped = [_Chain()], []
    embeddings = sum(is_embedding(leaf.module) for leaf in leaves)
    open_step: _Leaf | None = None  # the step whose point may still move to its norm or activation
    for leaf in leaves:
        current, module = chains[-1], leaf.module
        if is_step(module):
            place = _place(current.steps[-1], leaf) if current.steps else "next"
            open_step = None if place == "beside" else leaf
            if place == "beside":
                skipped.append(leaf.path)
            elif place == "apart":
                chains.append(_Chain([leaf.path], [leaf]))
            else:
                current.points.append(leaf.path)
                current.steps.append(leaf)
        elif is_embedding(module):
            if leaf.ordered and embeddings == 1 and not current.points:
                current.points.append(leaf.path)
        elif open_step is not None and (is_norm(module) or is_activation(module)):
            if calls[id(module)] == 1 and _follows(open_step, leaf):
                current.points[-1] = leaf.path
            if is_activation(module):
                open_step = None
    return chains, skipped


def _place(last: _Leaf, leaf: _Leaf) -> str:
    """Whether a layer is fed by the last one ("next"), shares its input ("beside") or starts anew ("apart")."""
    if leaf.ordered and last.parent == leaf.parent:
        return "next"
    if last.tower != leaf.tower:
        return "apart"
    if all(_PROJECTED.search(x.path) for x in (last, leaf)):
        return "beside"
    (last_in, out), (into, _) = widths(last.module), widths(leaf.module)
    if not out or not into or out == into:
        return "next"
    if attribute(unwrap(last.module), "out_channels") is not None and into % out == 0:
        return "next"  # flattened before a linear layer, or skip features concatenated
    return "beside" if into == last_in else "apart"


def _follows(step: _Leaf, leaf: _Leaf) -> bool:
    """Whether a norm or activation is known to be applied to the step: in a Sequential, or by number (fc1, act1)."""
    if leaf.ordered and leaf.parent == step.parent:
        return True
    a, b = (re.search(r"\d+$", x.path) for x in (step, leaf))
    same_parent = step.path.rpartition(".")[0] == leaf.path.rpartition(".")[0]
    return bool(same_parent and a and b and a[0] == b[0])


def _common_parent(paths: list[str]) -> str:
    levels = zip(*(path.split(".")[:-1] for path in paths), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
