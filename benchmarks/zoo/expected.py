"""How many merges a plain model has, from its autograd graph: a second count that shares no code with flowscope.

An add is a merge where one operand is the other's ancestor and a layer with weights lies between: `x + f(x)`.
Projections (`g(x) + f(x)`) are none. Those on the way from another merge's x to its f(x) are counted apart: they are
inside a branch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

SAME = [
    "Alias",
    "Clone",
    "ConstantPadNd",
    "Expand",
    "Permute",
    "Reshape",
    "Roll",
    "Select",
    "Slice",
    "Split",
    "Squeeze",
    "T",
    "ToCopy",
    "Transpose",
    "Unbind",
    "UnsafeSplit",
    "UnsafeView",
    "Unsqueeze",
    "View",
    "Unfold",
    "Cat",
    "Flip",
    "Index",
]
"""What only moves values, by the beginning of the node's name."""


def kind_of(node: Any) -> str:
    """Return a node's operation, without `Backward0`."""
    return type(node).__name__.partition("Backward")[0]


def parents_of(node: Any) -> list[Any]:
    """Return the nodes that made a node's inputs."""
    return [parent for parent, _ in node.next_functions if parent is not None]


def in_order(outputs: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of a graph, each behind what made its inputs."""
    waiting = [(x.grad_fn, False) for x in outputs if x.grad_fn is not None]
    found: dict[Any, None] = {}
    entered: set[Any] = set()
    while waiting:
        node, done = waiting.pop()
        if done:
            found.setdefault(node)
        elif node not in entered:
            entered.add(node)
            waiting.append((node, True))
            waiting += [(parent, False) for parent in parents_of(node) if parent not in entered]
    return list(found)


def merges(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> tuple[int, int]:
    """Return how many identity merges lie on the way from inputs (leaves, or ids) to outputs, and more in branches."""
    leaves = {id(x) for x in inputs}
    order = in_order(outputs)
    number = {node: place for place, node in enumerate(order)}
    data: dict[Any, int] = {}  # of each node that the inputs reach, it and those before it: an integer, a bit a node
    through: dict[Any, int] = {}  # and those of them behind which a weight came in
    for node in order:
        parents = parents_of(node)
        flows = [parent for parent in parents if data.get(parent)]
        weighs = len(flows) < len(parents)
        entry = kind_of(node) == "Embedding" or id(getattr(node, "variable", None)) in leaves
        if not flows and not entry:
            data[node] = through[node] = 0
            continue
        before = behind = 0
        for parent in flows:
            before |= data[parent]
            behind |= data[parent] if weighs else through[parent]
        data[node], through[node] = before | 1 << number[node], behind
    found: list[tuple[int, int, int, int]] = []  # the add, its x, and the sets of what its x and its f(x) came from
    for node in order:
        if kind_of(node) == "Add" and len(node.next_functions) > 1:
            left, right = (unmoved(parent, data) for parent, _ in node.next_functions[:2])
            if left is None or right is None or left is right:
                continue
            for x, branch in ((left, right), (right, left)):
                if through[branch] >> number[x] & 1:
                    found.append((number[node], number[x], data[x], data[branch]))
                    break
    inner = sum(
        any(branch >> add & 1 and not carry >> add & 1 and own >> x & 1 for _, x, carry, branch in found)
        for add, _, one, other in found
        for own in [one | other]
    )
    return len(found) - inner, inner


def unmoved(node: Any, data: dict[Any, int]) -> Any:
    """Return the node whose values reach here, moved at most; None for what is made of weights alone."""
    while node is not None and data.get(node) and kind_of(node).startswith(tuple(SAME)):
        flows = [parent for parent in parents_of(node) if data.get(parent)]
        if len(flows) != 1:
            break
        (node,) = flows
    return node if node is not None and data.get(node) else None
