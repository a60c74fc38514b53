"""Cosines between hidden states: of neighbouring points, to x_0, between tokens and between samples of one point."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from flowscope.hooks.calls import ENTRY
from flowscope.hooks.points import FlowStep, Point, PointMeasure
from flowscope.metrics import Metric
from flowscope.model.hidden_state import AxisReader, is_compiling
from flowscope.record_builder import RecordBuilder
from flowscope.sums import point_metrics, statistics
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.depth import DepthRow, DepthRows
from flowscope.sums.payload import local
from flowscope.sums.statistics import Positions, Sums, full_precision, is_host

# a cosine below 0 widens the scale to -1 in the browser
_depth = partial(Metric, view="Depth", bounds=(0.0, 1.0))
METRICS = (
    _depth(
        "cosine",
        "Cosine between a block's input and output (median; band 5 to 95 %). At 1 the block changes nothing.",
        formula="median over positions of cos(x_{l-1}, x_l)",
        rows="blocks",
        band=("cosine_p05", "cosine_p95"),
        logged=True,
        charted="linear",
        opens=True,
    ),
    _depth("cosine_p05", "The 5 % quantile of cosine.", rows="blocks"),
    _depth("cosine_p95", "The 95 % quantile of cosine.", rows="blocks"),
    _depth(
        "cosine_to_input",
        "Cosine between the input of the stack and each depth. Low is what depth is for.",
        formula="mean over positions of cos(x_0, x_l)",
    ),
    _depth(
        "token_cosine",
        "Mean cosine between different tokens of a sequence. At 1 all tokens are one vector: alert over 0.999.",
        formula="(‖sum_t u_t‖² - T) / (T (T - 1)) for unit vectors u_t",
        source="arXiv 2103.03404",
        limits=("token_cosine",),
        logged=True,
        charted="linear",
    ),
    _depth(
        "sample_cosine",
        "Mean cosine between different samples of a batch. At 1 all samples are one vector.",
        formula="as token_cosine, over the mean of each sample's positions",
        source="arXiv 1611.01232",
    ),
    _depth(
        "branch_share",
        "Size of a block's change beside what it was given.",
        formula="b / (b + r), b = ‖x_l - x_{l-1}‖, r = ‖x_{l-1}‖",
        rows="blocks",
        bounds=None,
    ),
)


class Cosines(PointMeasure):
    """Compares a sample of each point's positions with those of the point before and of x_0.

    Args:
        buffer: where the sums are added up.
        at: from which column on.
        limit: largest number of positions.
        origin_first: whether the first point is x_0, because the flow has no entry.
    """

    def __init__(self, buffer: DepositBuffer, at: int, limit: int, *, origin_first: bool) -> None:
        self.buffer, self.at, self.limit, self.origin_first = buffer, at, limit, origin_first
        self._rows = DepthRows()
        self._previous: Positions | None = None
        self._origin: Positions | None = None

    def begin_pass(self) -> None:
        """No point was seen yet."""
        self._previous = self._origin = None

    def look(self, point: Point) -> Sums | DepthRow:
        """The sums, or on the host a row that is computed later, with those of the points beside it."""
        before = self._previous if point.follows else None
        if point.before is not None:
            before = self._positions(point.reader, point.before)
        now = self._positions(point.reader, point.x)
        entering = point.key[0] == ENTRY
        origin = now if entering or (self._origin is None and self.origin_first) else self._origin
        if not is_compiling():
            self._remember(now, entering=entering)
        compared = None if entering else now.alike(before), now, now.alike(origin)
        if is_host(point.x):  # only copies are made here
            return self._rows.add(*compared)
        with full_precision(point.x):
            return statistics.depth_statistics(*compared)

    def pass_by(self, point: Point) -> None:
        """Remember its positions."""
        self._remember(self._positions(point.reader, point.x))

    def _remember(self, now: Positions, *, entering: bool = False) -> None:
        self._previous = now
        if self._origin is None and (entering or self.origin_first):
            self._origin = now

    def _positions(self, reader: AxisReader, x: Tensor) -> Positions:
        states, axis, sequence = reader.read(local(x))
        with full_precision(states):
            return statistics.sample_positions(states, axis, self.limit, sequence=sequence)

    def deposit(self, key: tuple[int, int], row: int, seen: Any, gradient: Tensor | None) -> None:
        """Add the sums."""
        self.buffer.add(row, self.at, seen.read() if isinstance(seen, DepthRow) else seen)

    def read(self, out: RecordBuilder, flow: FlowStep) -> None:
        """The family "depth"."""
        out.along(point_metrics.depth_metrics(flow.rows), flow.labels)
