"""The mutation operators of DEForm (`defaultplusplus` 0.4.1, Apache-2.0), as their package applies them, unchanged.

Two mutants an operator, the lowest and the highest value of its grid; one where it has no value. A static one writes
into weights before the first step, a dynamic one wraps forwards.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.rivals.students import Student


@dataclass(frozen=True)
class Mutant:
    """One operator with its value.

    Attributes:
        name: unique; `clean` is the student as it is.
        operator: three letters, empty for the clean one.
        component: what the operator's package says it mutates.
        value: given to the operator.
    """

    name: str
    operator: str = ""
    component: str = ""
    value: Any = None

    def injector(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the package's context manager, inside of which the model is mutated."""
        from defaultplusplus.deform.operator_impls.registry import get_injector

        return get_injector(self.operator, param_value=self.value)(model)


CLEAN = Mutant("clean")


def mutants(student: Student) -> list[Mutant]:
    """Return all that the operators of the student's kind give."""
    from defaultplusplus.deform.operators import list_operators

    return [one for operator in list_operators(student.scope) for one in of(operator)]


def of(operator: Any) -> list[Mutant]:
    """Return the mutants of one operator, named such as `FSW_5.0` or `NZG`."""
    grid = operator.param_grid
    if not grid:
        return [Mutant(operator.op_id, operator.op_id, operator.component.value)]
    return [
        Mutant(f"{operator.op_id}_{value}", operator.op_id, operator.component.value, value)
        for value in dict.fromkeys((grid[0], grid[-1]))
    ]
