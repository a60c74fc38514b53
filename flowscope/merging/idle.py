"""Norms of the model that a mode leaves unused are frozen: DDP would wait for their gradients, which never come.

`keel-postln` on a post-norm model skips the norms of the flow's first two sub-layers (Keel 3.1). They stay where they
are, under their names; `unwrap` makes them trainable again.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from flowscope.merging.connection import Connection

_MARK = "flowscope_idle"


def freeze_idle(connections: Iterable[Connection]) -> int:
    """Freeze the parameters of the norms that no site goes through any more; return how many norms there were."""
    idle: list[nn.Module] = []
    used: set[int] = set()
    for connection in connections:
        for site in range(connection.sites):
            norm = connection.norm_after(site)
            if norm is not None:
                used.update(id(p) for p in norm.parameters())
            elif connection.bypass_outer[site] and (existing := connection.existing_norms[0][site]) is not None:
                idle.append(existing)
    frozen = 0
    for norm in idle:
        names = [name for name, p in norm.named_parameters() if p.requires_grad and id(p) not in used]
        if names:
            vars(norm)[_MARK] = names
            frozen += 1
        for name in names:
            norm.get_parameter(name).requires_grad_(False)
    return frozen


def thaw_idle(model: nn.Module) -> None:
    """Undo `freeze_idle`."""
    for module in model.modules():
        for name in vars(module).pop(_MARK, ()):
            module.get_parameter(name).requires_grad_(True)
