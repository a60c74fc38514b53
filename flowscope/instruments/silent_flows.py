"""Flows of which no hook fired, though their parameters got gradients: a record says so."""

from __future__ import annotations

import numpy as np

from flowscope.hooks import compiled
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.records import metric_key


class SilentFlows(Instrument):
    """Compares what the flows and the parameters of a record say; stands behind both."""

    name = "silent_flows"

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing of the model is called."""
        self._hooks = hooks
        flows = [flow for flow in view.flows if not flow.fused]
        self._paths = {flow.name: [display_path(path) for path in flow.outputs] for flow in flows}

    def take(self) -> Taken:
        """Nothing of its own."""
        return Taken(self.name, [], self._read)

    def _read(self, out: RecordBuilder, parts: list[Array]) -> None:
        names, norms = out.entries("param_grad_norm")
        holder, turns = out.entries("param_optimizer")[1], out.entries("optimizer_turns")[1]
        if len(holder) == len(norms):  # without a turn a parameter still has the gradient of an earlier step
            norms = np.where(np.isin(holder, np.flatnonzero(turns > 0)), norms, np.nan)
        for at, layout in enumerate(out.layouts):
            paths, flow = self._paths.get(layout.name, ()), layout.name if at else None
            if not _seen(out, flow) and compiled.got_gradient(paths, names, norms):
                out.note(sentence := compiled.NEVER_FIRED.format(flow=layout.name))
                self._hooks.warn_once(sentence)


def _seen(out: RecordBuilder, flow: str | None) -> bool:
    """Whether some point of a flow has entries, or was called."""
    entries = out.entries(metric_key("nonfinite", flow))[1]
    calls = [out.entries(metric_key(name, flow))[1] for name in ("forward_calls", "tracked_calls")]
    return bool((~np.isnan(entries)).any()) or any(bool((counted > 0).any()) for counted in calls)
