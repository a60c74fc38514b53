"""What the other tools look at, collected in the same run: plain numbers of each layer, every ten steps.

Axis letters: U units.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.faults.case import Program

EVERY = 10
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax)


@dataclass
class Weight:
    """One parameter at one probe; numbers of its gradient are None where it has none."""

    name: str
    is_matrix: bool
    norm: float
    largest: float
    variance: float
    finite: bool
    tiny: float  # share of entries below 1e-5
    grad_norm: float | None = None
    grad_mean: float | None = None  # mean |g|
    grad_zero: float | None = None  # share of exact zeros
    grad_spread: float | None = None  # 5 % to 95 % range
    grad_finite: bool = True
    update: float = math.nan  # |step| over |weight|
    same: bool = False  # the step left it as it was


@dataclass
class Layer:
    """One activation (or the last layer) at one probe."""

    name: str
    kind: str
    dead: float  # share of units that are 0 for the whole batch (95th percentile below 1e-5)
    inactive: float  # share of units on for less than 1 % of the batch
    nonpositive: float  # share of outputs <= 0
    saturated: float  # share of units whose input lies in the flat part (SageMaker's limits)
    saturated5: float  # share of inputs beyond -5 or 5
    mean: float
    magnitude: float
    std: float
    finite: bool


@dataclass
class Probe:
    """One probed step."""

    step: int
    loss: float
    accuracy: float | None
    weights: list[Weight] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether loss, weights, gradients and activations are."""
        return (
            math.isfinite(self.loss)
            and all(w.finite and w.grad_finite for w in self.weights)
            and all(layer.finite for layer in self.layers)
        )

    @property
    def matrices(self) -> list[Weight]:
        """The weight matrices that got a gradient, from the input."""
        return [w for w in self.weights if w.is_matrix and w.grad_norm is not None]


def pack(probes: list[Probe]) -> list[dict[str, Any]]:
    """JSON-ready; `unpack` is the inverse."""
    return [asdict(probe) for probe in probes]


def unpack(rows: list[dict[str, Any]]) -> list[Probe]:
    """The probes that `pack` was given."""
    return [
        Probe(
            row["step"],
            row["loss"],
            row["accuracy"],
            [Weight(**weight) for weight in row["weights"]],
            [Layer(**layer) for layer in row["layers"]],
        )
        for row in rows
    ]


class Spectator:
    """Collects probes of a run; takes its own hooks away again."""

    def __init__(self, program: Program) -> None:
        self.program, self.probes = program, []
        self._on, self._layers, self._weights = False, [], []
        self._handles: list[Any] = [program.optimizer.register_step_pre_hook(self._before)]
        last = [m for m in program.model.modules() if isinstance(m, nn.Linear)][-1:]
        for name, module in program.model.named_modules():
            if isinstance(module, ACTIVATIONS) or module in last:
                self._handles.append(module.register_forward_hook(self._hook(name)))

    def begin(self, step: int) -> None:
        """A step is about to start."""
        self._on = step % EVERY == 0
        self._layers, self._weights = [], []

    def end(self, step: int, loss: Tensor) -> None:
        """A step has ended."""
        if not self._on:
            return
        self._on = False
        for name, weight, before in self._weights:
            after = name.detach()
            weight.same = bool(torch.equal(after, before))
            weight.update = float((after - before).norm()) / max(weight.norm, 1e-9)
        measured = self.program.accuracy and self.program.quality is not None and step % (2 * EVERY) == 0
        accuracy = self.program.quality() if measured else None
        weights = [weight for _, weight, _ in self._weights]
        self.probes.append(Probe(step, float(loss), accuracy, weights, self._layers))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str):
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if self._on and torch.is_grad_enabled():
                self._layers.append(layer_numbers(name, module, args[0].detach(), output.detach()))

        return hook

    def _before(self, *_: Any) -> None:
        if self._on and not self._weights:
            for name, parameter in self.program.model.named_parameters():
                numbers = weight_numbers(name, parameter)
                self._weights.append((parameter, numbers, parameter.detach().clone()))


def weight_numbers(name: str, parameter: Tensor) -> Weight:
    """The numbers of one parameter and its gradient."""
    value = parameter.detach().float()
    weight = Weight(
        name,
        value.dim() > 1,
        float(value.norm()),
        float(value.abs().max()),
        float(value.var(unbiased=False)),
        bool(torch.isfinite(value).all()),
        float((value.abs() < 1e-5).float().mean()),
    )
    if parameter.grad is not None:
        grad = parameter.grad.detach().float()
        weight.grad_norm, weight.grad_mean = float(grad.norm()), float(grad.abs().mean())
        weight.grad_zero = float((grad == 0).float().mean())
        low, high = np.quantile(grad.flatten()[:4096].numpy(), [0.05, 0.95])
        weight.grad_spread, weight.grad_finite = float(high - low), bool(torch.isfinite(grad).all())
    return weight


def layer_numbers(name: str, module: nn.Module, before: Tensor, output: Tensor) -> Layer:
    """The numbers of one activation; units are the last axis, channels of images the first behind the batch."""
    rows = [
        x.float().movedim(1, -1).flatten(0, -2) if x.dim() == 4 else x.float().flatten(0, -2) for x in (before, output)
    ]
    z, out = rows
    kind = type(module).__name__
    flat = torch.zeros_like(z, dtype=torch.bool)
    if isinstance(module, nn.Tanh):
        flat = z.abs() > 9.4999
    elif isinstance(module, nn.Sigmoid):
        flat = (z < -23) | (z > 16.99999)
    top = out.abs().quantile(0.95, dim=0)
    return Layer(
        name,
        kind,
        float((top < 1e-5).float().mean()),
        float(((out > 0).float().mean(0) < 0.01).float().mean()),
        float((out <= 0).float().mean()),
        float((flat.float().mean(0) > 0.99).float().mean()),
        float((z.abs() >= 5).float().mean()),
        float(out.mean()),
        float(out.abs().mean()),
        float(out.std()),
        bool(torch.isfinite(out).all()),
    )
