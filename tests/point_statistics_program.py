"""A stranger's statistics, and one step of each of two ranks with them: `python point_statistics_program.py FOLDER`.

Axis letters: P points.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from own_instruments import ThirdMoment
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from watch_models import Stack, data, loss_of, sgd, watched

from flowscope.instruments import PointStatistic


class Kurtosis(PointStatistic):
    name, scale, columns = "my_kurtosis", "log", 3
    words = "Fourth moment over the squared second. Normal: 3; with outlier features: 100 and more."

    def sums(self, x: Tensor) -> Tensor:
        square = x.double() ** 2
        return torch.stack([torch.full_like(square.sum(), x.numel()), square.sum(), (square * square).sum()])

    def values(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return rows[:, 0] * rows[:, 2] / rows[:, 1] ** 2


class GradientMoment(PointStatistic):
    name, columns, gradient_powers = "grad_abs_mean", 1, (1, 0)
    words = "Mean magnitude of the entries of dL/dx."

    def sums(self, x: Tensor) -> Tensor:
        return x.new_ones(1)

    def gradient_sums(self, gradient: Tensor) -> Tensor:
        total = gradient.abs().sum()
        return torch.stack([total, torch.full_like(total, gradient.numel())])

    def values(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return rows[:, 1] / rows[:, 2]


OWN = (Kurtosis, GradientMoment, ThirdMoment)
NAMES = (*(kind.name for kind in OWN), "act_rms")


def kurtosis_of(*states: Tensor) -> float:
    entries = torch.cat([x.flatten() for x in states]).double().numpy()
    return float(np.mean(entries**4) / np.mean(entries**2) ** 2)


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, NDArray[np.float64]]:
    optimizer = sgd(model)
    with watched(model, optimizer, instruments=OWN) as scope:
        loss_of(model, batch).backward()
        optimizer.step()
    return {name: scope.records[0][name] for name in NAMES}


def model() -> Stack:
    torch.manual_seed(0)
    return Stack()


def two_halves() -> dict[str, NDArray[np.float64]]:
    """One process on the whole batch."""
    return step(model(), data(batch=6))


def main(folder: str) -> None:
    rank = int(os.environ["RANK"])
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    x, y = data(batch=6)
    half = slice(3 * rank, 3 * rank + 3)
    np.savez(Path(folder) / f"{rank}.npz", **step(DistributedDataParallel(model()), (x[half], y[half])))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
