"""How the entries of a hidden state are spread: the largest one, heavy tails, and whether one channel holds them.

Massive activations (Sun et al. 2024, arXiv 2402.17762) are a few channels thousands of times larger than the rest. They
are usual in trained decoders; they cost range: fp16 ends at 65504, fp8 (e4m3) at 448, and one scale a tensor leaves the
rest no bits.

Axis letters: N positions (B*T), D channels.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.points import Point
from flowscope.instruments.instrument import Array
from flowscope.instruments.point_statistic import PointStatistic
from flowscope.metrics import Metric
from flowscope.sums.statistics import at_least_single, feature_last, is_host, real_features, wide

_depth = partial(Metric, view="Depth", scale="log")
SMALL = 2.0**-64


def _host_sums(square: Tensor, end: float) -> Tensor:
    """The sums of squares [N, D] on the host, in the few operations that are fast there."""
    entries = square.numpy()
    flat = entries.reshape(-1)
    fourth, largest = float(flat.dot(flat)), math.sqrt(flat.max())
    channels = np.add.reduce(entries, 0)
    number = int(channels.argmax())
    top = float(channels[number])
    total = channels.sum(dtype=np.float64)
    sums = flat.size, total, fourth, top, top * number, top * number**2, largest, largest / end
    return torch.from_numpy(np.array(sums, dtype=np.float64))


class ActivationShape(PointStatistic):
    """Sums of each hidden state: entries, squares, fourth powers, each call's top channel; and the largest entry."""

    name = "activation_shape"
    columns, maxima, seldom = 8, 2, True
    metrics = (
        _depth(
            "act_absmax",
            "Largest entry of the hidden state. fp16 ends at 65504, fp8 (e4m3) at 448.",
            formula="max |x| over calls, micro-batches and ranks",
            unit="activation",
            source="arXiv 2402.17762",
        ),
        _depth(
            "act_kurtosis",
            "How heavy the tails are: normal entries have 3, outlier features 100 and more.",
            formula="mean x⁴ / (mean x²)²",
            healthy="3 to 30; growth makes low precision and quantisation fail",
            source="arXiv 2402.17762",
        ),
        _depth(
            "top_channel_share",
            "Share of the squared norm in the largest channel. All alike: 1 / D; massive activations: over .5.",
            formula="max_d sum_n x_nd² / sum x², of each call",
            source="arXiv 2402.17762",
            scale="linear",
            bounds=(0.0, 1.0),
        ),
        _depth(
            "top_channel",
            "Which channel that is. Grey: not the same one in all calls.",
            formula="argmax_d sum_n x_nd²",
            scale="linear",
            drawn=False,
        ),
        _depth(
            "act_headroom",
            "How many times larger the largest entry could be before the numbers of its dtype end.",
            formula="largest number of the dtype of x / act_absmax",
            healthy="above 8",
            limits=("headroom",),
        ),
    )

    def look(self, point: Point) -> Tensor:
        """The sums, with the channels where the point's module has them."""
        states, axis, _ = point.reader.read(point.x)
        return self.shape_sums(feature_last(states, axis))

    def shape_sums(self, states: Tensor) -> Tensor:
        """[8] of states [B, T, D]: N*D, sums of x² and x⁴, the top channel's square, its number twice, max |x| twice.

        The number is weighted with the square, once as it is and once squared: so it can be told from the sums whether
        all calls had the same channel. The second max |x| is over the dtype's largest number times SMALL.
        """
        end = torch.finfo(states.dtype).max * SMALL  # a share of the number itself would be too small for fp64
        x = at_least_single(real_features(states)).flatten(0, 1)
        square = x * x
        if is_host(x):
            return _host_sums(square, end)
        channels = square.sum(0)
        top, number = channels.max(0)
        fourth = torch.linalg.vecdot(square, square).sum()
        largest = torch.linalg.vector_norm(x.flatten(), torch.inf)
        sums = torch.stack([torch.full_like(top, x.numel()), channels.sum(), fourth, top, top, top, largest, largest])
        number, sums = number.to(wide(x.device)), sums.to(wide(x.device))
        one = torch.ones_like(number)
        return sums * torch.stack([one, one, one, one, number, number * number, one, one / end])

    def values(self, rows: Array) -> dict[str, Array]:
        """Each metric [P]."""
        size, square, fourth, top, number, squared, largest, share = rows.T
        channel = number / top
        same = np.abs(squared / top - channel**2) < 1e-6 * np.maximum(channel**2, 1.0)
        return {
            "act_absmax": largest,
            "act_kurtosis": size * fourth / square**2,
            "top_channel_share": top / square,
            "top_channel": np.where(same, np.rint(channel), np.nan),
            "act_headroom": 1.0 / share / SMALL,
        }
