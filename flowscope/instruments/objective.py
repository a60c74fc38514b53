"""What the loss is made of, read from its graph: the classes it chooses among, its shapes, which calls it compares.

A backward pass begins at the loss. When the gradient of the model's output arrives, the graph between the two is walked
once: what each operation was and the shape it returned are still known when its tensors are freed. No tensor is read.

Axis letters: B samples, C classes, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.instruments.wiring import held_by
from flowscope.metrics import Metric
from flowscope.model.hidden_state import floating_tensors, is_compiling
from flowscope.model.nested import nested_tensors
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.torch_internals import (
    SUM,
    axis_of,
    backward_under_way,
    begun_from,
    output_shape,
    reduced_by,
    sequence_number,
)

NODES = 256
"""So many operations between loss and output are looked at, at most."""

OUTPUTS = 4
"""So many tensors of what a model returns may be compared with each other."""
PARTS = 16
"""A model of more parts than this is no set of nets."""

CHOICE = ("NllLoss", "BinaryCrossEntropy")
"""Losses of a choice among classes."""
SQUASHED = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}
RESHAPED = (
    "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "ToCopy", "Alias", "Clone",
    "Select", "Slice",
)  # fmt: skip
"""Operations that only lay the same numbers out anew, or leave some out."""
PAIRED = ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "PoissonNllLoss")
"""Losses of two tensors, which torch broadcasts against each other."""
COMBINED = ("Sub", "Rsub", "Mul", "Add")
SUMMED = ("MeanBackward0", "SumBackward0")
MISFITS = ("", "sigmoid twice", "softmax twice", "a sigmoid before the softmax", "softmax along the wrong axis")
"""What `loss_misfit` counts."""
UNCOUNTED = 1 << 63
"""Nodes of leaves have no number of their own, but one above all others."""


@dataclass
class Outputs:
    """What the model, or its parts, returned in a step, by the numbers of the outputs' nodes.

    Attributes:
        widths: the size of the last axis; 1 where there is one value a sample.
        single: of one row, for how many samples it is the answer.
        starts: of those that a part made of data alone, no other part before it: the part.
    """

    widths: dict[int, int] = field(default_factory=dict)
    single: dict[int, int] = field(default_factory=dict)
    starts: dict[int, str] = field(default_factory=dict)


class Objective(Instrument):
    """The graph between the loss and the model's output, at the first backward pass of each sampled step.

    A model of several nets may never be called itself: then the outputs of its parts are its outputs.
    """

    name = "objective"
    families = ("depth", "parameters")
    metrics = (
        Metric(
            "loss_classes",
            "Classes that the loss chooses among: guessing costs the log of it. Grey: the loss is no such choice.",
            formula="width of log_softmax before nll_loss; 2 for binary_cross_entropy",
            rows="model",
            drawn=False,
        ),
        Metric(
            "loss_misfit",
            "Whether what the loss is given is not what it takes. 0: it is.",
            formula="1 sigmoid twice, 2 softmax twice, 3 sigmoid before softmax, 4 softmax along another axis",
            healthy="0",
            rows="model",
            drawn=False,
        ),
        Metric(
            "loss_broadcast",
            "Shape of what was broadcast to all pairs of samples in the loss, and the shape it was broadcast to.",
            formula="[rows, columns (0: one axis), rows, columns]",
            healthy="none",
            rows="model",
            drawn=False,
        ),
        Metric(
            "loss_compares",
            "1 where one loss compares what several calls of the model returned, as contrastive losses do.",
            bounds=(0.0, 1.0),
            rows="model",
            drawn=False,
        ),
        Metric(
            "other_losses",
            "1 where the loss is none of one net alone: a second one ran through the model for another optimizer (GAN, "
            "actor-critic), one is the sum of what several nets cost (PPO), or it is another optimizer's net's answer.",
            bounds=(0.0, 1.0),
            rows="model",
            drawn=False,
        ),
        Metric(
            "trained_through",
            "1 for a net whose loss reaches it through another net only, as a generator's does through its critic, "
            "watched or not.",
            bounds=(0.0, 1.0),
            rows="modules",
            drawn=False,
        ),
    )

    def __init__(self) -> None:
        self._outputs = Outputs()
        self._seen: ObjectiveGraph | None = None
        self._pass = -1
        self._direct: frozenset[int] = frozenset()
        """The outputs that the loss of the pass under way is made of."""
        self._through: set[str] = set()
        self._inside_loss = False
        """Whether the model returned a single number: the loss, or a part of it."""
        self._updated = self._arrived_here = self._rivals = self._inside = False

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what the root returns."""
        self._hooks = hooks
        hooks.before(view.model, self.fuse, self._enter, hooks.switch)
        hooks.after(view.model, self.fuse, self._leave, hooks.switch, always=True)
        for path, part in parts_of(view.model):
            hooks.after(part, self.fuse, partial(self._after, display_path(path)), hooks.switch)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module, args, kwargs
        self._inside = True

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._inside = False
        self._after("", module, args, kwargs, output)

    def _after(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or self._inside or self._hooks.switch.paused:
            return
        # numbers, not nodes: a forward without backward must not live longer
        found = [x for x in floating_tensors(output) if x.grad_fn is not None]
        numbers = [sequence_number(x.grad_fn) for x in found[:OUTPUTS]]
        if path and not any(x.requires_grad for x in floating_tensors((args, kwargs))):
            self._outputs.starts.update(dict.fromkeys(numbers, path))
        for x, number in zip(found, numbers, strict=False):
            if not x.dim():
                self._inside_loss = True
            elif number < UNCOUNTED:
                self._outputs.widths[number] = int(x.shape[-1]) if x.dim() > 1 else 1
                if x.shape[0] == 1 and (given := rows_of((args, kwargs))) > 1:
                    self._outputs.single[number] = given
        if numbers and numbers[0] < UNCOUNTED:
            # of several outputs any may be what the loss is made of: the first to arrive is looked at
            for x, number in zip(found, numbers, strict=False):
                arrived = partial(self._arrived, path, number)
                self._hooks.on_gradient(x, self.fuse, arrived, ("objective", number))

    def _arrived(self, path: str, number: int, gradient: Tensor) -> None:
        del gradient
        if self._hooks.switch.paused:
            return
        if self._pass != (under_way := backward_under_way()):
            self._pass, self._direct = under_way, frozenset()
            self._begins()
        if path and self._direct and number not in self._direct:
            self._through.add(path)

    def _begins(self) -> None:
        """A backward pass has arrived at the first output."""
        roots = [root.grad_fn for root in begun_from() if root.grad_fn is not None]
        if not roots:
            return
        second = self._updated and not self._hooks.switch.in_closure
        self._arrived_here = True
        self._rivals |= second
        if len(roots) == 1 and (second or self._seen is None):
            graph = read_graph(roots[0], self._outputs, self._theirs)
            self._direct, graph.inside = graph.ends, self._inside_loss
            self._rivals |= graph.several or graph.judged
            self._through |= {""} if graph.judged else set()
            self._seen = self._seen or graph

    def _theirs(self) -> set[int]:
        """The ids of what optimizers hold that are none of the model's."""
        return set[int]().union(*map(held_by, self._hooks.turns.others))

    def before_update(self, *, updating: bool) -> None:
        """A loss that comes after this in the same step is another player's."""
        self._updated |= updating

    def take(self) -> Taken:
        """No tensors: what the graph said."""
        told = partial(self._read, self._seen, self._rivals, sorted(self._through))
        self._rivals = False
        self._forget()
        return Taken(self.name, [], told)

    def drop(self) -> None:
        """What was deposited belongs to no step of ours; a backward pass among it to another model's optimizer."""
        self._rivals |= self._arrived_here
        self._forget()

    def discard(self) -> None:
        """The pass counts for nothing; the outputs of forwards under way are still awaited."""
        self._seen = None

    def _forget(self) -> None:
        self._outputs, self._seen, self._through, self._inside_loss = Outputs(), None, set(), False
        self._updated = self._arrived_here = False

    @staticmethod
    def _read(
        graph: ObjectiveGraph | None, rivals: bool, through: list[str], out: RecordBuilder, parts: list[Array]
    ) -> None:
        del parts
        if through:
            out.add("trained_through", np.ones(len(through)), through)
        if rivals:
            out.add("other_losses", np.ones(1), ("",))
        if graph is None:
            return
        # a loss that the model computes itself does not show what it is made of
        compares = float("nan") if graph.inside else float(graph.compares)
        found = {"loss_classes": graph.classes, "loss_misfit": float(graph.misfit), "loss_compares": compares}
        for name, value in found.items():
            out.add(name, np.array([value]), ("",))
        if graph.broadcast is not None:
            one, wide = ((*shape, 0)[:2] for shape in graph.broadcast)
            shape = np.array([*one, *wide], dtype=np.float64)
            out.add("loss_broadcast", shape, ("rows", "columns", "rows in the loss", "columns in the loss"))


def rows_of(given: Any) -> int:
    """How many samples a call was given: the first axis of the first tensor; 0 where there is none."""
    first = next((x for x in nested_tensors(given) if x.dim()), None)
    return 0 if first is None else int(first.shape[0])


def parts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The nets a model consists of, where they may be called in its place; none of a mere sequence of layers."""
    if isinstance(model, nn.Sequential):
        return []
    parts: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        held = isinstance(child, (nn.ModuleDict, nn.ModuleList))
        parts += [(f"{name}.{inner}", part) for inner, part in child.named_children()] if held else [(name, child)]
    return parts if len(parts) <= PARTS else []


@dataclass
class ObjectiveGraph:
    """What is between a loss and the model's output.

    Attributes:
        classes: C of the one choice among classes, NaN where there is none or several, or its cost is a sum.
        misfit: an index of `MISFITS`.
        broadcast: the shape of an operand with one value a sample, (B,) or (B, 1), and (B, B), what it became; or of
            the one row that the model answered for B samples, (1, ...), and (B, ...).
        compares: whether outputs of several calls meet before they are summed up.
        choices: C of each choice among classes.
        ends: the outputs that the loss is made of, by their nodes' numbers.
        inside: the model itself returned the loss, or a part of it.
        several: it is a sum of numbers, each made from another net's answer.
        judged: every way from the loss to the model leads past a parameter of another optimizer.
    """

    classes: float = float("nan")
    misfit: int = 0
    broadcast: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    compares: bool = False
    choices: list[int] = field(default_factory=list)
    ends: frozenset[int] = frozenset()
    inside: bool = False
    several: bool = False
    judged: bool = False


def read_graph(root: Any, outputs: Outputs, theirs: Callable[[], set[int]]) -> ObjectiveGraph:
    """Walk from the loss to the model's outputs.

    Args:
        root: the loss's node.
        outputs: what the model returned in this step; no widths where that is nothing but the loss.
        theirs: the ids of the parameters that optimizers of other models hold; asked where there are any.
    """
    ends = outputs.widths
    out = ObjectiveGraph()
    sides = Sides(outputs.starts, theirs)
    reached: dict[int, frozenset[int]] = {}
    by_direction = summed = False
    between = [*_between(root, ends)]
    about = {id(node): parents for node, parents in between}
    for node, parents in between:
        name, children = node.name(), _children(node)
        if name.startswith(CHOICE):
            summed |= reduced_by(node) == SUM or _added_up(node, about)
            out.choices.append(_classes(name, children))
            out.misfit = out.misfit or _misfit(name, children)
        if out.broadcast is None:
            out.broadcast = _broadcast(node, name, children, parents) or _one_row(
                node, name, children, parents, outputs.single
            )
        number = sequence_number(node)
        calls = frozenset([number]) if number in ends else frozenset()
        for child in children:
            below = reached.get(id(child), frozenset())
            wide = any(ends[end] > 1 and ends[end] in output_shape(child)[-2:] for end in below)
            met = bool(calls) and bool(below - calls) and wide and len(output_shape(child)) > 1
            out.compares |= met and (output_shape(node) != () or name.startswith(PAIRED))
            calls |= below
        by_direction |= "Norm" in name and any(ends[end] > 1 for end in calls)
        reached[id(node)] = calls
        sides.pass_by(node, children, number if number in ends else None, reached)
    out.several, out.judged = sides.several(root), bool(reached[id(root)]) and not sides.free(root)
    # each output against a fixed one, by their directions, and several of them in one loss
    out.ends = reached[id(root)]
    out.compares |= by_direction and len(out.ends) > 1
    if len(out.choices) == 1 and not summed:  # a sum's level is that of guessing times its terms
        out.classes = float(out.choices[0])
    return out


class Sides:
    """Whose answer a loss is: what comes together on its way from the outputs up.

    Args:
        starts: as in `Outputs`.
        theirs: as in `read_graph`.
    """

    def __init__(self, starts: Mapping[int, str], theirs: Callable[[], set[int]]) -> None:
        self._starts, self._theirs = starts, theirs
        self._known: set[int] | None = None
        self._nets: dict[int, frozenset[str]] = {}
        """By node, the nets of their own below it."""
        self._met = False
        self._free: set[int] = set()
        """The nodes that an output reaches past no foreign parameter."""
        self._foreign: set[int] = set()
        """Those that were computed with one."""

    def pass_by(self, node: Any, children: list[Any], end: int | None, reached: Mapping[int, frozenset[int]]) -> None:
        """The next node, behind all that it was made of; `end`: its number where it is an output of the model."""
        below = [found for child in children if (found := self._nets.get(id(child)))]
        own = [frozenset([self._starts[end]])] if end is not None and end in self._starts else []
        nets = frozenset[str]().union(*below, *own)
        self._met |= len(nets) > max(map(len, [*below, *own]), default=0) and len(output_shape(node)) > 1
        self._nets[id(node)] = nets
        if end is not None:
            self._free.add(id(node))
            return
        if any(self._is_foreign(child, reached) for child in children):
            self._foreign.add(id(node))
        elif any(id(child) in self._free for child in children):
            self._free.add(id(node))

    def _is_foreign(self, child: Any, reached: Mapping[int, frozenset[int]]) -> bool:
        """Whether a child is a foreign parameter, or was made of one and of no output."""
        leaf = getattr(child, "variable", None)
        if leaf is None:
            return id(child) in self._foreign and not reached.get(id(child))
        if self._known is None:
            self._known = self._theirs()
        return id(leaf) in self._known

    def several(self, root: Any) -> bool:
        """Whether several nets were summed up which met nowhere before each was a number (a sample)."""
        return len(self._nets[id(root)]) > 1 and not self._met

    def free(self, root: Any) -> bool:
        """Whether an output reaches the loss past no foreign parameter."""
        return id(root) in self._free


def _between(root: Any, ends: dict[int, int]) -> Iterator[tuple[Any, list[Any]]]:
    """The nodes from the outputs up to the loss, each behind what it was made of, with the nodes made of it.

    What is older than the first output leads to none of them.
    """
    oldest = min(ends, default=0)
    parents: dict[int, list[Any]] = {id(root): []}
    found, waiting = [root], [root]
    while waiting and len(found) < NODES:
        node = waiting.pop()
        if sequence_number(node) in ends:
            continue
        for child in _children(node):
            if child is None or not oldest <= sequence_number(child) < UNCOUNTED:
                continue
            if id(child) not in parents:
                parents[id(child)] = []
                found.append(child)
                waiting.append(child)
            parents[id(child)].append(node)
    # an operation is younger than what it was made of
    found.sort(key=sequence_number)
    return ((node, parents[id(node)]) for node in found)


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions]


def _same_numbers(node: Any) -> Any:
    """What a node's numbers were before they were laid out anew."""
    for _ in range(8):
        if node is None or not node.name().startswith(RESHAPED):
            break
        node = _children(node)[0]
    return node


def _classes(name: str, children: list[Any]) -> int:
    """C of a choice: the class axis of nll_loss is the second ([B, C], [B, C, H, W]), or the only one."""
    if not name.startswith("NllLoss"):
        return 2
    shape = output_shape(children[0]) if children and children[0] is not None else ()
    return shape[1] if len(shape) > 1 else shape[0] if shape else 2


def _misfit(name: str, children: list[Any]) -> int:
    """An index of `MISFITS`: what a choice among classes is given and does not take."""
    given = children[0] if children else None
    if given is None:
        return 0
    if name.startswith("BinaryCrossEntropyWithLogits"):
        return 1 if _same_numbers(given).name() in SQUASHED else 0
    if not name.startswith("NllLoss"):
        return 0
    axis, shape, inner = axis_of(given), output_shape(given), _same_numbers(given)
    if given.name() == "LogSoftmaxBackward0" and axis is not None and len(shape) > 1 and axis % len(shape) != 1:
        return 4
    if inner is None or inner.name() != "LogSoftmaxBackward0":
        return 0
    before = _same_numbers(_children(inner)[0])
    squashed = None if before is None else SQUASHED.get(before.name())
    return {None: 0, "softmax": 2, "sigmoid": 3}[squashed]


def _broadcast(
    node: Any, name: str, children: list[Any], parents: list[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """One value a sample that became one a pair of samples, and not on purpose (an axis put in: `x[:, None]`)."""
    shape = output_shape(node)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
        return None
    single = {(shape[0],), (shape[0], 1)}
    made = [child for child in children if child is not None]
    small = [child for child in made if output_shape(child) in single]
    if not small or len(small) < len(made):
        return None
    if name.startswith("Expand"):
        # torch's own losses broadcast what they are given before they compare it
        meant = not any(parent.name().startswith(PAIRED) for parent in parents)
    else:
        meant = not name.startswith(COMBINED) or any(child.name().startswith("Unsqueeze") for child in small)
        meant |= name.startswith("Mul") and not any(_summed(parent) for parent in parents)
        alike = len(small) == 2 and output_shape(small[0]) == output_shape(small[1])
        meant |= alike
    return None if meant else (output_shape(small[0]), shape)


def _one_row(
    node: Any, name: str, children: list[Any], parents: list[Any], single: Mapping[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """One answer for all samples that is compared with a target of each."""
    if not single or not (name.startswith(("Sub", "Rsub", "Expand", *PAIRED))):
        return None
    shape = output_shape(node)
    if name.startswith("Expand") and not any(parent.name().startswith(PAIRED) for parent in parents):
        return None  # on purpose
    for child in children:
        inner = _same_numbers(child)
        samples = 0 if inner is None else single.get(sequence_number(inner), 0)
        one: tuple[int, ...] = () if child is None else output_shape(child)
        if samples > 1 and one[:1] == (1,) and len(one) == len(shape) and shape[0] == samples:
            return one, shape
    return None


def _added_up(node: Any, parents: Mapping[int, list[Any]]) -> bool:
    """Whether the terms of a choice are added up along some of their axes and not divided by how many they were."""
    while len(above := parents.get(id(node), [])) == 1:
        node = above[0]
        if node.name().startswith("SumBackward") and output_shape(node):
            return not any(parent.name().startswith(("Div", "Mul")) for parent in parents.get(id(node), ()))
    return False


def _summed(node: Any) -> bool:
    return node.name() in SUMMED or node.name().startswith("Neg")
