"""Gated connections: `keel` (the article's gate) and `highway`.

Direction, since sources differ: t multiplies the branch. sigmoid(+2) = .88 is almost the plain residual (`keel`) or
almost the bare branch (`highway`); sigmoid(-2) = .12 is mostly carry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from flowscope.merging.connection import Connection, ConnectionContext, ModeOptions, State, common_dtype
from flowscope.merging.observed import GateLogit
from flowscope.sums.site_metrics import highway_factor
from flowscope.sums.statistics import full_precision


class KeelOptions(ModeOptions):
    """`x + t*f`, t = sigmoid(W x + b)."""

    starting = ("init_bias",)
    init_bias: float | Literal["auto"] = Field(
        "auto", description="+2 on pre-norm sites, else -2 or less by depth (`shut_bias`); a number is obeyed"
    )
    gate: Literal["token", "feature"] = Field("token", description="one gate a position, or one a feature")
    share_gate: Literal["site", "block"] = Field("site", description="one gate a site, or one for the block's sites")
    preserve: bool = Field(False, description="divide t by its first value, so that the output is kept at the start")


class HighwayOptions(ModeOptions):
    """`t*f + (1 - t)*x`, t = sigmoid(W x + b)."""

    starting = ("init_bias",)
    init_bias: float = Field(-2.0, description="negative starts toward carry (Srivastava et al. 2015)")
    gate: Literal["token", "feature"] = "feature"


def shut_bias(merges: int) -> float:
    """Return the first bias of a gate whose branch must not add up over depth: sigmoid(bias) = 1 / sqrt(merges).

    Not above -2, the bias of 70 merges.
    """
    return min(-2.0, -math.log(math.sqrt(merges) - 1.0)) if merges > 4 else -2.0


class Gate(nn.Module):
    """logit = W x + b on the last axis, W = 0 at the start: [..., D] -> [..., 1] or [..., D]."""

    def __init__(self, context: ConnectionContext, gates: int, bias: float) -> None:
        super().__init__()
        self.generator = context.parameter(gates, context.features)
        self.bias = context.parameter(gates, value=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logit of every position."""
        return functional.linear(x, self.generator.to(x.dtype), self.bias.to(x.dtype))


class GatedConnection(Connection):
    """What gated rules share: a gate a site (or one for the block), computed from the carry.

    Attributes:
        keep_gates: fill `gate_value` in every eager forward (it keeps an activation alive: off by default).
        gate_value: {site: last t}, detached, features last; None until asked for.
    """

    observed: ClassVar = {"gate_logit": GateLogit, "norm_input": None}
    warmup = 1.4
    keep_gates = False

    def __init__(self, context: ConnectionContext, options: Any, biases: tuple[float, ...]) -> None:
        super().__init__(context, options)
        width = 1 if options.gate == "token" else context.features
        self.init_biases = biases
        self.gates = nn.ModuleList(Gate(context, width, bias) for bias in biases)
        self.gate_value: dict[int, Tensor] | None = None

    @classmethod
    def describe(cls, connections: Sequence[Any]) -> str:
        """Return the first biases of the gates."""
        return f"gate bias {', '.join(f'{b:+g}' for b in sorted({b for c in connections for b in c.init_biases}))}"

    def logit(self, site: int, x: Tensor) -> Tensor:
        """Return W x + b of a site, [..., 1 or D], features last."""
        logit: Tensor = self.gates[site % len(self.gates)](self.features_last(x))
        return logit

    def branch_weight(self, site: int, t: Tensor) -> Tensor:
        """Return what the branch is multiplied by where the gate is t."""
        return t

    def transform(self, site: int, x: Tensor) -> Tensor:
        """Return t = sigmoid(W x + b) of a site, shaped to broadcast over x."""
        logit = self.logit(site, x)
        self.observe(site, "gate_logit", logit)
        t = torch.sigmoid(logit)
        if self.keep_gates and not torch.compiler.is_compiling():
            self.gate_value = {**(self.gate_value or {}), site: t.detach()}
        return self.features_back(t)


class KeelConnection(GatedConnection):
    """`t*(x + f) + (1 - t)*x`, which is `x + t*f` (the gated-highway article, 3.2): a gated residual.

    With `preserve`, t is divided by its first value sigmoid(b0), so the output is kept at the start.
    The carry's factor is 1 whatever t is, and so is `shortcut_product`.
    """

    mode = "keel"
    Options = KeelOptions
    options: KeelOptions

    def __init__(self, context: ConnectionContext, options: KeelOptions) -> None:
        count = 1 if options.share_gate == "block" else context.sites
        shut = shut_bias(context.total_sites)
        auto = tuple(2.0 if kind == "pre" else shut for kind in context.norm_kinds[:count])
        biases = auto if options.init_bias == "auto" else (float(options.init_bias),) * count
        super().__init__(context, options, biases)

    def keeps_output(self) -> bool:
        """With `preserve`."""
        return self.options.preserve

    def function(self) -> dict[str, Any]:
        """With `preserve` the first biases are in the function."""
        function = super().function()
        return {**function, "init_bias": [*self.init_biases]} if self.options.preserve else function

    def carry_factor(self, site: int, sums: Mapping[str, NDArray[np.float64]]) -> float:
        """Return 1."""
        return 1.0

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return `x + t*f`."""
        with full_precision(x):
            x, f = common_dtype(x, f)
            return torch.addcmul(x, self.branch_weight(site, self.transform(site, x)), f), state

    def branch_weight(self, site: int, t: Tensor) -> Tensor:
        """Return t, or with `preserve` t over its first value."""
        return t * (1.0 + math.exp(-self.init_biases[site % len(self.gates)])) if self.options.preserve else t


class HighwayConnection(GatedConnection):
    """`t*f + (1 - t)*x` (Srivastava, Greff, Schmidhuber 2015).

    The carry's factor is 1 - t: `shortcut_product` is the product of 1 - t, exp(mean log(1 - t)) over positions.
    """

    mode = "highway"
    Options = HighwayOptions
    traps: ClassVar = {
        "pre": "highway on pre-norm blocks learns far less than the plain model (measured: it gains .22 nats where "
        "the plain one gains .56); keel or dhc is meant for these"
    }

    def __init__(self, context: ConnectionContext, options: HighwayOptions) -> None:
        super().__init__(context, options, (options.init_bias,) * context.sites)

    def carry_factor(self, site: int, sums: Mapping[str, NDArray[np.float64]]) -> float:
        """Return exp(mean log(1 - t))."""
        return highway_factor(sums["gate_logit"])

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return `x + t*(f - x)`."""
        with full_precision(x):
            x, f = common_dtype(x, f)
            return torch.lerp(x, f, self.transform(site, x).expand_as(x)), state
