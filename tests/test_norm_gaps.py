"""`norm_gap` against means and variances that the test takes from whole batches with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watch_models import close_to, watched

from flowscope.instruments.batch_norm import ENTRIES, NormProbe, norm_gap, some_of
from flowscope.model.structure import keeps_statistics
from flowscope.records import Record
from flowscope.torch_internals import batch_statistics_of

SHAPES = {1: (7,), 2: (5, 6), 3: (3, 4, 2)}
CHANNELS = 6


class Net(nn.Module):
    """A convolution, a norm, and what is left of it: `seen` keeps what the norm got."""

    def __init__(self, dims: int, **options: Any) -> None:
        super().__init__()
        conv: type[nn.Module] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm: type[nn.Module] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.conv, self.bn = conv(3, CHANNELS, 1), norm(CHANNELS, **options)
        self.head = nn.Linear(CHANNELS, 2)
        self.seen: list[np.ndarray] = []
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        self.seen.append(h.detach().movedim(1, -1).reshape(-1, CHANNELS).double().numpy())
        y = checkpoint(self.bn, h, use_reentrant=False) if self.checkpointed else self.bn(h)
        return self.head(torch.relu(y).flatten(2).mean(2))


def batch(dims: int, seed: int, size: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 + torch.randn(size, 3, *SHAPES[dims], generator=generator)


def train(model: Net, steps: int, sizes: tuple[int, ...] = (9,), lr: float = 0.0) -> list[Record]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scope = watched(model, optimizer)
    dims = model.conv.weight.dim() - 2
    for k in range(steps):
        optimizer.zero_grad()
        for j, size in enumerate(sizes):
            model(batch(dims, 10 * k + j, size)).square().mean().backward()
        optimizer.step()
    scope.close()
    return scope.records


def naive(batches: list[np.ndarray], running: tuple[np.ndarray, np.ndarray], eps: float) -> float:
    mean = np.mean([b.mean(0) for b in batches], axis=0)
    variance = np.mean([b.var(0, ddof=1) for b in batches], axis=0)
    s, r = np.sqrt(variance + eps), np.sqrt(running[1] + eps)
    return float(np.median(np.abs(running[0] - mean) / s + np.abs(np.log(r) - np.log(s))))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_gap_of_two_micro_batches_is_the_naive_one(dims: int) -> None:
    torch.manual_seed(dims)
    model = Net(dims, momentum=0.3)
    (record,) = train(model, 1, sizes=(9, 4))
    running = model.bn.running_mean.double().numpy(), model.bn.running_var.double().numpy()
    close_to(record["norm_gap"], [naive(model.seen, running, model.bn.eps)], rtol=1e-5)
    assert record.labels("norm_gap") == ["bn"]


def test_batches_are_averaged_over_records() -> None:
    torch.manual_seed(4)
    model = Net(2, momentum=0.0)
    records = train(model, 4)
    at_start = np.zeros(CHANNELS), np.ones(CHANNELS)
    for k in (1, 2, 3, 4):
        close_to(records[k - 1]["norm_gap"], [naive(model.seen[:k], at_start, model.bn.eps)], rtol=1e-5)


def test_running_statistics_that_follow_come_close_and_those_that_do_not_stay_away() -> None:
    final = {}
    for momentum in (0.1, 0.0):
        torch.manual_seed(5)
        records = train(Net(2, momentum=momentum), 60)
        final[momentum] = float(records[-1]["norm_gap"][0])
        assert float(records[0]["norm_gap"][0]) > 1
    assert final[0.1] < 0.2
    assert final[0.0] > 1


def test_only_training_counts() -> None:
    torch.manual_seed(6)
    model = Net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scope = watched(model, optimizer)
    with torch.no_grad():
        model(100 * batch(1, 0))
    model.seen.clear()
    model(batch(1, 1)).sum().backward()
    optimizer.step()
    running = model.bn.running_mean.double().numpy(), model.bn.running_var.double().numpy()
    close_to(scope.records[0]["norm_gap"], [naive(model.seen, running, model.bn.eps)], rtol=1e-5)
    model.bn.eval()
    model(batch(1, 2)).sum().backward()
    optimizer.step()
    assert "norm_gap" not in scope.records[1]


def test_a_checkpointed_module_counts_its_batch_as_before() -> None:
    gaps = []
    for checkpointed in (False, True):
        torch.manual_seed(7)
        model = Net(2, momentum=0.0)
        model.checkpointed = checkpointed
        gaps.append(train(model, 1)[0]["norm_gap"])
    close_to(gaps[1], gaps[0], rtol=1e-6)


def test_large_inputs_are_sampled_evenly() -> None:
    for shape in [(64, 3, 70, 50), (9000, 2), (2, 3, 1, 30000), (3, 4, 5)]:
        x = torch.arange(float(np.prod(shape))).reshape(shape)
        some = some_of(x)
        count, whole = some.numel() // shape[1], x.numel() // shape[1]
        assert some.shape[1] == shape[1]
        assert whole == count if whole <= ENTRIES else ENTRIES / 2 <= count <= ENTRIES
        assert some.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_which_modules_keep_statistics() -> None:
    kept = [nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.BatchNorm2d(3, affine=False)]
    others = [nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3, track_running_stats=True)]
    assert all(keeps_statistics(module) for module in kept)
    assert not any(keeps_statistics(module) for module in [*others, nn.LayerNorm(3), nn.GroupNorm(3, 3)])


def test_the_gap_by_hand() -> None:
    one = np.ones(3)
    assert norm_gap(0 * one, one, 0 * one, one, eps=0.0) == 0.0
    # twice the deviation in running statistics, mean three deviations away
    assert norm_gap(3 * one, one, 0 * one, 4 * one, eps=0.0) == pytest.approx(3 + np.log(2))
    # a channel that is constant in the batches has eps left
    assert norm_gap(0 * one, 0 * one, 0 * one, 0 * one, eps=1e-5) == 0.0
    assert np.isnan(norm_gap(0 * one, 0 * one, one, one, eps=0.0))


@pytest.mark.parametrize("shape", [(6, 3), (5, 3, 40, 41)])
def test_what_the_node_of_a_batch_norm_keeps_is_what_reading_the_input_gives(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(3, eps=0.3) if len(shape) == 4 else torch.nn.BatchNorm1d(3, eps=0.3)
    x = (2 * torch.randn(shape) + 3).requires_grad_()
    kept = NormProbe("", norm)
    kept.add(x.detach(), norm(x).grad_fn)
    # all entries of a channel, in fp64
    entries = x.detach().double().movedim(1, 0).flatten(1).numpy()
    close_to(kept.sums, [entries.mean(1), entries.var(1, ddof=1)], rtol=1e-5)
    assert batch_statistics_of(norm.eval()(x).grad_fn) is None
    assert batch_statistics_of((norm.train()(x) * 2).grad_fn) is None
