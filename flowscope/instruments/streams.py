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
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument
from flowscope.instruments.merge_sites import Group, SitesOfAFlow, group_by_flow
from flowscope.model.hidden_state import floating_tensors
from flowscope.model.hyper_connections import KnownConnection, by_flow
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.sums import site_metrics, site_statistics
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.statistics import full_precision

MATRICES = 1024
"""So many mixing matrices of a call are computed at most."""
RETURNED: dict[str, tuple[int, int | None]] = {"returned": (0, 1), "carried": (0, None), "packed": (2, 1)}
"""Where in what a connection returns the weights of the branch are, and the residual mapping."""
STATIC = ("static_alpha", "static_beta", "base")
"""Names of the static coefficients; a connection's other parameters generate the dynamic ones."""


class KnownStreams(SitesOfAFlow):
    """The connections of one flow in depth order, of a flow that is not wrapped.

    Args:
        connections: of one package, one number of streams.
        flow: the flow's name.
        positions: how many cosines are taken over.
    """

    name = "streams"

    def __init__(self, connections: Sequence[KnownConnection], flow: str, positions: int) -> None:
        self._connections, self.flow, self._positions = connections, flow, positions
        self.fuse = f"streams {flow}"
        self._side, self.labels = connections[0].streams, [display_path(c.path) for c in connections]
        self.groups = [_group(connection) for connection in connections]

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One a flow."""
        wrapped = {name for name, _ in group_by_flow(view.connections, view.flows)}
        found = by_flow(view.hyper_connections, view.flows)
        return [cls(group, name, config.positions) for name, group in found if name not in wrapped]

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what the connections, or their norms, return."""
        self._switch, self._hooks = hooks.switch, hooks
        self._ends = np.cumsum([1 + self._side**2, 1 + self._side, 2, self._side, self._side])
        self.buffer = DepositBuffer(int(self._ends[-1]))
        for row, connection in enumerate(self._connections):
            self.buffer.new_row()
            returned = connection.kind in RETURNED
            module = connection.module if returned else connection.module.get_submodule("norm")
            hooks.after(module, self.fuse, partial(self._returned if returned else self._inside, row), hooks.switch)

    def layout(self) -> list[Any]:
        """Kind and labels."""
        return [self.flow, self._connections[0].kind, self.labels]

    # -- coefficients -------------------------------------------------------------------------------------------------

    def _inside(self, row: int, module: Any, args: Any, kwargs: Any, normed: Tensor) -> None:
        streams = next(floating_tensors((args, kwargs)), None)
        if streams is None or self._switch.paused or not normed.requires_grad:
            return
        connection = self._connections[row]
        with torch.no_grad(), full_precision(normed):
            mix, write = coefficients(connection, site_statistics.spaced_streams(normed.detach(), MATRICES))
        self._see(row, mix, write, streams, normed)

    def _returned(self, row: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        streams = next(floating_tensors((args, kwargs)), None)
        side, places = self._side, RETURNED[self._connections[row].kind]
        if streams is None or self._switch.paused or not isinstance(output, tuple) or len(output) < 2:
            return
        write, mapping = (None if at is None else output[at] for at in places)
        if write is None or not write.requires_grad or write.shape[-1] != side:
            return
        if mapping is None:
            mix = torch.eye(side, dtype=torch.float32, device=write.device)[None]
        elif mapping.shape[-2:] == (side, side):
            mix = mapping.detach().reshape(-1, side, side).transpose(-1, -2)  # used as mapping^T @ streams
        else:
            return
        self._see(row, mix, write.detach().reshape(-1, side), streams, write)

    def _see(self, row: int, mix: Tensor, write: Tensor | None, streams: Tensor, observed: Tensor) -> None:
        with torch.no_grad(), full_precision(observed):
            first = site_statistics.matrix_sums(mix)
            second = first.new_zeros(1 + self._side) if write is None else site_statistics.matrix_sums(write)
            apart = self._apart(streams)
            third = site_statistics.stream_cosine_sums(apart, self._positions)
            sums = torch.cat([first, second, third, site_statistics.stream_energies(apart, self._positions)])
        self._hooks.on_gradient(observed, self.fuse, partial(self.buffer.deposit, row, sums), row)
        if streams.requires_grad:
            self._hooks.on_gradient(streams, self.fuse, partial(self._arrived, row), (row, "streams"))

    def _apart(self, streams: Tensor) -> Tensor:
        """Return streams as [B, T, S, D], which some packages keep as [T, B, S*D]."""
        return streams if streams.shape[-2] == self._side else streams.view(*streams.shape[:-1], self._side, -1)

    def _arrived(self, row: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            energies = site_statistics.stream_energies(self._apart(gradient), self._positions)
            self.buffer.add(row, int(self._ends[-2]), energies)

    # -- what is recorded ---------------------------------------------------------------------------------------------

    def metrics_of(self, sums: Array) -> dict[str, tuple[Array, list[str]]]:
        """Those of `site_metrics.mixing_metrics`, mix_matrix, branch_weight, ..."""
        if not sums.any():
            return {}
        # in the order of `_see`: the first three each behind its count
        *means, signal, gradient = np.split(sums, self._ends[:-1], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            mix, write, cosine = (np.where(part[:, :1] > 0, part[:, 1:] / part[:, :1], np.nan) for part in means)
        matrices = mix.reshape(-1, self._side, self._side)
        found = {**site_metrics.mixing_metrics(matrices), "mix_matrix": matrices}
        found |= {"branch_weight": write.mean(1), "stream_cosine": cosine[:, 0]}
        found |= site_metrics.dominant_stream(signal, gradient)
        return {name: (values, self.labels) for name, values in found.items()}


def _group(connection: KnownConnection) -> Group:
    label = display_path(connection.path)
    own = [name for name, _ in connection.module.named_parameters(recurse=False)]
    static = [f"{label}.{name}" for name in own if name in STATIC]
    return label, static, [f"{label}.{name}" for name in own if name not in STATIC]


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
