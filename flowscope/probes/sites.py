"""What `watch` sees of wrapped blocks: their connections hand gates, norm inputs and mixing matrices to an observer.

The same deposit on backward as for points: sums made in the forward are added when the observed tensor's gradient
arrives, so checkpointing, accumulation and evaluation passes are counted rightly.

Axis letters: K merge sites of a flow in depth order, S streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.plan import Flow, display_path
from flowscope.probes import site_statistics, site_summaries, statistics, summaries
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.hooks import Hook, Hooks, Switch, in_backward
from flowscope.probes.layout import is_compiling
from flowscope.probes.statistics import Positions, Sums, full_precision

Array = NDArray[np.float64]
Kind = str
"""What a row holds: "gate", "norm", "mix", "write", "streams" or "input"."""


class SiteObserver:
    """The merge sites of one wrapped flow: its connections in depth order.

    A block that runs several times in a forward is one row: means over its calls; products count it once.

    Args:
        connections: (path, connection) of the wrapped blocks of one flow, in depth order.
        flow: the flow's name.
    """

    def __init__(
        self, connections: Sequence[tuple[str, Any]], flow: str, config: WatchConfig, switch: Switch, hooks: Hooks
    ) -> None:
        self.flow, self.switch, self.hooks, self.faults = flow, switch, hooks, hooks.faults
        self.part = f"sites {flow}"
        self._positions = config.positions
        self._connections = [connection for _, connection in connections]
        self.mode: str = self._connections[0].mode
        self.streams: int = self._connections[0].streams
        self.labels: list[str] = []
        self.owners: list[tuple[str, Any, int]] = []
        self._norms: list[nn.Module | None] = []
        self._starts: list[int] = []
        for path, connection in connections:
            block = display_path(path.rpartition(".")[0])
            if connection.first or not self.labels:
                self._starts.append(len(self.labels))
            connection.observer = Hook(self.part, partial(self._shown, len(self.labels)), hooks.faults, switch)
            for site in range(connection.sites):
                self.labels.append(f"{block}#{site}")
                self.owners.append((display_path(path), connection, site))
                self._norms.append(connection.norm_after(site))
        self.buffer = DepositBuffer(max(site_statistics.GATE_COLUMNS, statistics.COLUMNS, 1 + self.streams**2))
        # reserved now: tracing by torch.compile must meet no new row
        self._rows = {(k, kind): self.buffer.new_row() for k in range(len(self.labels)) for kind in self._kinds(k)}
        self.in_training = False
        self.start_forward()

    def _kinds(self, k: int) -> tuple[Kind, ...]:
        if self.streams:
            return "mix", "write", "streams", "input"
        return ("gate",) if self.mode in ("keel", "highway") else () if self._norms[k] is None else ("norm",)

    def start_forward(self) -> None:
        """The root's forward begins."""
        self.in_training = torch.is_grad_enabled()
        self._previous: tuple[int, Positions] | None = None
        self._origin: Positions | None = None
        self._waiting: dict[int, list[Sums]] = {}
        self._mix: tuple[int, Tensor] | None = None

    def close(self) -> None:
        """Take the observers off again."""
        for connection in self._connections:
            if isinstance(connection.__dict__.get("observer"), Hook):
                del connection.observer

    def _shown(self, first: int, site: int, name: str, tensor: Tensor) -> None:
        """A connection, whose first site in the flow is `first`, shows a tensor at one of its own."""
        if not self.switch.paused:
            self.see(first + site, name, tensor)

    def see(self, k: int, name: str, tensor: Tensor) -> None:
        """Register the deposit of what a connection shows at site k."""
        if name == "mixed" or (name == "residual_mix" and not is_compiling()):
            self._see_mix(k, name, tensor)
            return
        if not tensor.requires_grad:
            if name == "branch_input" and self.in_training and not torch.is_grad_enabled() and not is_compiling():
                with full_precision(tensor):
                    between = self._between(k, tensor, self.owners[k][1].axis)
                self._waiting.setdefault(k, []).append(between)
            return
        with full_precision(tensor):
            sums = self._sums(k, name, tensor)
        if sums is None:
            return
        kind, start, values = sums
        self.hooks.on_gradient(tensor, self.part, partial(self._deposit, (k, kind), start, values), (k, kind))

    def _see_mix(self, k: int, name: str, tensor: Tensor) -> None:
        """In eager code the deposit waits for the gradient of what was mixed: none need reach the matrices themselves.

        A connection may make both in one node, and does so whether it is watched or not.
        """
        if name == "residual_mix":
            if torch.is_grad_enabled():
                with full_precision(tensor):
                    self._mix = k, site_statistics.matrix_sums(tensor)
            return
        made, self._mix = self._mix, None
        if made is not None and made[0] == k and tensor.requires_grad:
            deposit = partial(self._deposit, (k, "mix"), 0, made[1])
            self.hooks.on_gradient(tensor, self.part, deposit, (k, "mix"))

    def _sums(self, k: int, name: str, tensor: Tensor) -> tuple[Kind, int, Sums] | None:
        _, connection, _ = self.owners[k]
        norm = self._norms[k]
        if name == "gate_logit":
            return "gate", 0, site_statistics.gate_sums(tensor)
        if name == "norm_input" and norm is not None:
            return "norm", 0, site_statistics.norm_sums(tensor, connection.axis, norm)
        if name == "residual_mix":
            return "mix", 0, site_statistics.matrix_sums(tensor)
        if name == "write":
            return "write", 0, site_statistics.matrix_sums(tensor)
        if name == "streams":
            return "streams", 0, site_statistics.stream_cosine_sums(tensor, self._positions)
        if name == "branch_input":
            if not is_compiling() and in_backward():  # a recomputation, in which the site before has not run
                waiting = self._waiting.get(k)
                return ("input", statistics.TO_INPUT, waiting.pop()) if waiting else None
            return "input", statistics.TO_INPUT, self._between(k, tensor, connection.axis)
        return None

    def _between(self, k: int, x: Tensor, axis: int) -> Sums:
        """The statistics between the sub-layer inputs of neighbouring sites (hyper-connections paper, figure 3).

        Those of a reentrant checkpoint's first pass wait for its recomputation, which runs from the last block on.
        """
        sequence = x.dim() == 3 and axis == -1
        now = statistics.sample_positions(x, axis, self._positions, sequence=sequence)
        if is_compiling():
            return statistics.depth_statistics(None, now, None)
        if k == 0:
            self._origin = now
        before = self._previous[1] if self._previous is not None and self._previous[0] == k - 1 else None
        self._previous = (k, now)
        return statistics.depth_statistics(now.alike(before), now, now.alike(self._origin))

    def _deposit(self, row: tuple[int, Kind], start: int, values: Sums, gradient: Tensor) -> None:
        del gradient
        self.buffer.add(self._rows[row], start, values)

    def forget(self) -> None:
        """Drop what was deposited and remembered."""
        self.buffer.clear()
        self.start_forward()

    def metrics(self, sums: Array) -> dict[str, tuple[Array, list[str]]]:
        """Return name -> (values, labels) from what the buffer held at the end of the step."""
        out: dict[str, tuple[Array, list[str]]] = {}

        def rows(kind: Kind) -> list[Array | None]:
            places = [self._rows.get((k, kind)) for k in range(len(self.labels))]
            return [sums[p] if p is not None and p < len(sums) and sums[p].any() else None for p in places]

        def add(metrics: dict[str, Array]) -> None:
            out.update({name: (values, self.labels) for name, values in metrics.items()})

        gates = rows("gate")
        if any(row is not None for row in gates):
            add(site_summaries.gate_metrics(gates))
        if self.mode in ("keel-postln", "deepnorm"):
            add({"alpha": np.array([connection.alpha[site] for _, connection, site in self.owners])})
        if self.streams:
            self._mixing(rows, add, out)
            between = rows("input")
            if len(self.labels) > 1:
                held = np.stack([r if r is not None else np.zeros(sums.shape[1]) for r in between])
                depth = summaries.depth_metrics(held[:, : statistics.COLUMNS])
                for name in ("cosine", "cosine_p05", "cosine_p95"):
                    out[name] = (depth[name], self.labels[1:])
                add({name: depth[name] for name in ("cosine_to_input", "token_cosine", "sample_cosine")})
        else:
            add({"shortcut_product": site_summaries.shortcut_product(self._factors(gates, rows("norm")))})
        return out

    def _factors(self, gates: list[Array | None], norms: list[Array | None]) -> list[float]:
        """The carry's factor at each site, as each mode's connection documents it."""
        factors: list[float] = []
        for k, (_, connection, site) in enumerate(self.owners):
            if self.mode == "highway":
                factors.append(site_summaries.highway_factor(gates[k]))
            elif self._norms[k] is not None and self.mode != "keel":
                factors.append(site_summaries.norm_factor(norms[k], connection.alpha[site]))
            else:
                factors.append(1.0)
        return factors

    def _mixing(
        self,
        rows: Callable[[Kind], list[Array | None]],
        add: Callable[[dict[str, Array]], None],
        out: dict[str, tuple[Array, list[str]]],
    ) -> None:
        side = self.streams
        mixes, writes, cosines = rows("mix"), rows("write"), rows("streams")
        unseen = np.full(side * side, np.nan)
        means = np.stack([unseen if r is None else r[1 : 1 + side * side] / r[0] for r in mixes])
        means = means.reshape(-1, side, side)
        add(site_summaries.mixing_metrics(means, self._starts))
        out["mix_matrix"] = (means, self.labels)
        add(
            {
                "branch_weight": np.array([np.nan if r is None else r[1 : 1 + side].mean() / r[0] for r in writes]),
                "stream_cosine": np.array([np.nan if r is None or side == 1 else r[1] / r[0] for r in cosines]),
            }
        )

    def gradient_groups(self) -> list[tuple[str, list[str], list[str]]]:
        """Per connection: label, names of its static parameters, names of its generators (for connection_grad_norm)."""
        groups = []
        seen: set[int] = set()
        for path, connection, _ in self.owners:
            if id(connection) in seen:
                continue
            seen.add(id(connection))
            static = [f"{path}.{name}" for name, _ in connection.static_parameters()]
            generators = [f"{path}.{name}" for name, _ in connection.generator_parameters()]
            if static or generators:
                groups.append((path, static, generators))
        return groups


def group_by_flow(
    connections: Sequence[tuple[str, nn.Module]], flows: Sequence[Flow]
) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Sort a model's connections by the watched flow that holds their blocks: (its name, (path, connection) ...).

    Blocks that no watched flow holds are named after their container.
    """
    own = {display_path(path): f.name for f in sorted(flows, key=lambda f: f.kind != "network") for path in f.outputs}
    groups: dict[str, list[tuple[str, Any]]] = {}
    for path, connection in connections:
        block = display_path(path.rpartition(".")[0])
        groups.setdefault(own.get(block, block.rpartition(".")[0] or block), []).append((path, connection))
    return list(groups.items())


def grad_norms(
    groups: list[tuple[str, list[str], list[str]]], norms: dict[str, float]
) -> dict[str, tuple[Array, list[str]]]:
    """connection_grad_norm and connection_grad_norm_generators per connection, from the parameters' gradient norms."""
    if not groups:
        return {}
    labels = [label for label, _, _ in groups]

    def joint(names: list[str]) -> float:
        values = [norms[name] for name in names if not np.isnan(norms.get(name, np.nan))]
        return float(np.sqrt(np.sum(np.square(values)))) if values else float("nan")

    out = {"connection_grad_norm": (np.array([joint(static) for _, static, _ in groups]), labels)}
    if any(generators for _, _, generators in groups):
        values = np.array([joint(generators) for _, _, generators in groups])
        out["connection_grad_norm_generators"] = (values, labels)
    return out
