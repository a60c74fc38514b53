"""A number per depth from one class: sums of each hidden state, which add up over micro-batches, calls and ranks.

    class Skewness(PointStatistic):
        name, scale, columns = "act_skewness", "linear", 3
        words = "Third moment over the second to the power 3/2: 0 where the entries are symmetric."

        def sums(self, x):
            x = x.double()
            return torch.stack([torch.full_like(x.sum(), x.numel()), (x**2).sum(), (x**3).sum()])

        def values(self, rows):
            count, squares, cubes = rows.T
            return cubes / count / (squares / count) ** 1.5

Axis letters: P points of one flow (x_0 ... x_L).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from flowscope.errors import FlowscopeError
from flowscope.hooks.hooks import Hooks
from flowscope.hooks.points import Point
from flowscope.instruments.instrument import Array, Instrument
from flowscope.metrics import Metric, Scale
from flowscope.model.view import ModelView


class PointStatistic(Instrument):
    """Subclass it: `sums` looks at a hidden state, `values` makes the metric of what added up.

    It sees the points that `act_rms` has, and counts what `act_rms` counts: hidden states whose gradient arrived. A
    point that was not seen is NaN whatever `values` says.

    Attributes:
        name: of the metric, and of its switch in `config={"instruments": {name: False}}`.
        words: what the number says and what is healthy.
        unit, formula, healthy, view, scale: see `flowscope.metrics.Metric`.
        columns: how many sums `sums` returns.
        maxima: so many of them, the last, are no sums but numbers >= 0 of which the largest counts.
        gradient_powers: for `gradient_sums`, one a column: the power of the gradient that is added up in it, 0 for a
            count. By it the ranks undo that DDP averages gradients.
        seldom: True for one that costs more than most: it looks at the first 10 samples, then at each
            `WatchConfig.seldom_every`-th. In compiled code at all of them.
        times_loss_scale: whether the values grow with the loss scale of a GradScaler; they are divided by it.
    """

    families = ("flow", "depth")
    words: ClassVar[str] = ""
    unit: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    healthy: ClassVar[str] = ""
    view: ClassVar[str] = "Depth"
    scale: ClassVar[Scale] = "linear"
    times_loss_scale: ClassVar[bool] = False
    seldom: ClassVar[bool] = False
    columns: int = 0
    maxima: int = 0
    gradient_powers: tuple[int, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Say in the run's header what the metric is.

        Raises:
            FlowscopeError: `columns` is no number of columns.
        """
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):  # a base of others
            return
        if not isinstance(cls.columns, int) or cls.columns < 1:
            raise FlowscopeError(f"{cls.__name__}.columns: got {cls.columns!r}, expected how many sums `sums` returns.")
        if "metrics" not in cls.__dict__:
            spec = Metric(cls.name, cls.words, cls.unit, cls.formula, cls.healthy, view=cls.view, scale=cls.scale)
            of_gradient = bool(cls.gradient_powers)
            cls.metrics = (replace(spec, of_gradient=of_gradient, times_loss_scale=cls.times_loss_scale),)

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """From now on it is measured at every point."""
        hooks.statistics.append(self)

    def rests(self) -> bool:
        """Points are measured in sampled steps; one that attaches more than that is as any from outside."""
        return type(self).attach is PointStatistic.attach or super().rests()

    def look(self, point: Point) -> Tensor:
        """`sums` of a point; overridden by one that must know which axis is which (`point.reader.read(point.x)`)."""
        return self.sums(point.x)

    def sums(self, x: Tensor) -> Tensor:
        """Return [columns], on the device of x, without reading from it.

        Args:
            x: the hidden state, detached (of a DTensor this rank's part) and in the model's own dtype: sums of bf16 are
                better made of `x.float()`. It must not be changed.
        """
        raise NotImplementedError(f"{type(self).__name__}.sums(x) -> Tensor[columns] is missing")

    def gradient_sums(self, gradient: Tensor) -> Tensor:
        """Return [len(gradient_powers)] of dL/dx, likewise; only called where there are `gradient_powers`."""
        raise NotImplementedError(f"{type(self).__name__}.gradient_sums(gradient) is missing")

    def values(self, rows: Array) -> Array | Mapping[str, Array]:
        """Return the metric [P] of the sums [P, columns + len(gradient_powers)], fp64 on the host.

        A class that declares several `metrics` returns each by its name.
        """
        raise NotImplementedError(f"{type(self).__name__}.values(rows) -> Array[P] is missing")
