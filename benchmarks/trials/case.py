"""What a case is: a program built faulty or healthy, and what is to be said of the faulty one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Program:
    """What `flowscope.check` is given."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    batches: list[Any]
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Case:
    """A seeded fault.

    Args:
        name: what is wrong, in a few words.
        trials: the trials that may tell it, the best first.
        where: pattern of the finding's place.
        says: pattern of its sentence (what is wrong, where no module is to be named).
        least: the weakest verdict that tells it: a note where the practice is legitimate at times.
        build: the program, from whether it is faulty; none for a script.
        script: its file's name, run with `--faulty` or without.
    """

    name: str
    trials: tuple[str, ...]
    where: str = ""
    says: str = ""
    least: str = "fail"
    build: Callable[[bool], Program] | None = None
    script: str = ""


CASES: dict[str, Case] = {}


def case(
    *trials: str, where: str = "", says: str = "", least: str = "fail"
) -> Callable[[Callable[[bool], Program]], Callable[[bool], Program]]:
    """Register a function that builds a program, under its name."""

    def register(build: Callable[[bool], Program]) -> Callable[[bool], Program]:
        CASES[build.__name__] = Case(build.__name__, trials, where, says, least, build)
        return build

    return register


def script(name: str, *trials: str, where: str = "", says: str = "", least: str = "fail") -> None:
    """Register a script of the same name."""
    CASES[name] = Case(name, trials, where, says, least, script=f"{name}.py")


def draws(make: Callable[[torch.Generator], Any], count: int = 4, seed: int = 1) -> list[Any]:
    """Return batches, each drawn from one generator."""

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield make(generator)

    stream = batches()
    return [next(stream) for _ in range(count)]


def tokens(generator: torch.Generator, rows: int = 4, length: int = 12, vocabulary: int = 32, low: int = 2) -> Tensor:
    """Return (B, T) ids: a walk in which each token tends to follow its predecessor by one."""
    x = torch.randint(low, vocabulary, (rows, length), generator=generator)
    follows = torch.rand(rows, length, generator=generator) < 0.6
    for t in range(1, length):
        x[:, t] = torch.where(follows[:, t], (x[:, t - 1] - low + 1) % (vocabulary - low) + low, x[:, t])
    return x


def padded(ids: Tensor, generator: torch.Generator, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids padded on the right to differing lengths, and the mask (1 where a token stands)."""
    lengths = torch.randint(ids.size(1) // 2, ids.size(1), (ids.size(0),), generator=generator)
    lengths[0] = ids.size(1)
    mask = torch.arange(ids.size(1))[None] < lengths[:, None]
    return ids.masked_fill(~mask, pad), mask.long()
