"""What `watch` sees of wrapped blocks: their connections show what they declare to an observer.

The same deposit on backward as for points: sums made in the forward are added when the observed tensor's gradient
arrives, so checkpointing, accumulation and evaluation passes are counted rightly. What is shown, how it is summed and
which metrics that gives is the connection's own matter (`merging/observed.py`).

Axis letters: K merge sites of a flow in depth order.
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
from flowscope.discovery.plan import Flow, display_path
from flowscope.errors import FlowscopeError
from flowscope.probes import site_summaries
from flowscope.probes.buffer import DepositBuffer
from flowscope.probes.hooks import Hook, Hooks, Switch, in_backward
from flowscope.probes.layout import is_compiling
from flowscope.probes.statistics import Sums, full_precision

Array = NDArray[np.float64]


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
        self.flow, self.part, self.switch, self.hooks = flow, f"sites {flow}", switch, hooks
        self.labels: list[str] = []
        self.owners: list[tuple[str, Any, int]] = []
        for path, connection in connections:
            connection.observer = Hook(self.part, partial(self._shown, len(self.labels)), hooks.faults, switch)
            for site in range(connection.sites):
                self.labels.append(f"{display_path(path.rpartition('.')[0])}#{site}")
                self.owners.append((display_path(path), connection, site))
        sites = [(connection, site) for _, connection, site in self.owners]
        declared = {name: sums for connection, _ in sites for name, sums in connection.observed.items()}
        self.sums = {name: sums(name, sites, config.positions) for name, sums in declared.items()}
        self.buffer = DepositBuffer(max((sums.columns for sums in self.sums.values()), default=1))
        # reserved now: tracing by torch.compile must meet no new row
        self._rows = {
            (k, name): self.buffer.new_row()
            for k, (connection, site) in enumerate(sites)
            for name in connection.shown_at(site)
        }
        self._hooked: set[tuple[int, str]] = set()
        self._seen: set[tuple[int, str | None]] = set()
        self.in_training = False
        self.start_forward()

    @property
    def mode(self) -> str:
        """The name of the rule."""
        return str(self.owners[0][1].mode)

    @property
    def streams(self) -> int:
        """How many streams travel between the blocks; 0 where x itself does."""
        return int(self.owners[0][1].streams)

    def start_forward(self) -> None:
        """The root's forward begins."""
        self.in_training = torch.is_grad_enabled()
        if self.in_training:
            self._hooked.clear()
        for sums in self.sums.values():
            sums.start_forward()

    def close(self) -> None:
        """Take the observers off again."""
        for _, connection, _ in self.owners:
            if isinstance(connection.__dict__.get("observer"), Hook):
                del connection.observer

    def _shown(self, first: int, site: int, name: str | None, tensor: Tensor, through: Tensor | None) -> None:
        """A connection, whose first site in the flow is `first`, shows a tensor at one of its own."""
        if self.switch.paused:
            return
        k = first + site
        if name is not None and (k, name) in self._rows:
            self.see(k, name, tensor, tensor if through is None or is_compiling() else through)
        if not is_compiling():
            self._check(k, name, tensor)

    def _check(self, k: int, name: str | None, tensor: Tensor) -> None:
        """Raise where a rule shows what it does not declare or, in strict mode, never shows what it does.

        Args:
            k: the site.
            name: of what it shows; None: all of it was shown.
            tensor: shown, or what the merge gave.
        """
        _, connection, site = self.owners[k]
        known, rule = connection.shown_at(site), type(connection).__name__
        if name in known:
            self._seen.add((k, name))
        elif name is not None:
            raise FlowscopeError(
                f"{rule} shows {name!r} at {self.labels[k]} and does not declare it; `observed` has {', '.join(known)}."
            )
        elif tensor.requires_grad and self.hooks.faults.strict:
            missing = [name for name in known if (k, name) not in self._seen]
            if missing:
                raise FlowscopeError(
                    f"{rule} declares {', '.join(missing)} in `observed` and does not show it at {self.labels[k]}: "
                    "call self.observe(site, name, tensor) in `merge`."
                )

    def see(self, k: int, name: str, tensor: Tensor, through: Tensor) -> None:
        """Register the deposit of what a connection shows at site k."""
        sums = self.sums[name]
        recorded = torch.is_grad_enabled()  # parts of a parameter require gradients without it too
        if not through.requires_grad or not recorded:
            if self.in_training and not recorded and not is_compiling():
                with full_precision(tensor):
                    sums.without_gradient(k, tensor)
            return
        if not is_compiling():
            if not in_backward():
                self._hooked.add((k, name))
            elif (k, name) in self._hooked:
                return  # a checkpoint recomputes what waits for its gradient already, perhaps as a view of the same x
        with full_precision(tensor):
            values = sums.sums(k, tensor)
        if values is not None:
            self.hooks.on_gradient(through, self.part, partial(self._deposit, (k, name), values), (k, name))

    def _deposit(self, row: tuple[int, str], values: Sums, gradient: Tensor) -> None:
        del gradient
        self.buffer.add(self._rows[row], 0, values)

    def forget(self) -> None:
        """Drop what was deposited and remembered."""
        self.buffer.clear()
        self.start_forward()

    def metrics(self, sums: Array) -> dict[str, tuple[Array, list[str]]]:
        """Return name -> (values, labels) from what the buffer held at the end of the step."""
        rows = {name: self.rows_of(name, sums) for name in self.sums}
        with np.errstate(all="ignore"):  # 0 / 0 where a site was not seen
            out = {name: values for one in self.sums.values() for name, values in one.values(rows[one.name]).items()}
        for name in self.owners[0][1].constants:
            out[name] = np.array([getattr(connection, name)[site] for _, connection, site in self.owners])
        factors = [
            connection.carry_factor(site, {name: table[k] for name, table in rows.items()})
            for k, (_, connection, site) in enumerate(self.owners)
        ]
        if None not in factors:
            out["shortcut_product"] = site_summaries.shortcut_product(factors)
        # a value between two neighbours is that of the second
        return {name: (values, self.labels[len(self.labels) - len(values) :]) for name, values in out.items()}

    def rows_of(self, name: str, sums: Array) -> Array:
        """Return [K, columns] of what is shown under a name; 0 where nothing was."""
        table = np.zeros((len(self.labels), self.sums[name].columns))
        for k in range(len(self.labels)):
            row = self._rows.get((k, name), len(sums))
            if row < len(sums):
                table[k] = sums[row, : table.shape[1]]
        return table

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
