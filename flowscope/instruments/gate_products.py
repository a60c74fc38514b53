"""What becomes of a module's output, read from the autograd graph of one forward: nodes only, never a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowscope.torch_internals import sequence_number

LIMIT = 200_000
"""So many nodes are walked at most."""
HOPS = 8
_SAME = (
    r"(Alias|AsStrided|Clone|Contiguous|Expand|Permute|Repeat|Reshape(Alias)?|Select|Slice|Squeeze|T|ToCopy|Transpose|"
    r"UnsafeView|Unsqueeze|View)"
)
_VALUES_KEPT = re.compile(rf"^_?{_SAME}Backward\d*$")
_GATE_KEPT = re.compile(rf"^_?({_SAME}|Rsub|Upsample\w+)Backward\d*$")
"""1 - t, and a gate map brought to another size, are gates still."""
_ELEMENTWISE = re.compile(rf"^_?({_SAME}|Add|Clamp|Div|(Hards|S)igmoid|Hardtanh|Mul|Neg|Relu|Rsub|Sub)Backward\d*$")
_PRODUCT = re.compile(r"^(Mul|Lerp|Addcmul)Backward\d*$")
_SIGMOID = re.compile(r"^(Hards|S)igmoidBackward\d*$")


def is_sigmoid(x: Tensor) -> bool:
    """Whether a tensor is a sigmoid's output, reshaped or not: it lies in [0, 1] by construction."""
    return any(_SIGMOID.search(node.name()) for node in _back(x.grad_fn, _VALUES_KEPT))


@dataclass
class Uses:
    """What the outputs of a forward were made of.

    Attributes:
        multiplied: numbers of nodes whose values something else with a gradient was multiplied by.
        returned: numbers of nodes whose values are themselves outputs of the model.
        walked: whether there was a graph to walk.
    """

    multiplied: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    walked: bool = False


def uses_of(outputs: Iterable[Tensor], numbers: set[int]) -> Uses:
    """Find out how the nodes of these numbers were used on the way to the outputs.

    `x * sigmoid(x)` is an activation (swish): no product of x with something else.

    Args:
        outputs: of the model.
        numbers: sequence numbers of the nodes asked for; only nodes made since the first of them are walked.
    """
    uses, oldest = Uses(), min(numbers)
    queue: list[Any] = []
    for tensor in outputs:
        if tensor.grad_fn is not None:
            queue.append(tensor.grad_fn)
            uses.returned.update(sequence_number(n) for n in _back(tensor.grad_fn, _VALUES_KEPT))
    seen = set(queue)
    while queue and len(seen) < LIMIT:
        node = queue.pop()
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if _PRODUCT.search(node.name()) and len(parents) > 1:
            for parent in parents:
                _multiplied(parent, [other for other in parents if other is not parent], numbers, uses)
        for parent in parents:
            if parent not in seen and sequence_number(parent) >= oldest:
                seen.add(parent)
                queue.append(parent)
    uses.returned &= numbers
    uses.walked = bool(seen)
    return uses


def _multiplied(node: Any, others: list[Any], numbers: set[int], uses: Uses) -> None:
    """Note the asked-for nodes whose values `node` has, unless the other factors are what they were computed from."""
    for inner in _back(node, _GATE_KEPT):
        if sequence_number(inner) in numbers:
            made_of = list(_back(inner, _ELEMENTWISE))
            if not any(other is source for other in others for source in made_of):
                uses.multiplied.add(sequence_number(inner))


def _back(node: Any, through: re.Pattern[str]) -> Iterator[Any]:
    """Yield a node and what it was made from, while nodes have one source and names that `through` allows."""
    for _ in range(HOPS):
        if node is None:
            return
        yield node
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if len(parents) != 1 or not through.search(node.name()):
            return
        node = parents[0]
