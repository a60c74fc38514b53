"""How much the model's output depends on its input: the variation between the samples of a batch.

A model whose loss broadcasts (B, 1) against (B,), or whose inputs say nothing about the targets, ends at one answer for
everything, and no gradient shows it.

Axis letters: B samples, E entries of a sample's output.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import floating_tensors, is_compiling
from flowscope.model.parameters import ParameterList
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.statistics import at_least_single, real

NEAR = 8
"""So many nodes of the graph are looked at for the parameter that an output was made with."""
FURTHER = 3
"""So many outputs beside the first are looked at."""
SAMPLES = 64
ENTRIES = 1024
"""At most so many evenly spaced samples, and about so many entries of each, are looked at."""


SUMS = 5
"""Numbers of `variation`."""


class Outputs(Instrument):
    """The root's outputs: variance over samples and mean square, added up over the forwards of a step."""

    name = "output"
    metrics = (
        Metric(
            "output_spread",
            "Share of the output that differs between samples. Near 0 the model answers the same to everything.",
            formula="1 - ‖mean over samples‖² / mean over samples of ‖output‖²",
            view="Depth",
            scale="log",
            rows="model",
        ),
        Metric(
            "output_contrast",
            "The same of what tells a sample's values apart: log-probabilities have that of their logits. Near 0 the "
            "model prefers the same to everything.",
            formula="output_spread of output - mean over its values",
            view="Depth",
            scale="log",
            rows="model",
        ),
        Metric(
            "output_deviation",
            "How far the outputs of different samples lie apart, in the output's own unit.",
            formula="sqrt(mean over samples of ‖output - mean over samples‖²), of several passes their mean inside",
            view="Depth",
            scale="log",
            rows="model",
        ),
        Metric(
            "further_deviation",
            "output_deviation of what the model returns beside its first output (a code's mean and log-variance).",
            formula="sqrt(mean over samples of ‖output - mean over samples‖²)",
            view="Depth",
            scale="log",
            rows="model",
            drawn=False,
        ),
        Metric(
            "output_width",
            "Values the model answers with for each thing it is asked (classes, words).",
            view="Depth",
            rows="model",
        ),
    )

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        """By output, what `variation` gives; of those that got a gradient."""
        self._makers: list[str] = []
        """Of the outputs beside the first, the modules that made them."""
        self._width: int | None = None
        """Size of the output's class axis, at the last forward."""

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what the root returns."""
        self._switch, self._hooks, self._parameters = hooks.switch, hooks, view.parameters
        hooks.after(view.model, self.fuse, self._after, hooks.switch)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._switch.paused or is_compiling() or not torch.is_grad_enabled():
            return
        self._width = width_of(output)
        outputs = outputs_of(output)
        self._makers = [maker_of(x, self._parameters) or f"output {n}" for n, x in enumerate(outputs[1:], 1)]
        for number, x in enumerate(outputs):
            deposit = partial(self._deposit, number, variation(x.detach()))
            self._hooks.on_gradient(x, self.fuse, deposit, ("output", number))

    def _deposit(self, number: int, sums: Tensor, gradient: Tensor) -> None:
        if not self._switch.paused:
            held = self._sums.get(number)
            self._sums[number] = sums if held is None or held.device != sums.device else held + sums

    def take(self) -> Taken:
        """[5] of each output, one behind the other, zeros where one got no gradient; nothing where none did."""
        sums, self._sums = self._sums, {}
        none = next((s.new_zeros(s.shape) for s in sums.values()), None)
        parts = [] if none is None else [sums.get(n, none).to(none) for n in range(1 + max(sums))]
        read = partial(self._read, self._width, self._makers)
        return Taken(self.name, [torch.cat(parts)] if parts else [], read, "vector")

    def discard(self) -> None:
        """Forget what was seen."""
        self._sums = {}

    @staticmethod
    def _read(width: int | None, makers: list[str], out: RecordBuilder, parts: list[Array]) -> None:
        if parts:
            first, *further = parts[0].reshape(-1, SUMS)
            variance, square, own_variance, own_square, passes = first
            out.add("output_spread", np.array([variance / square if square > 0 else np.nan]), ("",))
            out.add("output_contrast", np.array([own_variance / own_square if own_square > 0 else np.nan]), ("",))
            with np.errstate(all="ignore"):
                out.add("output_deviation", np.array([np.sqrt(variance / passes)]), ("",))
                deviations = np.array([np.sqrt(row[0] / row[-1]) for row in further])
            if further:
                out.add("further_deviation", deviations, makers[: len(further)])
        if width is not None:
            out.add("output_width", np.array([float(width)]), ("",))


def outputs_of(output: Any) -> list[Tensor]:
    """The first floating-point tensor with gradient that holds a value for each of several samples (no loss).

    Then the next that hold several values for each of the same samples: [B, E].
    """
    found = (x for x in floating_tensors(output) if x.requires_grad and x.dim() and batched(x).shape[0] > 1)
    first = next(found, None)
    if first is None:
        return []
    alike = (x for x in found if x.dim() == 2 and 1 < len(x) == len(first) and x.shape[1] > 1)
    return [first, *islice(alike, FURTHER)]


def maker_of(x: Tensor, parameters: ParameterList) -> str:
    """The path of the module whose parameter the last operations before `x` used, "" where they used none."""
    nodes = [x.grad_fn]
    for node in islice(nodes, NEAR):  # grows while it is walked: breadth first
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found = (i for i, p in enumerate(parameters.current()) if p is leaf)
            return next(map(parameters.path, found), "")
        nodes += [child for child, _ in getattr(node, "next_functions", ()) if child is not None]
    return ""


def width_of(output: Any) -> int | None:
    """The size of the axis over which a cross-entropy of the output would choose.

    The last one of [B, E] and [B, T, E], the second of images [B, E, H, W], 1 for [B]; None without such a tensor.
    """
    x = next((x for x in floating_tensors(output) if x.requires_grad and x.dim()), None)
    return None if x is None else 1 if x.dim() == 1 else int(x.shape[1 if x.dim() > 3 else -1])


def batched(x: Tensor) -> Tensor:
    """An output with its samples first; the positions of a single sample stand for samples."""
    return x[0] if x.dim() > 2 and x.shape[0] == 1 else x


def variation(x: Tensor) -> Tensor:
    """Return [SUMS]: the variance over samples and the mean square of an output [B, ...], sums over sampled entries.

    Then the same two of the output less the mean over its values ([B, E], [B, T, E]: of each position), which is what a
    softmax makes of it, 0 where it has one value; and 1, which adds up to the number of passes.
    """
    x = batched(x)
    x = real(x[:: -(-x.shape[0] // SAMPLES)])
    rows = 1
    if x.dim() > 2:  # whole rows side by side: single entries would touch a cache line each
        images = x.dim() > 3
        x = x.flatten(1, -2)
        x = x[:, :: -(-x.shape[1] * x.shape[2] // max(ENTRIES, x.shape[2]))]
        rows = 1 if images else x.shape[1]
        x = x.flatten(1)
    x = x.reshape(x.shape[0], -1)
    x = at_least_single(x[:, :: -(-x.shape[1] // ENTRIES)])
    # from the first sample on: what is equal differs by exactly 0
    apart = x - x[:1]
    apart -= apart.mean(0)
    both = torch.stack([apart, x]).flatten(1)
    own = both.view(2 * x.shape[0], rows, -1) if x.shape[1] % rows == 0 else both.view(2 * x.shape[0], 1, -1)
    own = (own - own.mean(-1, keepdim=True)).reshape(both.shape)
    sums = torch.cat([torch.linalg.vecdot(both, both), torch.linalg.vecdot(own, own)]) / x.shape[0]
    return torch.cat([sums, sums.new_ones(1)])
