"""How to train a wrapped model: groups, warm-up, clipping. The numbers are the hyper-connection articles' advice."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flowscope.errors import FlowscopeError
from flowscope.merging.modes import Rule, rule_of
from flowscope.merging.wrapping import connections


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.1,
    connection_lr_scale: float = 1.3,
    base_lr_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer; every trainable parameter is in exactly one, tied ones once.

    Groups (those without parameters are left out), by "name":

    - "base": matrices of the model itself, lr * base_lr_scale, decayed;
    - "base_no_decay": its vectors and scalars (norms, biases), the same rate;
    - "connection": what generates input-dependent coefficients (gate weights, W of `dhc`, phi of `mhc`), lr *
      connection_lr_scale, decayed;
    - "connection_no_decay": static coefficients, scales, gate biases, new norms, the same rate (Zhu et al. 2025: "the
      static component does not utilize weight decay, whereas the dynamic component does").

    The articles advise a connection_lr_scale of 1.2-1.5 and a base_lr_scale of .7-.8 with hyper-connections.

    Raises:
        FlowscopeError: a rate, scale or decay that is negative, or a model without trainable parameters.
    """
    given = {"lr": lr, "weight_decay": weight_decay, "connection_lr_scale": connection_lr_scale}
    for name, value in {**given, "base_lr_scale": base_lr_scale}.items():
        if not 0 <= value < math.inf:
            raise FlowscopeError(f"param_groups({name}=...): got {value}, expected a finite number >= 0.")
    generators, statics = _connection_parameters(model)
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():  # yields a tied parameter once
        if not parameter.requires_grad:
            continue
        if id(parameter) in generators:
            name = "connection"
        elif id(parameter) in statics:
            name = "connection_no_decay"
        else:
            name = "base" if parameter.dim() > 1 else "base_no_decay"
        groups.setdefault(name, []).append(parameter)
    if not groups:
        raise FlowscopeError(f"param_groups: {type(model).__name__} has no parameter with requires_grad=True.")
    return [
        {
            "name": name,
            "params": groups[name],
            "lr": lr * (connection_lr_scale if name.startswith("connection") else base_lr_scale),
            "weight_decay": 0.0 if name.endswith("no_decay") else weight_decay,
        }
        for name in ("base", "base_no_decay", "connection", "connection_no_decay")
        if name in groups
    ]


def _connection_parameters(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return the ids of the generators and of the other parameters of a model's connections."""
    generators = {id(p) for _, c in connections(model) for _, p in c.generator_parameters()}
    statics = {id(p) for _, c in connections(model) for _, p in c.static_parameters()}
    return generators, statics


def warmup_steps(base: int, mode: str | Rule) -> int:
    """Return the warm-up for a model wrapped in `mode`, from the `base` steps that its plain form uses.

    The articles advise 30-50 % more; where in that range is ours: the more a connection generates, the longer. `shc`
    gets 30 %, the gated modes and `keel-postln` 40 %, `dhc` and `mhc` 50 %, `residual` and `deepnorm`, which add
    nothing to learn, none; a class of your own says it (`warmup`). Rounded up.

    Raises:
        FlowscopeError: an unknown mode, or a negative base.
    """
    if base < 0:
        raise FlowscopeError(f"warmup_steps(base=...): got {base}, expected a number of steps >= 0.")
    return math.ceil(round(base * rule_of(mode).warmup, 6))


def clip_grad_norm_(model: nn.Module, max_norm: float, dynamic_scale: float = 0.7) -> Tensor:
    """Clip gradients in place, those of dynamic connections' generators more strictly; return the total before.

    First all gradients jointly to `max_norm` (as `torch.nn.utils.clip_grad_norm_`), then those of the generators (gate
    weights, W, phi) jointly to `dynamic_scale * max_norm`. Sharded gradients (DTensor) count with their global norm;
    the total is then replicated on every rank. Nothing synchronises with the host.

    Args:
        model: with or without connections; without any this is the usual clipping.
        max_norm: largest joint L2 norm.
        dynamic_scale: the generators' share of it; the articles advise 30 % stricter.

    Raises:
        FlowscopeError: max_norm or dynamic_scale is not positive.
    """
    if not max_norm > 0 or not dynamic_scale > 0:
        raise FlowscopeError(f"clip_grad_norm_: got max_norm={max_norm}, dynamic_scale={dynamic_scale}, expected > 0.")
    generators, _ = _connection_parameters(model)
    parameters = [p for p in model.parameters() if p.grad is not None]
    total = _clip(parameters, max_norm)
    dynamic = [p for p in parameters if id(p) in generators]
    if dynamic:
        _clip(dynamic, dynamic_scale * max_norm)
    return total


def _clip(parameters: list[nn.Parameter], limit: float) -> Tensor:
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    full_tensor = getattr(total, "full_tensor", None)
    total = full_tensor() if full_tensor is not None else total
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
    return total
