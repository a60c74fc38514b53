"""What connections show at their merge sites: how each thing is summed in a step, and which metrics the sums become.

A rule declares it, `observed = {"gate_logit": GateLogit}`, and shows it, `self.observe(site, "gate_logit", logit)`.

Axis letters: B batch, T positions, D features, K merge sites of a flow in depth order, S streams, M = B*T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.hooks import in_backward
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.records import Array
from flowscope.sums import point_metrics, site_metrics, site_statistics, statistics
from flowscope.sums.statistics import Positions, Sums


class SiteSums:
    """How one thing that the connections of a flow show becomes metrics; one object a flow. To be subclassed.

    Attributes:
        columns: length of a row of sums; here a count and a sum.
        name: under which it is shown.
        sites: (connection, number of the site in its block), K of them.
        positions: cosines are taken at so many positions at most.
    """

    columns = 2

    def __init__(self, name: str, sites: Sequence[tuple[Any, int]], positions: int) -> None:
        self.name, self.sites, self.positions = name, sites, positions

    @classmethod
    def specs(cls, name: str) -> tuple[Metric, ...]:
        """Return what its metrics say where it is shown under a name; those that flowscope knows need none."""
        return ()

    def start_forward(self) -> None:
        """The root's forward begins."""

    def sums(self, k: int, x: Tensor) -> Sums | None:
        """Return [columns] of what is shown at site k: numbers that add up over calls, micro-batches and ranks."""
        raise NotImplementedError

    def of_gradient(self, k: int, gradient: Tensor) -> Tensor | None:
        """Return further numbers of the row, behind those of `sums`, from the gradient of what was shown at site k."""
        return None

    def without_gradient(self, k: int, x: Tensor) -> None:
        """Take note of x under no_grad in training: the first pass of a reentrant checkpoint."""

    def values(self, rows: Array) -> dict[str, Array]:
        """Return {metric: [K, ...], or [K - 1] between neighbours} of the step's sums [K, columns], 0 where unseen."""
        raise NotImplementedError


class Mean(SiteSums):
    """The mean of all entries, [K], as a metric of the name under which they are shown."""

    @classmethod
    def specs(cls, name: str) -> tuple[Metric, ...]:
        """One of that name."""
        return (Metric(name, f"Mean of {name.replace('_', ' ')} at each site.", view="Gates", rows="sites"),)

    def sums(self, k: int, x: Tensor) -> Sums:
        """Return count and sum."""
        return site_statistics.matrix_sums(x.reshape(-1, 1))

    def values(self, rows: Array) -> dict[str, Array]:
        """Return the mean."""
        return {self.name: rows[:, 1] / rows[:, 0]}


class GateLogit(SiteSums):
    """A gate's pre-activation, [..., 1 or D], features last: gate_mean and the like."""

    columns = site_statistics.GATE_COLUMNS

    def sums(self, k: int, x: Tensor) -> Sums:
        """See `gate_sums`."""
        return site_statistics.gate_sums(x)

    def values(self, rows: Array) -> dict[str, Array]:
        """See `gate_metrics`."""
        return site_metrics.gate_metrics(rows) if rows.any() else {}


class NormInput(SiteSums):
    """What the norm behind a site is given: the carry's factor there (`Connection.carry_factor`)."""

    def sums(self, k: int, x: Tensor) -> Sums:
        """See `norm_sums`."""
        connection, site = self.sites[k]
        return site_statistics.norm_sums(x, connection.axis, connection.norm_after(site))

    def values(self, rows: Array) -> dict[str, Array]:
        """Nothing of its own."""
        return {}


class Matrices(SiteSums):
    """Something of each position that is no larger than [S, S]."""

    def __init__(self, name: str, sites: Sequence[tuple[Any, int]], positions: int) -> None:
        super().__init__(name, sites, positions)
        self.streams: int = sites[0][0].streams
        self.columns = 1 + self.streams**2

    def sums(self, k: int, x: Tensor) -> Sums:
        """See `matrix_sums`."""
        return site_statistics.matrix_sums(x)


class ResidualMix(Matrices):
    """The residual mappings, [M or 1, S, S], rows = output stream: mix_* of their products, shortcut_product."""

    def values(self, rows: Array) -> dict[str, Array]:
        """See `mixing_metrics`; composites begin where the streams are expanded."""
        matrices = (rows[:, 1:] / rows[:, :1]).reshape(-1, self.streams, self.streams)
        starts = [k for k, (connection, site) in enumerate(self.sites) if not k or (connection.first and not site)]
        return {**site_metrics.mixing_metrics(matrices, starts), "mix_matrix": matrices}


class Write(Matrices):
    """The weights with which the branch's output is written, [M or 1, S, 1]: branch_weight."""

    def values(self, rows: Array) -> dict[str, Array]:
        """Return the mean over the streams."""
        return {"branch_weight": rows[:, 1 : 1 + self.streams].mean(1) / rows[:, 0]}


class Streams(SiteSums):
    """The streams before a site, [B, T..., S, D]: stream_cosine, and who dominates signal and gradient."""

    def __init__(self, name: str, sites: Sequence[tuple[Any, int]], positions: int) -> None:
        super().__init__(name, sites, positions)
        self.streams: int = sites[0][0].streams
        self.columns = 2 + 2 * self.streams

    def sums(self, k: int, x: Tensor) -> Sums:
        """Return those of the cosine, and the energy of each stream."""
        cosine = site_statistics.stream_cosine_sums(x, self.positions)
        return torch.cat([cosine, site_statistics.stream_energies(x, self.positions)])

    def of_gradient(self, k: int, gradient: Tensor) -> Tensor:
        """Return the energy of each stream's gradient."""
        return site_statistics.stream_energies(gradient, self.positions)

    def values(self, rows: Array) -> dict[str, Array]:
        """Return the mean cosine between two streams, and the largest shares; NaN where there is but one."""
        cosine = rows[:, 1] / rows[:, 0]
        cosine = cosine if self.streams > 1 else np.full_like(cosine, np.nan)
        signal, gradient = np.split(rows[:, 2:], 2, axis=1)
        return {"stream_cosine": cosine, **site_metrics.dominant_stream(signal, gradient)}


class BranchInput(SiteSums):
    """The sub-layer's input, [B, T..., D]: with streams, the cosines of depth are those of neighbouring inputs.

    Hyper-connections paper, figure 3. Those of a reentrant checkpoint's first pass wait for its recomputation, which
    runs from the last block on.
    """

    columns = statistics.COLUMNS - statistics.TO_INPUT

    def __init__(self, name: str, sites: Sequence[tuple[Any, int]], positions: int) -> None:
        super().__init__(name, sites, positions)
        self.start_forward()

    def start_forward(self) -> None:
        """Forget the inputs of the forward before."""
        self._previous: tuple[int, Positions] | None = None
        self._origin: Positions | None = None
        self._waiting: dict[int, list[Sums]] = {}

    def sums(self, k: int, x: Tensor) -> Sums | None:
        """See `depth_statistics`."""
        if not is_compiling() and in_backward():  # a recomputation, in which the site before has not run
            waiting = self._waiting.get(k)
            return waiting.pop() if waiting else None
        return self._between(k, x)

    def without_gradient(self, k: int, x: Tensor) -> None:
        """Keep the sums for the recomputation."""
        self._waiting.setdefault(k, []).append(self._between(k, x))

    def _between(self, k: int, x: Tensor) -> Sums:
        axis = self.sites[k][0].axis
        now = statistics.sample_positions(x, axis, self.positions, sequence=x.dim() == 3 and axis == -1)
        if is_compiling():
            return statistics.depth_statistics(None, now, None)
        if k == 0:
            self._origin = now
        before = self._previous[1] if self._previous is not None and self._previous[0] == k - 1 else None
        self._previous = (k, now)
        return statistics.depth_statistics(now.alike(before), now, now.alike(self._origin))

    def values(self, rows: Array) -> dict[str, Array]:
        """See `depth_metrics`."""
        if len(rows) < 2:
            return {}
        depth = point_metrics.depth_metrics(np.pad(rows, ((0, 0), (statistics.TO_INPUT, 0))))
        names = ("cosine", "cosine_p05", "cosine_p95", "cosine_to_input", "token_cosine", "sample_cosine")
        return {name: depth[name] for name in names}
