"""What a program of a published report is: a training loop, faulty or healthy, that differs in the fault only.

A loop is built by `program(faulty, seed)`. `seed` draws the weights and the data; the faulty one and its twin of the
same seed are a pair, twins of other seeds are a group.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowscope
from flowscope.sinks import JsonlSink

Loss = Callable[[nn.Module, Any], Tensor]
Build = Callable[[bool, int], "Loop"]


@dataclass
class Loop:
    """One run, ready to start.

    Attributes:
        model, optimizer, loss: what `watch` and `check` are given.
        batches: for ever.
        step: one whole step of the training, from the batch to its loss; by default the plain one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    batches: Iterator[Any]
    step: Callable[[Any], Tensor] | None = None

    def run_step(self) -> Tensor:
        """Return the loss of one more step."""
        batch = next(self.batches)
        if self.step is not None:
            return self.step(batch).detach()
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        if loss.requires_grad:
            loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class Told:
    """A published report, and the program that shows its kind.

    Attributes:
        name: of the program, in a few words.
        sources: where it was reported.
        build: the loop, from whether it is faulty and a seed; None where the kind is no monitor's affair.
        reason: why there is none.
        elsewhere: where the program stands if not here: ("trials", name) a script for `flowscope check`, ("ranks", id)
            two processes of `benchmarks.faults`.
    """

    name: str
    sources: str
    build: Build | None = None
    reason: str = ""
    elsewhere: tuple[str, str] = ("", "")


@dataclass
class Shelf:
    """The programs of one collection, in order."""

    told: dict[str, Told] = field(default_factory=dict)

    def program(self, sources: str, script: str = "") -> Callable[[Build], Build]:
        """Register a function that builds a loop, under its name; `script`: its kind for `flowscope check` alone."""

        def register(build: Build) -> Build:
            self.told[build.__name__] = Told(build.__name__, sources, build, elsewhere=("trials", script))
            return build

        return register

    def left_out(self, name: str, sources: str, reason: str) -> None:
        """Register a report that no program is built for."""
        self.told[name] = Told(name, sources, reason=reason)

    def stands(self, name: str, sources: str, where: str, id: str) -> None:
        """Register a report whose program stands elsewhere."""
        self.told[name] = Told(name, sources, elsewhere=(where, id))


CENTRES = torch.randn(5, 12, generator=torch.Generator().manual_seed(11))
"""Five classes in twelve dimensions."""


def points(seed: int, rows: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield noisy points (B, 12) about the centres, and their classes (B,)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        y = torch.randint(5, (rows,), generator=generator)
        yield CENTRES[y] + torch.randn(rows, 12, generator=generator), y


def classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def network(seed: int, *between: nn.Module, width: int = 24) -> nn.Sequential:
    """Return 12 -> width -> width -> 5 with tanh; `between` stands before the head."""
    torch.manual_seed(seed)
    layers = [nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), *between, nn.Linear(width, 5)]
    return nn.Sequential(*layers)


def adam(model: nn.Module, rate: float = 3e-3, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW over the parameters of a model."""
    return torch.optim.AdamW(model.parameters(), rate, **options)


FOLLOWS = torch.softmax(2 * torch.randn(30, 30, generator=torch.Generator().manual_seed(12)), -1)
"""Which token comes after which, of thirty."""


def walks(seed: int, rows: int = 8, length: int = 16) -> Iterator[Tensor]:
    """Yield token ids (B, T), each drawn by the one before it."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randint(30, (rows, 1), generator=generator)
        for _ in range(length - 1):
            x = torch.cat([x, torch.multinomial(FOLLOWS[x[:, -1]], 1, generator=generator)], 1)
        yield x


class Layer(nn.Module):
    """Attention and a small network, each behind a norm and added."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.drop, self.causal = nn.Dropout(dropout), causal

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1)) if self.causal else None
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class LanguageModel(nn.Module):
    """Three layers; `call` runs one, so that a program may run it another way."""

    def __init__(self, seed: int, causal: bool = True, dropout: float = 0.0, call: Any = None) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.tokens, self.places = nn.Embedding(30, 24), nn.Embedding(16, 24)
        self.layers = nn.ModuleList(Layer(causal, dropout) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 30)
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(layer, x)
        return self.head(self.norm(x))


def next_token(model: nn.Module, ids: Tensor, ahead: int = 1) -> Tensor:
    """Return the cross-entropy of the token `ahead` places on."""
    return F.cross_entropy(model(ids[:, :-ahead]).transpose(1, 2), ids[:, ahead:])


STEPS = 60


def looped(told: Told, faulty: bool, seed: int, root: Path, steps: int = STEPS) -> Path:
    """Return the folder with the records of one run at flowscope's defaults; made once."""
    folder = root / "programs" / told.name / f"{'faulty' if faulty else 'healthy'}{seed}"
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    assert told.build is not None
    loop = told.build(faulty, seed)
    with (
        warnings.catch_warnings(),
        flowscope.watch(loop.model, loop.optimizer, sinks=[JsonlSink(folder)], config={"console": "off"}) as scope,
    ):
        warnings.simplefilter("ignore")
        for _ in range(steps):
            scope.step(loss=loop.run_step())
    (folder / "done").touch()
    return folder
