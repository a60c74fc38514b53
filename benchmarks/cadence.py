"""The default of `watch` on models from 200 us to 5 s a step: which interval its cost asks for, and what it costs then.

    python benchmarks/cadence.py --write docs/cadence.md
    python benchmarks/cadence.py --models "MLP of 2" LSTM

Each model trains three times on the same batches, step by step in turns: watched, bare, and bare again, which is the
error of the method. The watched one begins as `watch(model, optimizer)` does. After `--settle` steps it is given the
interval that it would come to by its own measured cost, and the times of whole intervals are summed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from overhead import lm_data, lm_loss, lm_runner, machine
from pairing import CLOCKS, Batch, Runner, interleave
from torch import Tensor, nn

import flowscope
from flowscope.schedule import LONGEST, SHORTEST, Cadence

Made = tuple[nn.Module, Callable[[nn.Module, Batch], Tensor], Iterator[Batch]]
SETTLE = 70
HEAD = (
    "| model | bare step | a sample | interval | share by its own count | ratio | A/A | every=1 would be | steps |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def noise(*shape: int, classes: int = 10) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(shape, generator=generator)
        yield x, torch.randint(0, classes, shape[:1], generator=generator)


def classifies(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp(depth: int, width: int, rows: int) -> Made:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10)), classifies, noise(rows, width)


def convnet(width: int, size: int) -> Made:
    def stage(into: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]

    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    layers = [*stage(3, width), *stage(width, width), *stage(width, width), *pooled]
    return nn.Sequential(*layers), classifies, noise(16, 3, size, size)


class Recurrent(nn.Module):
    """An LSTM whose last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Encoder(nn.Module):
    """Attention blocks over vectors, their mean is classified."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layers = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
        self.blocks, self.head = nn.TransformerEncoder(layers, depth, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(1))


def encoder(depth: int, width: int, rows: int, length: int) -> Made:
    return Encoder(depth, width), classifies, noise(rows, length, width)


def byte_lm() -> Made:
    return lm_runner("made").model, lm_loss, lm_data()


MODELS: dict[str, Callable[[], Made]] = {
    "MLP of 2 x 16, 32 rows": lambda: mlp(2, 16, 32),
    "MLP of 4 x 128, 64 rows": lambda: mlp(4, 128, 64),
    "LSTM of 32, 32 x 20": lambda: (Recurrent(), classifies, noise(32, 20, 16)),
    "MLP of 8 x 512, 128 rows": lambda: mlp(8, 512, 128),
    "CNN of 3 x 16, 16 x 32 x 32": lambda: convnet(16, 32),
    "encoder of 2 x 64, 16 x 32": lambda: encoder(2, 64, 16, 32),
    "CNN of 3 x 64, 16 x 32 x 32": lambda: convnet(64, 32),
    "decoder of 12 x 128, 8 x 64": byte_lm,
    "encoder of 4 x 512, 8 x 64": lambda: encoder(4, 512, 8, 64),
    "encoder of 12 x 512, 16 x 128": lambda: encoder(12, 512, 16, 128),
}


def row(name: str, make: Callable[[], Made], settle: int, intervals: int) -> str:
    """One line of the table."""
    data = make()[2]
    scopes: list[flowscope.Scope] = []

    def watched(runner: Runner) -> Callable[[Tensor], object]:
        scope = flowscope.watch(runner.model, runner.optimizer, config={"console": "off"})
        runner.stack.callback(scope.close)
        scopes.append(scope)
        return lambda loss: scope.step(loss=loss)

    runners = []
    for who, attach in (("bare", None), ("bare again", None), ("watched", watched)):
        torch.manual_seed(0)
        model, loss, _ = make()
        runners.append(Runner(who, model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss, attach))
    for _ in range(settle):
        batch = next(data)
        for runner in runners:
            runner.step(batch)
    count = scopes[0]._driver.count
    cost, cadence = count.pace.cost(), count._schedule
    assert cost is not None
    assert isinstance(cadence, Cadence)
    steps = [SHORTEST << k for k in range(4)]
    interval = next((each for each in steps if cost.share(each) <= cadence.budget), LONGEST)
    cadence.interval = interval
    skip = -count.step % interval
    times = interleave(runners, data, intervals * interval, warmup=skip)
    bare, again, seen = (times[who].reshape(intervals, interval).sum(1) for who in ("bare", "bare again", "watched"))
    ratio, error = float(np.median(seen / bare)), float(np.median(again / bare))
    step = float(np.median(times["bare"]))
    cells = (
        f"{1e3 * step:.2f} ms", f"{1e3 * cost.sample:.2f} ms", str(interval), f"{cost.share(interval):.2%}",
        f"{ratio:.3f}", f"{error:.3f}", f"{1 + cost.share(1):.2f}", str(intervals * interval),
    )  # fmt: skip
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[""], help="beginnings of their names; all without")
    parser.add_argument("--settle", type=int, default=SETTLE, help="steps before anything is timed")
    parser.add_argument("--intervals", type=int, default=5, help="intervals that are timed")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="wall: on a machine that nobody else uses")
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Runner.clock = staticmethod(CLOCKS[arguments.clock])
    lines = ["# How often the default samples", "", f"Written by `benchmarks/cadence.py`: {machine()}", "", HEAD]
    print("\n".join(lines), flush=True)
    for name, make in MODELS.items():
        if name.startswith(tuple(arguments.models)):
            lines.append(row(name, make, arguments.settle, arguments.intervals))
            print(lines[-1], flush=True)
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
