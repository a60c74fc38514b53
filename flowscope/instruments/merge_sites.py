"""What the connections of wrapped blocks show of their merge sites, and the gradients of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from flowscope.config import WatchConfig
from flowscope.discovery.view import ModelView
from flowscope.instruments.instrument import Array, Instrument, Taken, table_rows
from flowscope.metrics import Metric
from flowscope.probes.hooks import Hooks
from flowscope.probes.record_builder import RecordBuilder
from flowscope.probes.site_summaries import ALPHA, GATES, MIXING
from flowscope.probes.sites import SiteObserver, group_by_flow
from flowscope.records import FlowLayout

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

    def metrics_of(self, sums: Array) -> dict[str, tuple[Array, list[str]]]:
        """Name -> (values, labels) from the sums of a step."""
        raise NotImplementedError

    def take(self) -> Taken:
        """The sums at the sites."""
        assert self.buffer is not None
        return Taken(f"site {self.flow}", self.buffer.take(), self._read, "table")

    def _read(self, out: RecordBuilder, parts: list[Array]) -> None:
        assert self.buffer is not None
        if self.flow in {layout.name for layout in out.layouts}:
            out.within(self.flow)
        else:  # its blocks are in no watched flow
            out.flow(FlowLayout(self.flow, "blocks", (), ()))
        for name, (values, labels) in self.metrics_of(table_rows(parts, self.buffer.columns)).items():
            out.add(name, values, labels)
        norms = dict(zip(*out.entries("param_grad_norm"), strict=True))
        for name, (values, labels) in grad_norms(self.groups, norms).items() if norms else ():
            out.add(name, values, labels)


class MergeSites(SitesOfAFlow):
    """The sites of the connections that `wrap` put into one flow."""

    name = "sites"

    def __init__(self, connections: Sequence[tuple[str, Any]], flow: str, config: WatchConfig) -> None:
        self._connections, self.flow, self._config = connections, flow, config

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One a wrapped flow."""
        return [cls(group, name, config) for name, group in group_by_flow(view.connections, view.flows)]

    @property
    def fuse(self) -> str:
        """That of the flow."""
        return f"sites {self.flow}"

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Let the connections show what they declare."""
        self._sites = SiteObserver(self._connections, self.flow, self._config, hooks.switch, hooks)
        self.buffer = self._sites.buffer
        self.groups = self._sites.gradient_groups()

    def layout(self) -> list[Any]:
        """Rule and labels."""
        return [self.flow, self._sites.mode, self._sites.labels]

    def start_forward(self) -> None:
        """What was shown before is no neighbour of what comes."""
        self._sites.start_forward()

    def start_evaluation(self) -> None:
        """What is shown now is not counted."""
        self._sites.in_training = False

    def drop(self) -> None:
        """Forget also what was remembered."""
        self._sites.forget()

    def close(self) -> None:
        """Take the observers off the connections."""
        self._sites.close()

    def metrics_of(self, sums: Array) -> dict[str, tuple[Array, list[str]]]:
        """As the rule gives them."""
        return self._sites.metrics(sums)


def grad_norms(groups: Sequence[Group], norms: dict[str, float]) -> dict[str, tuple[Array, list[str]]]:
    """connection_grad_norm and connection_grad_norm_generators per connection, from the parameters' gradient norms."""
    if not groups:
        return {}
    labels = [label for label, _, _ in groups]

    def joint(names: Sequence[str]) -> float:
        values = [norms[name] for name in names if not np.isnan(norms.get(name, np.nan))]
        return float(np.sqrt(np.sum(np.square(values)))) if values else float("nan")

    out = {"connection_grad_norm": (np.array([joint(static) for _, static, _ in groups]), labels)}
    if any(generators for _, _, generators in groups):
        values = np.array([joint(generators) for _, _, generators in groups])
        out["connection_grad_norm_generators"] = (values, labels)
    return out
