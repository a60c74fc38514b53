"""The flow through a differential equation: the gradient at the states between which a solver steps.

A solver calls its right-hand side f(t, y) at states and at stages between them; only the states are a chain. They are
told apart by the autograd graph: a solver makes every stage and the next state of the state itself (y + h * ...), so a
state is what later evaluations are made of directly, and a stage is not.

Axis letters: K states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks, in_backward
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.model.hidden_state import floating_tensors, is_compiling, node_number
from flowscope.model.plan import display_path
from flowscope.model.structure import is_time
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.records import FlowLayout
from flowscope.sums import point_metrics
from flowscope.sums.statistics import COLUMNS, Sums, head
from flowscope.torch_internals import sequence_number

SOLVED = "ODE"
"""The cell of a flow through a differential equation."""


@dataclass
class _Evaluation:
    """One call of the right-hand side: where its y stands in the graph, and the sums of y and of dL/dy."""

    number: int | None
    parents: frozenset[int]
    forward: Sums
    backward: Sums | None = None


@dataclass
class _Solve:
    calls: int = 0
    evaluations: list[_Evaluation] = field(default_factory=list)


class OdeStates(Instrument):
    """One right-hand side; its states are the points of a flow of kind "time"."""

    name = "ode_states"
    families = ("flow", "depth")

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._module, self.fuse = path, module, f"trajectory {display_path(path)}"
        self._solves: list[_Solve] = []

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One a right-hand side."""
        return [cls(path, module) for path, module in view.dynamics if path]

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at where it is evaluated."""
        self._switch, self._hooks, self._stages = hooks.switch, hooks, view.stages
        hooks.before(self._module, self.fuse, self._before, hooks.switch)

    def start_forward(self) -> None:
        """A forward of the model begins: what follows is another solve."""
        if not self._solves or self._solves[-1].calls:
            self._solves.append(_Solve())

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling() or self._switch.paused or in_backward():
            return
        given = [*args, *kwargs.values()]
        if len(given) < 2 or not is_time(given[0]):
            return
        if not self._solves:
            self._solves.append(_Solve())
        solve = self._solves[-1]
        solve.calls += 1
        if solve.calls > 1:  # as a solver does
            self._stages.add(f"{self._path}.")
        y = state_of(given[1])
        if y is None or not y.requires_grad or not torch.is_grad_enabled():
            return
        evaluation = _Evaluation(node_number(y), _parents(y), head(y.detach(), float(y.numel())))
        solve.evaluations.append(evaluation)
        slot = (self._path, len(self._solves), len(solve.evaluations))
        self._hooks.on_gradient(y, self.fuse, partial(self._deposit, evaluation), slot)

    def _deposit(self, evaluation: _Evaluation, gradient: Tensor) -> None:
        if not self._switch.paused:
            evaluation.backward = head(gradient, 1.0)

    def discard(self) -> None:
        """Forget this step's solves."""
        self._solves = []

    def take(self) -> Taken | None:
        """[K, COLUMNS], the sums at the states, None where no gradient was seen.

        Solves with as many states as the last one add up, others are left out.
        """
        solves, self._solves = self._solves, []
        tables = [table for solve in solves if (table := _table(solve.evaluations)) is not None]
        alike = [table for table in tables if table.shape == tables[-1].shape]
        return Taken(self.fuse, [torch.stack(alike).sum(0)], self._read) if alike else None

    def _read(self, out: RecordBuilder, parts: list[Array]) -> None:
        (rows,), path = parts, display_path(self._path)
        labels = [f"{path}#{k}" for k in range(len(rows))]
        out.flow(FlowLayout(path, "time", tuple(labels), tuple(labels[1:]), SOLVED))
        out.along(point_metrics.flow_metrics(rows), labels)


def state_of(y: Any) -> Tensor | None:
    """The state as the solver holds it: of several parts, cut from one tensor, that tensor."""
    if isinstance(y, Tensor):
        return y
    part = next(floating_tensors(y), None)
    return part if part is None or part._base is None else part._base


def _parents(y: Tensor) -> frozenset[int]:
    """The numbers of the graph's nodes from which y was made directly."""
    if y.grad_fn is None:
        return frozenset()
    return frozenset(sequence_number(node) for node, _ in y.grad_fn.next_functions if node is not None)


def states_of(numbers: list[int | None], parents: list[frozenset[int]]) -> list[int]:
    """Return which evaluations are at states: those from which a later evaluation's y was made directly.

    The last state of a one-stage method (Euler) has no later evaluation: where all are states, it is one, too.
    """
    later: set[int] = set()
    first: dict[int, int] = {}  # a rejected step evaluates its state again
    for index in reversed(range(len(numbers))):
        number = numbers[index]
        if number is not None and number in later:
            first[number] = index
        later |= parents[index]
    states = sorted(first.values())
    if not states or states[0] != 0:
        states.insert(0, 0)
    if len(states) > 1 and states[-1] == len(states) - 1 < len(numbers) - 1:
        states.append(len(states))
    return states


def _table(evaluations: list[_Evaluation]) -> Tensor | None:
    """[K, COLUMNS] sums at the states of one solve, None where no gradient arrived."""
    if len(evaluations) < 2 or all(evaluation.backward is None for evaluation in evaluations):
        return None
    states = states_of([e.number for e in evaluations], [e.parents for e in evaluations])
    return torch.stack([_row(evaluations[index]) for index in states])


def _row(evaluation: _Evaluation) -> Tensor:
    """[COLUMNS]: the norms of y, behind them those of dL/dy, and nothing else."""
    forward = _tensor(evaluation.forward)
    backward = torch.zeros_like(forward) if evaluation.backward is None else _tensor(evaluation.backward)
    return nn.functional.pad(torch.cat([forward, backward]), (0, COLUMNS - 2 * len(forward)))


def _tensor(sums: Sums) -> Tensor:
    return sums if isinstance(sums, Tensor) else torch.tensor(np.asarray(sums, dtype=np.float64))
