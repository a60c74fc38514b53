"""What the gates of a wrapped model do: `gate_profile` over a loader, `keep_gates` for code of your own.

```python
profile = flowscope.gate_profile(model, loader, steps=20)
print(profile.summary())                      # one line a site, then thirds of the depth

with flowscope.keep_gates(model):
    model(batch)
model.blocks[0].connection.gate_value[0]      # the last t of site 0, detached, features last
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.merging.gates import GatedConnection
from flowscope.model.example_inputs import as_call, evaluating
from flowscope.model.sites import uncompiled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = 30


@dataclass(frozen=True)
class GateProfile:
    """The mean gate of every site, batch by batch.

    Attributes:
        labels: "block path#site", in depth order.
        means: [batches, sites], mean of t over all positions (and features) of a batch; NaN where a site did not run.
    """

    labels: list[str]
    means: NDArray[np.float64]

    def by_site(self) -> NDArray[np.float64]:
        """Return the mean over the batches, [sites]; NaN where a site never ran."""
        seen = ~np.isnan(self.means)
        total, count = np.where(seen, self.means, 0.0).sum(axis=0), seen.sum(axis=0)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def summary(self) -> str:
        """Return the gates by depth as text: one line a site, then the mean of the early, middle and late third."""
        values = self.by_site()
        width = max(len(label) for label in self.labels)
        lines = [f"mean gate t of {len(self.labels)} sites over {len(self.means)} batches (t weighs the branch)"]
        for label, value in zip(self.labels, values, strict=True):
            bar = "not seen" if np.isnan(value) else f"{value:.3f}  {'#' * round(_BARS * value)}"
            lines.append(f"  {label:<{width}}  {bar}")
        for name, third in zip(("early", "middle", "late"), np.array_split(values, 3), strict=True):
            if len(held := third[~np.isnan(third)]):
                lines.append(f"  {name} third: {held.mean():.3f}")
        return "\n".join(lines)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the mean gate over depth with the range over the batches, and return the axes (needs matplotlib).

        Raises:
            FlowscopeError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise FlowscopeError("GateProfile.plot needs matplotlib: pip install 'flowscope[plot]'.") from None
        if axes is None:
            axes = Figure(figsize=(8, 3.5), layout="constrained").subplots()
        depth, values = np.arange(len(self.labels)), self.by_site()
        seen = ~np.isnan(values)
        if seen.any():
            held = self.means[:, seen]
            axes.fill_between(depth[seen], np.nanmin(held, axis=0), np.nanmax(held, axis=0), alpha=0.3)
        axes.plot(depth, values, marker=".")
        axes.set(xlabel="site, input to output", ylabel="mean gate t", ylim=(0, 1))
        return axes


def gate_profile(model: nn.Module, loader: Iterable[Any], steps: int | None = None) -> GateProfile:
    """Run a wrapped model over batches and return what its gates do.

    In eval mode and without gradient; the mode of every module is as before afterwards. Uncompiled: a model compiled
    with `torch.compile` runs eagerly here.

    Args:
        model: wrapped with `keel` or `highway`.
        loader: batches as the model takes them: a tensor, a tuple or list of positional arguments, or a dict of keyword
            arguments. They are moved to the model's device.
        steps: how many batches at most; None: all of the loader.

    Raises:
        FlowscopeError: no gates in the model, steps below 1, no batches, or a batch of another kind.
    """
    gates = gated_connections(model)
    if steps is not None and steps < 1:
        raise FlowscopeError(f"gate_profile(steps=...): got {steps}, expected None or a number of batches >= 1.")
    device = next(gates[0][1].parameters()).device
    inner = uncompiled(model)
    rows: list[list[float]] = []
    with evaluating(inner), torch.no_grad(), keep_gates(model), torch.compiler.set_stance("force_eager"):
        for batch in loader:
            for _, connection in gates:
                connection.gate_value = {}
            args, kwargs = as_call(batch)
            inner(*[_to(a, device) for a in args], **{key: _to(value, device) for key, value in kwargs.items()})
            rows.append([_mean(connection, site) for _, connection in gates for site in range(connection.sites)])
            if len(rows) == steps:
                break
    if not rows:
        raise FlowscopeError("gate_profile(loader): got no batch, expected at least one (a generator used up before?).")
    labels = [f"{path.rpartition('.')[0]}#{site}" for path, c in gates for site in range(c.sites)]
    return GateProfile(labels, np.array(rows))


@contextlib.contextmanager
def keep_gates(model: nn.Module) -> Iterator[None]:
    """Fill `gate_value` ({site: t}, detached, features last) of every gated connection in each eager forward inside.

    Off otherwise: it keeps an activation alive, and would be a side effect under `torch.compile`. The values stay
    readable afterwards, until the next `keep_gates` begins.

    Raises:
        FlowscopeError: no gates in the model.
    """
    gates = [connection for _, connection in gated_connections(model)]
    before = [vars(connection).get("keep_gates") for connection in gates]
    for connection in gates:
        connection.gate_value = {}
        connection.keep_gates = True
    try:
        yield
    finally:
        for connection, kept in zip(gates, before, strict=True):
            if kept is None:
                del connection.keep_gates
            else:
                connection.keep_gates = kept


def gated_connections(model: nn.Module) -> list[tuple[str, GatedConnection]]:
    """Return (module path, connection) of every gated connection.

    Raises:
        FlowscopeError: there is none.
    """
    root = uncompiled(model)
    found = [(path, module) for path, module in root.named_modules() if isinstance(module, GatedConnection)]
    if not found:
        raise FlowscopeError(
            f"gate_profile: {type(root).__name__} has no gates, expected a model wrapped by "
            "flowscope.wrap(model, mode='keel') or mode='highway'."
        )
    return found


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _mean(connection: GatedConnection, site: int) -> float:
    value = (connection.gate_value or {}).get(site)
    return float("nan") if value is None else float(value.double().mean())
