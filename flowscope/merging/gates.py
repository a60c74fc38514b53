"""Gated connections: `keel` (the article's gate) and `highway`.

Direction, since sources differ: t multiplies the branch. sigmoid(+2) = .88 is almost the plain residual (`keel`) or
almost the bare branch (`highway`); sigmoid(-2) = .12 is mostly carry.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowscope.merging.connection import Connection, ConnectionContext, State, common_dtype, without_autocast
from flowscope.merging.options import HighwayOptions, KeelOptions


class Gate(nn.Module):
    """logit = W x + b on the last axis, W = 0 at the start: [..., D] -> [..., 1] or [..., D]."""

    def __init__(self, context: ConnectionContext, gates: int, bias: float) -> None:
        super().__init__()
        place = {"dtype": context.dtype, "device": context.device}
        self.generator = nn.Parameter(torch.zeros(gates, context.features, **place))  # type: ignore[arg-type]
        self.bias = nn.Parameter(torch.full((gates,), bias, **place))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logit of every position."""
        return functional.linear(x, self.generator.to(x.dtype), self.bias.to(x.dtype))


class GatedConnection(Connection):
    """What `keel` and `highway` share: a gate a site (or one for the block), computed from the carry.

    Observed besides carry and branch: "gate_logit" [..., 1 or D], feature axis last.

    Attributes:
        keep_gates: fill `gate_value` in every eager forward (it keeps an activation alive: off by default).
        gate_value: {site: last t}, detached, features last; None until asked for.
    """

    keep_gates = False

    def __init__(
        self, context: ConnectionContext, options: KeelOptions | HighwayOptions, biases: tuple[float, ...]
    ) -> None:
        super().__init__(context, options)
        width = 1 if options.gate == "token" else context.features
        self.init_biases = biases
        self.gates = nn.ModuleList(Gate(context, width, bias) for bias in biases)
        self.gate_value: dict[int, Tensor] | None = None

    def logit(self, site: int, x: Tensor) -> Tensor:
        """Return W x + b of a site, [..., 1 or D], features last."""
        logit: Tensor = self.gates[site % len(self.gates)](self.features_last(x))
        return logit

    def branch_weight(self, site: int, t: Tensor) -> Tensor:
        """Return what the branch is multiplied by where the gate is t."""
        del site
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
    options: KeelOptions

    def __init__(self, context: ConnectionContext, options: KeelOptions) -> None:
        count = 1 if options.share_gate == "block" else context.sites
        auto = tuple(2.0 if kind == "pre" else -2.0 for kind in context.norm_kinds[:count])
        biases = auto if options.init_bias == "auto" else (float(options.init_bias),) * count
        super().__init__(context, options, biases)

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return `x + t*f`."""
        self.observe_site(site, x, f)
        with without_autocast(x):
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

    def __init__(self, context: ConnectionContext, options: HighwayOptions) -> None:
        super().__init__(context, options, (options.init_bias,) * context.sites)

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        """Return `x + t*(f - x)`."""
        self.observe_site(site, x, f)
        with without_autocast(x):
            x, f = common_dtype(x, f)
            return torch.lerp(x, f, self.transform(site, x).expand_as(x)), state
