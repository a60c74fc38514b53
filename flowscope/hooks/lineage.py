"""Depth is where data goes: which points of a flow come from which, read from the graph of a forward that is there.

Names and lists only propose. Branches that run beside each other (one a scale of a pyramid, an actor beside a critic)
are no points of one chain: what one's gradient is of another's means nothing. What goes into a module is followed back
through autograd's nodes to the nearest points, at the first sampled forward and again where shapes or calls change.
Nothing is kept alive, nothing runs. Where nothing can be told (no gradient, compiled code, a checkpoint that builds its
graph later) the structure's word counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from flowscope.hooks.calls import ENTRY, PointKey
from flowscope.model.hidden_state import floating_tensors, node_number
from flowscope.model.plan import Flow
from flowscope.records import Array
from flowscope.torch_internals import sequence_number

Place = tuple[str, int]
"""A point over all flows: the path of its module (of the first block's, for its input), and the number of the call."""
MOST_NODES = 4096
NEAREST = 8
"""So many points that an input comes from are enough: what lies behind them is known."""
MOST_SHAPES = 16


class Lineage:
    """Of every point of a model, the nearest points that what goes into it comes from; None where that is not known."""

    def __init__(self) -> None:
        self.parents: dict[Place, frozenset[Place] | None] = {}
        self._places: dict[int, list[Place]] = {}
        self._numbers: dict[Place, int] = {}
        self._shapes: dict[Place, set[tuple[int, ...]]] = {}
        self._open: set[Place] = set()
        """Those looked for in this step: further calls may come from elsewhere (a critic that sees data, and what is
        made)."""
        self._again = False
        self.version = 0
        """Grows whenever a point's parents were looked for."""

    def step_ended(self) -> None:
        """What was looked for in this step is known now."""
        self._again = False
        self._open.clear()

    def made(self, place: Place, x: Tensor) -> None:
        """A point was made: this is its node in the graph."""
        if (before := self._numbers.pop(place, None)) is not None:
            self._places[before].remove(place)
            if not self._places[before]:
                del self._places[before]
        if (number := node_number(x)) is not None:
            self._numbers[place] = number
            self._places.setdefault(number, []).append(place)

    def comes_from(self, place: Place, inputs: Any, shape: tuple[int, ...], known: frozenset[Place]) -> None:
        """Find the points that the inputs of a module come from; `known`: such as need not be looked for."""
        shapes = self._shapes.setdefault(place, set())
        if shape in shapes and not self._again and place not in self._open:
            return
        # a module that was not called before may stand between others
        self._again = self._again or not shapes
        if len(shapes) < MOST_SHAPES:
            shapes.add(shape)
        self.version += 1
        found = self._nearest(inputs)
        earlier = self.parents.get(place) if place in self._open else None
        self._open.add(place)
        self.parents[place] = earlier if found is None else found | known | (earlier or frozenset())

    def _nearest(self, inputs: Any) -> frozenset[Place] | None:
        """The nearest points behind some tensors, each path ending at its first; None where no path can be followed.

        A re-entrant checkpoint is one node: the points inside of it have none before its graph is built.
        """
        waiting = [(-sequence_number(node), id(node), node) for t in floating_tensors(inputs) if (node := t.grad_fn)]
        if not waiting:
            return None
        heapq.heapify(waiting)
        oldest, seen, found = min(self._numbers.values(), default=0), {id(node) for _, _, node in waiting}, set[Place]()
        kept = [node for _, _, node in waiting]  # an id is a node's own only while it lives
        while waiting and len(found) < NEAREST:
            number, _, node = heapq.heappop(waiting)
            if -number in self._places:
                found.update(self._places[-number])
                continue
            if len(seen) > MOST_NODES:
                return frozenset(found) or None
            if "Checkpoint" in node.name():
                return None
            for child, _ in node.next_functions:
                if child is not None and id(child) not in seen and (made := sequence_number(child)) >= oldest:
                    seen.add(id(child))
                    kept.append(child)
                    heapq.heappush(waiting, (-made, id(child), child))
        return frozenset(found)


class FlowLineage:
    """The lineage of one flow's points.

    Args:
        flow: the flow.
        lineage: of all points of the model; None for a flow whose order is that of its calls (time).
    """

    def __init__(self, flow: Flow, lineage: Lineage | None) -> None:
        self._flow, self._lineage = flow, lineage
        self._latest: Place | None = None
        self._judged: tuple[int, Sequence[PointKey], list[bool]] = (-1, (), [])
        self._arrived: set[PointKey] = set()

    def begin_pass(self) -> None:
        """No point was seen yet."""
        self._latest = None

    def entered(self, x: Tensor) -> None:
        """x_0 is seen."""
        if self._lineage is not None:
            self._latest = self._place((ENTRY, 0))
            self._lineage.made(self._latest, x)

    def returned(self, key: PointKey, inputs: Any, x: Tensor) -> bool:
        """A point is seen, made of these inputs; whether it goes on from the point seen last, as far as is known."""
        if self._lineage is None:
            return True
        place, latest = self._place(key), self._latest
        first = self._flow.outputs[key[0]] == self._flow.entry and key[1] == 0
        known = frozenset([self._place((ENTRY, 0))] if first else [])
        self._lineage.comes_from(place, inputs, tuple(x.shape), known)
        self._lineage.made(place, x)
        self._latest = place
        return latest is None or _goes_on(self._lineage.parents.get(place), latest)

    def on_chain(self, points: Sequence[PointKey]) -> list[bool]:
        """Which of the flow's points, in order, lie behind one another: the longest such row, the last of two.

        Lists none of whose members comes from another run beside each other, and lie on none. A point that was not
        called yet stays in its place.
        """
        version = -1 if self._lineage is None else self._lineage.version
        if self._judged[:2] != (version, points):
            chained = [True] * len(points) if self._lineage is None else self._judge(points, self._lineage)
            self._judged = version, points, chained
        return self._judged[2]

    def confirmed(self, points: Sequence[PointKey], on: list[bool], tracked: Array, arrived: Array) -> list[bool]:
        """The same once gradients have come: a point that comes from none may stand behind a cut, or beside a branch.

        As long as one that could get a gradient never got any while another did, the structure's word counts: what is
        missing is said of the whole.

        Args:
            points: of the flow.
            on: what `on_chain` said of them.
            tracked: [P] how often each could give a gradient.
            arrived: [P] how often one came.
        """
        if all(on) or self._lineage is None:
            return on
        self._arrived.update(point for point, came in zip(points, arrived, strict=True) if came > 0)
        alone = any(self._lineage.parents.get(self._place(point)) == frozenset() for point in points[1:])
        silent = any(could > 0 and point not in self._arrived for point, could in zip(points, tracked, strict=True))
        return [True] * len(on) if alone and silent else on

    def _judge(self, points: Sequence[PointKey], lineage: Lineage) -> list[bool]:
        places, entry = [self._place(key) for key in points], self._place((ENTRY, 0))
        called = [place for place in places if place in lineage.parents or place == entry]
        if all(_goes_on(lineage.parents.get(place), before) for before, place in pairwise(called)):
            return [True] * len(points)
        above = _above(called, lineage)
        branches = _beside(called, above, entry)
        row = _longest([place for place in called if place not in branches], above)
        return [place in row or place not in called for place in places]

    def _place(self, key: PointKey) -> Place:
        return (str(self._flow.entry), ENTRY) if key[0] == ENTRY else (self._flow.outputs[key[0]], key[1])


def _goes_on(parents: frozenset[Place] | None, before: Place) -> bool:
    return parents is None or before in parents


def _above(places: Sequence[Place], lineage: Lineage) -> dict[Place, set[Place]]:
    """Of some points in order, all of them that each comes from, directly or not."""
    above: dict[Place, set[Place]] = {}
    for at, place in enumerate(places):
        parents = lineage.parents.get(place)
        if parents is None:  # not known: it goes on from those before it
            above[place] = set(places[:at])
            continue
        reached: set[Place] = set()
        waiting = [*parents]
        while waiting:
            if (parent := waiting.pop()) not in reached:
                reached.add(parent)
                reached |= above.get(parent, set())
                waiting += () if parent in above else lineage.parents.get(parent) or ()
        above[place] = reached.intersection(places) - {place}
    return above


def _beside(places: Sequence[Place], above: dict[Place, set[Place]], entry: Place) -> set[Place]:
    """The points of containers none of whose members comes from another."""
    groups: dict[str, set[Place]] = {}
    for place in places:
        if place != entry:
            groups.setdefault(place[0].rpartition(".")[0], set()).add(place)
    alone = (group for group in groups.values() if len(group) > 1 and not any(above[p] & group for p in group))
    return set[Place]().union(*alone)


def _longest(places: Iterable[Place], above: dict[Place, set[Place]]) -> set[Place]:
    """The longest row of points of which each comes from the one before; of two the one that ends last."""
    rows: dict[Place, tuple[Place, ...]] = {}
    for place in places:
        before: tuple[Place, ...] = max((rows[p] for p in rows if p in above[place]), key=len, default=())
        rows[place] = (*before, place)
    longest: tuple[Place, ...] = max(reversed(rows.values()), key=len, default=())
    return set(longest)
