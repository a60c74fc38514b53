"""Gradients that are exactly 0 on purpose: of what a step did not use, and of terms of the loss that are weighted by 0.

Code that is healthy makes such zeros: `loss + 0 * p.sum()` for what a step leaves out (DDP wants a gradient of each
parameter), an expert without tokens, an auxiliary loss that is switched on later. Who had nothing but zeros in a few
records is asked for two things: whether its module ran on anything in the step, and how the loss leads to it. No number
of the graph is read; they are freed by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import floating_tensors, is_compiling
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.torch_internals import (
    backward_under_way,
    begun_from,
    is_compiled,
    nodes_below,
    output_shape,
    sequence_number,
)

ASKED_AFTER = 3
"""Records with nothing but zeros: a start from zero (LoRA, ReZero) has left it by then."""
LOOKS = 3
"""In so many steps the graph of the loss is walked, again where more parameters are asked about."""
NODES = 4096
"""A graph of more operations is not walked."""
GATES = ("Relu", "Threshold", "Hardtanh", "Clamp", "Where", "MaskedFill")
"""Operations that may themselves make a gradient of exactly 0."""
PRODUCTS = ("MulBackward", "DotBackward", "MvBackward")
"""What multiplies several losses that were stacked by their weights."""


class Zeros(Instrument):
    """What is known of parameters that never had a gradient other than exactly 0; stands behind what reads norms."""

    name = "zero_gradients"
    metrics = (
        Metric(
            "param_idle",
            "Of parameters whose gradient was exactly 0 so far: 1 where their module did not run in the step, or on no "
            "rows.",
            view="Parameters",
            rows="parameters",
            drawn=False,
        ),
        Metric(
            "param_zero_weight",
            "Of these: 1 where they are in terms only that the loss multiplies by 0, 2 where it has a term without "
            "graph beside.",
            view="Parameters",
            rows="parameters",
            drawn=False,
        ),
    )

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing is asked before there were zeros."""
        self._parameters, self._hooks, self._tree = view.parameters, hooks, view.tree
        self._zeros = np.zeros(0)
        """By number: so many records had a gradient of exactly 0 and none another; -1 once there was another."""
        self._asked: dict[int, tuple[Used, list[Any]]] = {}
        """By number: what its module did in this step, and the hooks that tell."""
        self._looks, self._pass, self._walked = 0, -1, False
        self._led = Led(frozenset(), frozenset(), False)

    def begin_step(self) -> None:
        """Ask about those with zeros only, and about the others no more."""
        self._walked = False
        for i in [i for i in self._asked if self._zeros[i] < 0]:
            self._hooks.remove(*self._asked.pop(i)[1])
        for used, _ in self._asked.values():
            used.rows = False
        new = [int(i) for i in np.flatnonzero(self._zeros >= ASKED_AFTER) if i not in self._asked]
        compiled = [path for path, module in self._tree.modules if is_compiled(module)] if new else []
        for i in new:
            parameter, path = self._parameters.at(i), self._parameters.path(i)
            if parameter is None or any(f"{path}.".startswith(f"{c}.") or not c for c in compiled):
                continue
            used, switch = Used(), self._hooks.switch
            handles = [self._hooks.after(self._parameters.holder(i), self.fuse, used.ran, switch)]
            if parameter.is_leaf and parameter.requires_grad:
                handles.append(self._hooks.before_accumulation(parameter, self.fuse, self._arrived, switch))
            self._asked[i], self._looks = (used, handles), 0

    def _arrived(self, gradient: Tensor) -> None:
        """A gradient comes to one of those: look once in a backward pass."""
        del gradient
        task = backward_under_way()
        if self._hooks.switch.paused or is_compiling() or task in (-1, self._pass) or self._looks >= LOOKS:
            return
        self._pass, self._walked = task, True
        leaves = {id(p): i for i in self._asked if (p := self._parameters.at(i)) is not None}
        alive = {id(self._parameters.at(int(i))) for i in np.flatnonzero(self._zeros < 0)}
        led = leads([root.grad_fn for root in begun_from() if root.grad_fn is not None], leaves, alive)
        free, bare = self._led.free | {leaves[leaf] for leaf in led.free}, self._led.bare or led.bare
        self._led = Led(free, self._led.weighted | {leaves[leaf] for leaf in led.weighted}, bare)

    def take(self) -> Taken:
        """No tensors."""
        self._looks += self._walked
        weight = {i: 0.0 if i in self._led.free else 1.0 + self._led.bare for i in self._led.free | self._led.weighted}
        idle = {i: float(not used.rows) for i, (used, _) in self._asked.items()}
        return Taken(self.name, [], partial(self._read, idle, weight))

    def _read(self, idle: dict[int, float], weight: dict[int, float], out: RecordBuilder, parts: list[Array]) -> None:
        del parts
        names, norms = out.entries("param_grad_norm")
        known = np.zeros(len(norms))
        known[: len(self._zeros)] = self._zeros[: len(norms)]
        self._zeros = np.where(norms > 0, -1.0, np.where((norms == 0) & (known >= 0), known + 1, known))
        for name, found in (("param_idle", idle), ("param_zero_weight", weight)):
            if told := {i: value for i, value in found.items() if i < len(norms) and self._zeros[i] >= 0}:
                values = np.full(len(norms), np.nan)
                values[[*told]] = [*told.values()]
                out.add(name, values, names)


class Used:
    """Whether a module returned something to learn from in this step."""

    def __init__(self) -> None:
        self.rows = False

    def ran(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """It ran. What is in no tensor of its output is not known, and counts as something."""
        del module, args, kwargs
        if not is_compiling():
            found = floating_tensors(output)
            self.rows |= not found or any(x.numel() > 0 and x.requires_grad for x in found)


class Led(NamedTuple):
    """How a loss leads to some leaves.

    Attributes:
        free: those with a way that is not known to be weighted by 0.
        weighted: those all of whose ways lead through a term that is.
        bare: a term of the loss has no graph.
    """

    free: frozenset[int]
    weighted: frozenset[int]
    bare: bool


def leads(roots: Iterable[Any], leaves: Collection[int], alive: Collection[int] = ()) -> Led:
    """Walk from the loss to leaves whose gradients are all exactly 0.

    A number times a constant is a weight. It is 0 where such a leaf lies below it with nothing in between that may
    itself make zeros; and where the whole loss is such a product, and none but such leaves are below it. It is not
    where a leaf that learns can do so through it only.

    Args:
        roots: nodes of the loss.
        leaves: ids of the leaves.
        alive: ids of leaves that have had another gradient.
    """
    roots = [*roots]
    # an operation is younger than what it was made of; leaves have a number above all others
    nodes = sorted(nodes_below(roots, NODES), key=sequence_number)
    if len(nodes) >= NODES:
        return Led(frozenset(), frozenset(), False)
    variables = {id(node): id(node.variable) for node in nodes if hasattr(node, "variable")}
    asked = {node: leaf for node, leaf in variables.items() if leaf in leaves}
    plain = _above(nodes, asked, _gate)
    zero = {number for node in nodes for number in _weighted(node) if number in plain}
    if len(asked) == len(variables):
        zero |= {id(node) for root in roots for node in _product(root) if _weight(node)}
    free = _below(roots, zero)
    while refuted := _above(nodes, [n for n, leaf in variables.items() if leaf in alive and n not in free]) & zero:
        # the nearest to the loss: those below may be 0 for all that
        met = {*map(id, roots), *(id(child) for node in free.values() for child, _ in node.next_functions)}
        zero -= refuted & met
        free = _below(roots, zero)
    bare = any(
        node.name().startswith(("AddBackward", "SubBackward")) and node.next_functions[0][0] is None and _one(node)
        for node in free.values()
    )
    reached = frozenset(leaf for node, leaf in asked.items() if node in free)
    return Led(reached, frozenset(asked.values()) - reached, bare)


def _above(nodes: Iterable[Any], below: Iterable[int], but: Callable[[Any], bool] = lambda node: False) -> set[int]:
    """The ids of nodes that lead to some of them past none of a kind; `nodes` from the oldest on."""
    found = {*below}
    for node in nodes:
        if any(id(child) in found for child, _ in node.next_functions) and not but(node):
            found.add(id(node))
    return found


def _below(roots: Iterable[Any], but: Collection[int]) -> dict[int, Any]:
    """The nodes below some, by their ids, without what only those in `but` lead to."""
    waiting = [root for root in roots if id(root) not in but]
    found = {id(root): root for root in waiting}
    while waiting:
        for child, _ in waiting.pop().next_functions:
            if child is not None and id(child) not in found and id(child) not in but:
                found[id(child)] = child
                waiting.append(child)
    return found


def _one(node: Any) -> bool:
    return int(np.prod(output_shape(node))) == 1


def _constant(node: Any) -> bool:
    """Whether a node is a product with something that has no graph."""
    return node.name().startswith("MulBackward") and any(child is None for child, _ in node.next_functions)


def _weight(node: Any) -> bool:
    return _constant(node) and _one(node)


def _weighted(node: Any) -> list[int]:
    """The ids of what is a single number with a weight: a product, or one of several that lie in one tensor."""
    if _weight(node):
        return [id(node)]
    if not node.name().startswith(PRODUCTS):
        return []
    stacks = [child for child, _ in node.next_functions if child is not None and child.name().startswith("Stack")]
    constant = len(node.next_functions) > len(stacks) == 1
    return [id(child) for stack in stacks for child, _ in stack.next_functions if constant and child and _one(child)]


def _gate(node: Any) -> bool:
    return node.name().startswith(GATES) or 0 in output_shape(node) or (_constant(node) and not _one(node))


def _product(root: Any) -> Iterable[Any]:
    """The operations from the loss on down, as long as each is made of one thing and is a single number."""
    node = root
    while node is not None and _one(node):
        yield node
        children = [child for child, _ in node.next_functions if child is not None]
        node = children[0] if len(children) == 1 else None
