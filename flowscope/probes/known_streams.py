"""Merge sites of hyper-connections that other packages put into the user's model: the same metrics as of our own.

transformers' modules give their coefficients back. Those of hyper-connections keep them inside: they are computed a
second time, without a graph, from what the connection's own norm gave, with the package's formulas; at most `MATRICES`
evenly spaced positions a call.

Axis letters: B batch, T positions, S streams, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.hyper_connections import KnownConnection
from flowscope.discovery.plan import display_path
from flowscope.probes import site_statistics, site_summaries
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.hooks import Hooks, Switch
from flowscope.probes.layout import floating_tensors
from flowscope.probes.statistics import full_precision

Array = NDArray[np.float64]
MATRICES = 1024
"""So many mixing matrices of a call are computed at most."""
STATIC = ("static_alpha", "static_beta", "base")
"""Names of the static coefficients; a connection's other parameters generate the dynamic ones."""


class KnownStreams:
    """The connections of one flow in depth order; stands beside the `SiteObserver`s of wrapped flows.

    Args:
        connections: of one package, one number of streams.
        flow: the flow's name.
        config: how many positions cosines are taken over.
        switch: on in a sampled step.
        hooks: where to register.
    """

    streams = 0
    """The flow's own depth metrics stay."""

    def __init__(
        self, connections: Sequence[KnownConnection], flow: str, config: WatchConfig, switch: Switch, hooks: Hooks
    ) -> None:
        self.flow, self.part, self.mode = flow, f"streams {flow}", connections[0].kind
        self._connections, self._switch, self._hooks = connections, switch, hooks
        self._side, self._positions = connections[0].streams, config.positions
        self.labels = [display_path(c.path) for c in connections]
        self._mix, self._write = slice(0, 1 + self._side**2), slice(1 + self._side**2, 2 + self._side + self._side**2)
        self._cosine = slice(self._write.stop, self._write.stop + 2)
        self.buffer = DepositBuffer(self._cosine.stop)
        self.in_training = False
        for row, connection in enumerate(connections):
            self.buffer.new_row()
            returned = connection.kind in ("returned", "carried")
            module = connection.module if returned else connection.module.get_submodule("norm")
            hooks.after(module, self.part, partial(self._returned if returned else self._inside, row), switch)

    def start_forward(self) -> None:
        """The root's forward begins: nothing is kept between calls."""

    def close(self) -> None:
        """The hooks are taken off with all others."""

    def forget(self) -> None:
        """Drop what was deposited."""
        self.buffer.clear()

    # -- coefficients -------------------------------------------------------------------------------------------------

    def _inside(self, row: int, module: Any, args: Any, kwargs: Any, normed: Tensor) -> None:
        del module
        streams = next(floating_tensors((args, kwargs)), None)
        if streams is None or self._idle(normed):
            return
        connection = self._connections[row]
        with torch.no_grad(), full_precision(normed):
            mix, write = coefficients(connection, site_statistics.spaced_streams(normed.detach(), MATRICES))
        self._see(row, mix, write, streams, normed)

    def _returned(self, row: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        del module
        streams = next(floating_tensors((args, kwargs)), None)
        if streams is None or not isinstance(output, tuple) or self._idle(output[0]):
            return
        side, write = self._side, output[0]
        if write.shape[-1] != side:
            return
        if self._connections[row].kind == "carried":
            mix = torch.eye(side, dtype=torch.float32, device=write.device)[None]
        elif len(output) == 3 and output[1].shape[-2:] == (side, side):
            mix = output[1].detach().reshape(-1, side, side).transpose(-1, -2)  # used as comb^T @ streams
        else:
            return
        self._see(row, mix, write.detach().reshape(-1, side), streams, write)

    def _idle(self, observed: Tensor) -> bool:
        return not self._switch.sampling or self._switch.paused or not observed.requires_grad

    def _see(self, row: int, mix: Tensor, write: Tensor | None, streams: Tensor, observed: Tensor) -> None:
        with torch.no_grad(), full_precision(observed):
            first = site_statistics.matrix_sums(mix)
            second = first.new_zeros(1 + self._side) if write is None else site_statistics.matrix_sums(write)
            third = site_statistics.stream_cosine_sums(streams, self._positions)
            sums = torch.cat([first, second, third])
        self._hooks.on_gradient(observed, self.part, partial(self._deposit, row, sums), row)

    def _deposit(self, row: int, sums: Tensor, gradient: Tensor) -> None:
        del gradient
        self.buffer.add(row, 0, sums)

    # -- what is recorded ---------------------------------------------------------------------------------------------

    def metrics(self, sums: Array) -> dict[str, tuple[Array, list[str]]]:
        """Return name -> (values, labels): those of `site_summaries.mixing_metrics`, mix_matrix, branch_weight, ..."""
        count, side = len(self.labels), self._side
        rows = np.zeros((count, self.buffer.columns))
        rows[: len(sums)] = sums[:count]
        if not rows.any():
            return {}

        def means(where: slice) -> Array:
            held = rows[:, where]
            with np.errstate(invalid="ignore", divide="ignore"):
                return np.asarray(np.where(held[:, :1] > 0, held[:, 1:] / held[:, :1], np.nan))

        matrices = means(self._mix).reshape(count, side, side)
        out = {name: (values, self.labels) for name, values in site_summaries.mixing_metrics(matrices).items()}
        out["mix_matrix"] = (matrices, self.labels)
        out["branch_weight"] = (means(self._write).mean(1), self.labels)
        out["stream_cosine"] = (means(self._cosine)[:, 0], self.labels)
        return out

    def gradient_groups(self) -> list[tuple[str, list[str], list[str]]]:
        """Per connection: label, names of its static parameters, names of what generates the dynamic ones."""
        groups = []
        for connection, label in zip(self._connections, self.labels, strict=True):
            own = [name for name, _ in connection.module.named_parameters(recurse=False)]
            static = [f"{label}.{name}" for name in own if name in STATIC]
            groups.append((label, static, [f"{label}.{name}" for name in own if name not in STATIC]))
        return groups


def coefficients(connection: KnownConnection, normed: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the residual mapping [M, S, S] (rows: output stream) and the weights [M, S] of the branch's output.

    None where the connection adds no output. As in hyper_connections 0.4.11: HyperConnections.width_connection,
    ManifoldConstrainedHyperConnections.width_connection.

    Args:
        connection: "dynamic" or "manifold".
        normed: what its norm gave, [M, S, D].
    """
    module: Any = connection.module
    normed = normed.float()
    write = None
    if connection.kind == "dynamic":
        bounded = isinstance(module.act, nn.Tanh)  # not called: hooks on it would count it twice
        alpha = normed @ module.dynamic_alpha_fn.float()
        alpha = (alpha.tanh() if bounded else alpha) * module.dynamic_alpha_scale + module.static_alpha
        if module.add_branch_out_to_residual:
            beta = normed @ module.dynamic_beta_fn.float()
            write = (beta.tanh() if bounded else beta) * module.dynamic_beta_scale + module.static_beta
        return alpha[..., 1:].transpose(-1, -2), write
    logits = torch.einsum("msd,pde->pmse", normed, module.dynamic_alpha_fn.float()[..., 1:])
    logits = logits * module.residual_scale.float() + module.static_alpha.float()[:, 1:]
    mix = module.residual_mix_constraint_fn(logits).mean(0)
    if module.add_branch_out_to_residual:
        raw = normed @ module.dynamic_beta_fn.float() * module.h_post_scale.float() + module.static_beta.float()
        write = raw.sigmoid() * 2
    return mix.transpose(-1, -2), write
