"""What the probes do to be cheap changes no number: joined norms, sums that wait, a sample of many positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import flowscope
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.vector_norms import norms


def test_norms_of_small_tensors_joined_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (0,), (5, 7), (4096,), (4097,), (0,)]
    tensors = [torch.randn(shape, generator=generator) * 10.0 ** (-4 * k) for k, shape in enumerate(shapes)]
    tensors[0] *= 1e-25  # whose squares vanish in fp32
    tensors[2] = tensors[2].T
    expected = [float(np.sqrt((tensor.double().numpy() ** 2).sum())) for tensor in tensors]
    assert norms(tensors) == pytest.approx(expected, rel=1e-5, abs=0)


@pytest.mark.parametrize("size", [(1 << 16) + 1, (1 << 20) + 3, (257, 4099)])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-14, 1e17, 1e20])
def test_norms_of_large_tensors_are_those_of_fp64(size: int | tuple[int, int], scale: float) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    x = (x**3 * scale).float()  # heavy tails
    others = [x.T.contiguous().T] if x.dim() == 2 else [x.flip(0)]
    expected = float(np.sqrt((x.double().numpy() ** 2).sum()))
    assert norms([x, *others]) == pytest.approx([expected] * 2, rel=1e-6, abs=0)


def test_large_tensors_of_rows_far_apart_and_with_a_nan() -> None:
    x = torch.full((20, 4096), 1e-22)
    x[3] = 1e-13  # of which the norm is, though squares of the other rows vanish in fp32
    tails = torch.full((81_921,), 1e-30)  # the last entry is a row of its own
    tails[-1] = 1.0
    holed = torch.ones(20, 4096)
    holed[7, 9] = float("nan")
    found = norms([x, tails, torch.full((20, 4096), 1e-22), holed])
    assert found[:3] == pytest.approx([64e-13, 1.0, np.sqrt(81_920) * 1e-22], rel=1e-6, abs=0)
    assert np.isnan(found[3])


def test_sums_of_the_host_that_wait_are_all_added() -> None:
    buffer = DepositBuffer(3)
    rows = [buffer.new_row() for _ in range(2)]
    for k in range(2500):  # more than may wait
        buffer.add(rows[k % 2], k % 2, (1.0, float(k)))
    assert not buffer.empty()
    (taken,) = buffer.take()
    assert taken.tolist() == [
        [1250.0, float(sum(range(0, 2500, 2))), 0.0],
        [0.0, 1250.0, float(sum(range(1, 2500, 2)))],
    ]
    assert buffer.empty()
    buffer.add(rows[0], 0, (1.0,))
    buffer.clear()
    assert buffer.empty()


def test_units_are_looked_at_a_sample_of_many_positions() -> None:
    """8 samples of 64 positions, of which every fourth is looked at: a unit that is on elsewhere only counts as off."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0]))
        model[0].weight[4, 0] = 2.0
    for place, dead in ((1, 0.2), (4, 0.0)):
        x = torch.zeros(8, 64, 3)
        x[:, place, 0] = 1.0  # the last unit is on there alone
        with flowscope.watch(model, on_alert=lambda alert: None) as scope:
            model(x).sum().backward()
            scope.step()
            record = scope.records[-1]
        assert dict(zip(record.labels("dead_fraction"), record["dead_fraction"], strict=True))["1"] == dead
