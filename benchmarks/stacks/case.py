"""What a stack's training is asked: hooks of our own count optimizer steps and the gradient at one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

ROWS, D, K = 32, 8, 3
CLOSE = 1e-4
COLUMNS = ("works", "steps", "loss", "gradient", "false alarms")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(D, D), nn.ModuleList(Block() for _ in range(3)), nn.Linear(D, K)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, D), torch.randint(0, K, (ROWS,))


def batches(size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = data()
    for at in range(0, ROWS, size):
        yield x[at : at + size], y[at : at + size]


loss_of = nn.functional.cross_entropy


@dataclass
class Seen:
    """What our own hooks saw.

    Attributes:
        steps: of which optimizers count as the end of a step.
        norms: per step, the norm of the gradient at the place.
    """

    optimizers: Callable[[Any], bool] = lambda optimizer: True
    steps: int = 0
    norms: list[float] = field(default_factory=list)
    under_way: float = 0.0
    place: str = ""

    def stepped(self, optimizer: Any = None, *_: Any) -> None:
        if self.optimizers(optimizer):
            self.steps += 1
            self.norms.append(math.sqrt(self.under_way))
            self.under_way = 0.0

    def look(self, module: nn.Module, place: str) -> None:
        """Watch the output of a module, whose path is `place` in the records."""
        self.place = place

        def arrived(gradient: Tensor) -> None:
            self.under_way += float(gradient.double().square().sum())

        def forward(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(arrived)

        module.register_forward_hook(forward)


@contextmanager
def counted(seen: Seen) -> Iterator[Seen]:
    handle = register_optimizer_step_post_hook(seen.stepped)
    try:
        yield seen
    finally:
        handle.remove()


def judge(scope: Any, seen: Seen) -> dict[str, str]:
    """A row of the table: works, steps, loss, gradient, false alarms."""
    records = scope.records
    given = sum(record.loss is not None for record in records)
    alarms = sorted({alert.kind for alert in scope.alerts if alert.severity != "info"})
    found = (
        "yes" if records else "no record",
        "yes" if len(records) == seen.steps else f"{len(records)} of {seen.steps}",
        "yes" if given == len(records) else f"{given} of {len(records)}",
        _gradient(records, seen),
        ", ".join(alarms) or "none",
    )
    return dict(zip(COLUMNS, found, strict=True))


def _gradient(records: list[Any], seen: Seen) -> str:
    worst, compared = 0.0, 0
    for record in records:
        for key in record.metrics:
            labels = [*record.labels(key)] if key.partition("@")[0] == "grad_norm" else []
            if seen.place in labels and record.step < len(seen.norms):
                value, own = float(record[key][labels.index(seen.place)]), seen.norms[record.step]
                if own > 0:
                    compared += 1
                    worst = max(worst, abs(value - own) / own) if value == value else math.inf
    if not seen.place:
        return "not compared"
    return "not seen" if not compared else "yes" if worst < CLOSE else f"off by {worst:.1g}"
