"""From answers to counts: harmful mutants that each column finds and places, and clean runs in which it speaks."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.rivals import harm
from benchmarks.rivals.answers import Answer
from benchmarks.rivals.columns import CLEAN_SEEDS, COLUMNS
from benchmarks.rivals.components import component, labelled, written
from benchmarks.rivals.mutants import CLEAN, Mutant
from benchmarks.rivals.students import Student, beginner

OWN = "the operators' own diagnoser"


@dataclass
class Score:
    """One column over one student.

    Attributes:
        told: the answer on each harmful mutant.
        named: the component each answer names.
        truth: of each, what the operators' package says it mutates, and what it in fact changes.
        clean: the answers on clean runs.
    """

    told: dict[str, Answer] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    truth: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    clean: list[Answer] = field(default_factory=list)

    @property
    def found(self) -> int:
        return sum(answer.found for answer in self.told.values())

    @property
    def as_labelled(self) -> int:
        """How many components are the one the package says."""
        return sum(self.named[name] == label for name, (label, _) in self.truth.items())

    @property
    def as_written(self) -> int:
        """How many components are one that the operator changes."""
        return sum(self.named[name] in changed for name, (_, changed) in self.truth.items())

    @property
    def false(self) -> int:
        return sum(answer.found for answer in self.clean)


def names(column: str, answer: Answer) -> str:
    """Return the component an answer names."""
    if not answer.found:
        return ""
    return labelled(answer.where) if column == OWN else component(answer.where, answer.metric, answer.phase)


def truths(student: Student, mutants: list[Mutant]) -> dict[str, tuple[str, set[str]]]:
    """Return of each mutant what it is said to change and what it does change."""
    return {one.name: (labelled(one.component), written(one, beginner(student, 0))) for one in mutants}


def harmful(student: Student) -> list[Mutant]:
    """Return the mutants that count."""
    return [mutant for mutant, verdict in harm.verdicts(student).items() if verdict == "harmful"]


def score(student: Student, column: str, mutants: list[Mutant], truth: dict[str, tuple[str, set[str]]]) -> Score:
    """Ask one column about everything."""
    ask = COLUMNS[column](student)
    told = {mutant.name: ask(mutant, 0) for mutant in mutants}
    named = {name: names(column, answer) for name, answer in told.items()}
    return Score(told, named, truth, [ask(CLEAN, seed) for seed in CLEAN_SEEDS])
