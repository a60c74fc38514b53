"""What the connections of wrapped blocks show of their merge sites, and the gradients of their parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.errors import FlowscopeError
from flowscope.faults import Hook
from flowscope.hooks.hooks import Hooks, in_backward
from flowscope.instruments.instrument import Array, Instrument, Taken, table_rows
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.model.plan import Flow, display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.records import FlowLayout
from flowscope.sums import site_metrics
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.site_metrics import ALPHA, GATES, MIXING
from flowscope.sums.statistics import Sums, full_precision

Group = tuple[str, Sequence[str], Sequence[str]]
"""A connection: its label, the names of its static parameters, and of those that generate coefficients."""


_gradient = partial(Metric, view="Gates", unit="loss / weight", scale="log", rows="sites", of_gradient=True)


class SitesOfAFlow(Instrument):
    """The merge sites of one flow, whoever put them in: a table of sums, a row or more a site.

    Attributes:
        flow: the flow's name.
        groups: its connections.
    """

    families = ()
    metrics = (
        *GATES,
        *MIXING,
        ALPHA,
        _gradient(
            "connection_grad_norm", "Gradient of a connection's own parameters.", healthy="above 0 after some steps"
        ),
        _gradient("connection_grad_norm_generators", "The same for what generates dynamic coefficients."),
    )
    flow: str
    groups: Sequence[Group]
    buffer: DepositBuffer

    def metrics_of(self, sums: Array) -> dict[str, tuple[Array, list[str]]]:
        """Name -> (values, labels) from the sums of a step."""
        raise NotImplementedError

    def take(self) -> Taken:
        """The sums at the sites."""
        return Taken(f"site {self.flow}", self.buffer.take(), self._read, "table")

    def _read(self, out: RecordBuilder, parts: list[Array]) -> None:
        if self.flow in {layout.name for layout in out.layouts}:
            out.within(self.flow)
        else:  # its blocks are in no watched flow
            out.flow(FlowLayout(self.flow, "blocks", (), ()))
        for name, (values, labels) in self.metrics_of(table_rows(parts, self.buffer.columns, self.buffer.rows)).items():
            out.add(name, values, labels)
        norms = dict(zip(*out.entries("param_grad_norm"), strict=True))
        for name, (values, labels) in grad_norms(self.groups, norms).items() if norms else ():
            out.add(name, values, labels)


class MergeSites(SitesOfAFlow):
    """The sites of the connections that `wrap` put into one flow: each shows what its rule declares.

    The same deposit on backward as for points: sums made in the forward are added when the observed tensor's gradient
    arrives, so checkpointing, accumulation and evaluation passes are counted rightly. What is shown, how it is summed
    and which metrics that gives is the rule's own matter (`merging/observed.py`). A block that runs several times in a
    forward is one row: means over its calls; products count it once.

    Attributes:
        labels: "block path#site", K of them, in depth order.
        owners: (connection, number of the site in its block) of each.
        sums: by the name under which something is shown.
    """

    name = "sites"

    def __init__(self, connections: Sequence[tuple[str, Any]], flow: str, config: WatchConfig) -> None:
        self.flow, self.fuse = flow, f"sites {flow}"
        sites = [(path, connection, site) for path, connection in connections for site in range(connection.sites)]
        numbers = {path.rpartition(".")[0]: itertools.count() for path, _, _ in sites}  # a block may have several
        blocks = [path.rpartition(".")[0] for path, _, _ in sites]
        self.labels = [f"{display_path(block)}#{next(numbers[block])}" for block in blocks]
        self.owners = [(connection, site) for _, connection, site in sites]
        declared = {name: sums for connection, _ in self.owners for name, sums in connection.observed.items()}
        self.sums = {name: sums(name, self.owners, config.positions) for name, sums in declared.items()}
        self.buffer = DepositBuffer(max((sums.columns for sums in self.sums.values()), default=1))
        # reserved now: tracing by torch.compile must meet no new row
        self._rows = {
            (k, name): self.buffer.new_row()
            for k, (connection, site) in enumerate(self.owners)
            for name in connection.shown_at(site)
        }
        self.groups = [group for path, connection in connections if any((group := group_of(path, connection))[1:])]
        self._hooked: set[tuple[int, str]] = set()
        self._seen: set[tuple[int, str | None]] = set()
        self.start_forward()

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One a wrapped flow."""
        return [cls(group, name, config) for name, group in group_by_flow(view.connections, view.flows)]

    def attach(self, view: ModelView | None, hooks: Hooks) -> None:
        """Let the connections show what they declare."""
        self._hooks = hooks
        for k, (connection, site) in enumerate(self.owners):
            if not site:
                connection.observer = hooks.hook(self.fuse, partial(self._shown, k), hooks.switch)

    def layout(self) -> list[Any]:
        """Rule and labels."""
        return [self.flow, self.owners[0][0].mode, self.labels]

    def start_forward(self) -> None:
        """What was shown before is no neighbour of what comes."""
        self._in_training = torch.is_grad_enabled()
        if self._in_training:
            self._hooked.clear()
        for sums in self.sums.values():
            sums.start_forward()

    def start_evaluation(self) -> None:
        """What is shown now is not counted."""
        self._in_training = False

    def drop(self) -> None:
        """Forget also what was remembered."""
        super().drop()
        self.start_forward()

    def close(self) -> None:
        """Take the observers off the connections."""
        for connection, _ in self.owners:
            if isinstance(connection.__dict__.get("observer"), Hook):
                del connection.observer

    def _shown(self, first: int, site: int, name: str | None, tensor: Tensor, through: Tensor | None) -> None:
        """A connection, whose first site in the flow is `first`, shows a tensor at one of its own."""
        if self._hooks.switch.paused:
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
        connection, site = self.owners[k]
        known, rule = connection.shown_at(site), type(connection).__name__
        if name in known:
            self._seen.add((k, name))
        elif name is not None:
            raise FlowscopeError(
                f"{rule} shows {name!r} at {self.labels[k]} and does not declare it; `observed` has {', '.join(known)}."
            )
        elif tensor.requires_grad and self._hooks.faults.strict:
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
            if self._in_training and not recorded and not is_compiling():
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
            deposit = partial(self._deposit, k, name, values)
            self._hooks.on_gradient(through, self.fuse, deposit, (k, name))

    def _deposit(self, k: int, name: str, values: Sums, gradient: Tensor | None) -> None:
        """Add what waited for the gradient, and what the gradient says itself."""
        self.buffer.add(self._rows[k, name], 0, values)
        more = self.sums[name].of_gradient(k, gradient) if gradient is not None else None
        if more is not None:
            self.buffer.add(self._rows[k, name], len(values), more)

    def metrics_of(self, sums: Array) -> dict[str, tuple[Array, list[str]]]:
        """As the rule gives them."""
        rows = {name: self.rows_of(name, sums) for name in self.sums}
        with np.errstate(all="ignore"):  # 0 / 0 where a site was not seen
            out = {name: values for one in self.sums.values() for name, values in one.values(rows[one.name]).items()}
        for name in self.owners[0][0].constants:
            out[name] = np.array([getattr(connection, name)[site] for connection, site in self.owners])
        factors = [
            connection.carry_factor(site, {name: table[k] for name, table in rows.items()})
            for k, (connection, site) in enumerate(self.owners)
        ]
        if None not in factors:
            out["shortcut_product"] = site_metrics.shortcut_product(factors)
        # a value between two neighbours is that of the second
        return {name: (values, self.labels[len(self.labels) - len(values) :]) for name, values in out.items()}

    def rows_of(self, name: str, sums: Array) -> Array:
        """Return [K, columns] of what is shown under a name; 0 where nothing was."""
        table = np.zeros((len(self.labels), self.sums[name].columns))
        for (k, shown), row in self._rows.items():
            if shown == name:
                table[k] = sums[row, : table.shape[1]]
        return table


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


def group_of(path: str, connection: Any) -> Group:
    """The parameters of a connection."""
    path = display_path(path)
    static = [f"{path}.{name}" for name, _ in connection.static_parameters()]
    return path, static, [f"{path}.{name}" for name, _ in connection.generator_parameters()]


def grad_norms(groups: Sequence[Group], norms: dict[str, float]) -> dict[str, tuple[Array, list[str]]]:
    """connection_grad_norm and connection_grad_norm_generators per connection, from the parameters' gradient norms."""

    def joint(names: Sequence[str]) -> float:
        values = [norms[name] for name in names if not np.isnan(norms.get(name, np.nan))]
        return float(np.sqrt(np.sum(np.square(values)))) if values else np.nan

    labels = [label for label, _, _ in groups]
    kinds = {"connection_grad_norm": [static for _, static, _ in groups]}
    if any(generators := [generators for *_, generators in groups]):
        kinds["connection_grad_norm_generators"] = generators
    return {name: (np.array([joint(names) for names in of]), labels) for name, of in kinds.items() if groups}
