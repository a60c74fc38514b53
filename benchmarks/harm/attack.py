"""What a family of attacks is given, and what it says."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import ModuleType

from benchmarks.harm import families

Score = tuple[int, int]
"""How many cases were tried, and how many of them held."""


@dataclass(frozen=True)
class Plan:
    """How much is tried, and with which numbers.

    Attributes:
        seed: of everything that is drawn.
        share: of the cases of a full run, in (0, 1].
        random: what draws; each family has its own, so that it draws the same alone and among others.
    """

    seed: int
    share: float = 1.0
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        """Begin the drawing."""
        object.__setattr__(self, "random", Random(self.seed))

    def count(self, full: int) -> int:
        """How many of the `full` cases of a row are tried, at least one."""
        return max(1, round(full * self.share))

    def some(self, cases: list[str]) -> list[str]:
        """The named cases that are tried, in their order: all, or so many of them as the share says."""
        chosen = set(self.random.sample(range(len(cases)), self.count(len(cases))))
        return [case for number, case in enumerate(cases) if number in chosen]


@dataclass(frozen=True)
class Outcome:
    """Whether one promise held in one case.

    Attributes:
        row: of the table in docs/promises.md.
        case: what was tried, enough to try it again with the seed.
        held: whether the promise held.
        note: what was seen where it did not.
    """

    row: str
    case: str
    held: bool
    note: str = ""


@dataclass(frozen=True)
class Family:
    """One file of `families/`.

    Attributes:
        name: of the file.
        promise: its first line.
        attacks: what tries.
        first: row -> its score before anything was mended.
    """

    name: str
    promise: str
    attacks: Callable[[Plan], Iterator[Outcome]]
    first: Mapping[str, Score] = field(hash=False)

    def tried(self, seed: int, share: float) -> Iterator[Outcome]:
        """All outcomes; that the family itself breaks is one that did not hold."""
        try:
            yield from self.attacks(Plan(seed, share))
        except Exception as error:
            yield Outcome(f"{self.name}: the attacks run to their end", "", False, f"{type(error).__name__}: {error}")


def found_families() -> list[Family]:
    """The families, by name."""
    names = sorted(found.name for found in pkgutil.iter_modules(families.__path__))
    return [_family(name, importlib.import_module(f"{families.__name__}.{name}")) for name in names]


def _family(name: str, module: ModuleType) -> Family:
    return Family(name, (module.__doc__ or "").partition("\n")[0], module.attacks, module.FIRST)
