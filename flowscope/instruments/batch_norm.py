"""How far the running statistics of BatchNorm-like modules are from the batches they see in training.

Evaluation uses the running statistics, training the batch's: where the two differ the model that is evaluated is not
the one that is trained. No evaluation pass is needed to see it.

Axis letters: B batch, C channels, P positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import floating_tensors, is_compiling
from flowscope.model.plan import display_path
from flowscope.model.structure import attribute
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.torch_internals import batch_statistics_of

ENTRIES = 4096
"""Entries of a channel that are looked at, about: evenly spaced positions, and samples where there are more of them."""
RECORDS = 4
"""The batches' statistics are averaged over about so many records, so that the noise of one batch does not count."""


class NormProbe:
    """The batch statistics that one module saw in the step under way."""

    def __init__(self, label: str, module: nn.Module) -> None:
        self.label, self.module = label, module
        self.eps = float(attribute(module, "eps", 0.0))
        self.sums: Tensor | None = None
        self.calls = 0
        self.average: Array | None = None
        self.records = 0

    def add(self, x: Tensor, node: Any) -> None:
        """Count the mean and the variance of a batch [B, C, ...], which the node of its output may have kept."""
        if (kept := batch_statistics_of(node)) is not None:
            mean, variance = kept[0].double(), kept[1].double().pow(-2) - self.eps
            count = x.numel() // x.shape[1]
            both = torch.stack([mean, variance * (count / max(1, count - 1))]).to(kept[0].dtype)
        else:
            variance, mean = torch.var_mean(some_of(x).float(), [0, *range(2, x.dim())], correction=1)
            both = torch.stack([mean, variance])
        self.sums = both if self.sums is None else self.sums + both
        self.calls += 1

    def take(self) -> Tensor | None:
        """Return [4, C]: mean and variance of the batches, running mean and variance; and start again."""
        sums, calls, self.sums, self.calls = self.sums, self.calls, None, 0
        running: list[Any] = [self.module.running_mean, self.module.running_var]
        if sums is None or any(x is None or x.shape != sums.shape[1:] or x.device != sums.device for x in running):
            return None
        return torch.cat([sums / calls, torch.stack(running).to(sums.dtype)])

    def gap(self, taken: Array) -> float:
        """The gap, with the batch statistics averaged over the last records."""
        self.records = min(self.records + 1, RECORDS)
        if self.average is None or not np.isfinite(self.average).all():
            self.average, self.records = taken[:2], 1
        else:
            self.average = self.average + (taken[:2] - self.average) / self.records
        return norm_gap(*self.average, *taken[2:], eps=self.eps)


class NormGaps(Instrument):
    """The modules of a model that keep running statistics."""

    name = "norm_gaps"
    metrics = (
        Metric(
            "norm_gap",
            "Distance of BatchNorm's running statistics from those of the batches.",
            formula="median over channels of |running mean - m| / s + |ln(running s / s)|",
            healthy="under 1 after 100 updates",
            view="Depth",
            rows="modules",
            ranks="first",
        ),
    )

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what these modules are given."""
        self._switch = hooks.switch
        self._probes = [NormProbe(display_path(path), module) for path, module in view.batch_norms]
        for probe in self._probes:
            hooks.after(probe.module, self.fuse, partial(self._after, probe), hooks.switch)

    def _after(self, probe: NormProbe, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._switch.paused or is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        x = next(floating_tensors((args, kwargs)), None)
        if x is not None and x.dim() >= 2 and x.shape[1] == _channels(module):
            with torch.no_grad():
                probe.add(x.detach(), output.grad_fn if isinstance(output, Tensor) else None)

    def take(self) -> Taken | None:
        """[4, C] of each module that saw a batch."""
        taken = [(probe, tensor) for probe in self._probes if (tensor := probe.take()) is not None]
        return Taken(self.name, [t for _, t in taken], partial(self._read, [p for p, _ in taken])) if taken else None

    def drop(self) -> None:
        """Forget the batches that were seen."""
        for probe in self._probes:
            probe.take()

    def _read(self, seen: list[NormProbe], out: RecordBuilder, parts: list[Array]) -> None:
        gaps = {probe: probe.gap(taken) for probe, taken in zip(seen, parts, strict=True)}
        values = np.array([gaps.get(probe, np.nan) for probe in self._probes])
        out.add("norm_gap", values, [probe.label for probe in self._probes])


def some_of(x: Tensor) -> Tensor:
    """Return a view of x [B, C, ...] with about `ENTRIES` evenly spaced entries a channel."""
    count = x.numel() // max(1, x.shape[1])
    for axis in (2, 3, 0):
        if count > ENTRIES and axis < x.dim():
            step = min(x.shape[axis], -(-count // ENTRIES))
            x = x[(slice(None),) * axis + (slice(None, None, step),)]
            count = x.numel() // x.shape[1]
    return x


def norm_gap(mean: Array, variance: Array, running_mean: Array, running_variance: Array, *, eps: float) -> float:
    """Return the median over channels of |running mean - mean| / s + |ln(running s / s)|, s^2 = variance + eps.

    In units of the batch's standard deviation. All arrays [C]. NaN where the median channel is not finite.
    """
    with np.errstate(all="ignore"):
        deviation, running = np.sqrt(variance + eps), np.sqrt(running_variance + eps)
        gaps = np.abs(running_mean - mean) / deviation + np.abs(np.log(running / deviation))
    return float(np.median(np.where(np.isinf(gaps), np.nan, gaps))) if gaps.size else float("nan")


def _channels(module: nn.Module) -> int:
    kept = module._buffers.get("running_mean")
    return int(kept.shape[0]) if kept is not None and kept.dim() else 0
