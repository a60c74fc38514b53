"""What is in a model, found once: `watch` makes one `ModelView`, and all instruments read it.

The modules are walked once. Each kind is looked for among them when it is first asked for, and kept.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn

from flowscope.errors import FlowscopeError, nearest
from flowscope.model.flows import plan_flows
from flowscope.model.gates import GateCandidate, find_gates
from flowscope.model.hyper_connections import KnownConnection, find_hyper_connections
from flowscope.model.parameters import ParameterList
from flowscope.model.plan import FlowPlan, display_path
from flowscope.model.routers import Router, find_routers
from flowscope.model.structure import (
    Named,
    activation_kind,
    is_dynamics,
    is_equilibrium_layer,
    is_map,
    is_ours,
    join,
    keeps_statistics,
    outermost,
)
from flowscope.model.tree import ModuleTree


class ModelView:
    """The parts of one model, each kind as it was when first asked for; holds the model as long as it lives.

    Args:
        model: the user's.
        flows: paths or patterns of the flows to use instead of the discovered ones, as in `find_flows`.
        gates: patterns of modules that are gates because the user says so.
        parameters: patterns of the parameters to look at, "!" before those to leave out; none for all.

    Attributes:
        model: likewise.
        tree: its modules, which can be read again where they change.
        stages: prefixes of the paths of what a solver evaluates, as was seen when it ran: evaluations are no chain.
    """

    def __init__(
        self,
        model: nn.Module,
        flows: Sequence[str] | None = None,
        gates: Sequence[str] = (),
        parameters: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.tree = ModuleTree(model)
        self.stages: set[str] = set()
        self._flow_paths, self._gate_patterns, self._parameters = flows, gates, parameters

    @property
    def modules(self) -> tuple[Named, ...]:
        """(path, module) of the model and all in it, each once, under its first path, in module order."""
        return self.tree.modules

    @cached_property
    def flows(self) -> FlowPlan:
        """The depth axes: discovered, or those the user named.

        Raises:
            FlowscopeError: a path or pattern of the user's names none.
        """
        return plan_flows(self.modules, self._flow_paths)

    @cached_property
    def connections(self) -> list[Named]:
        """The connections that `wrap` put in, one a wrapped block."""
        return [(path, module) for path, module in self.modules if is_ours(module)]

    @cached_property
    def hyper_connections(self) -> list[KnownConnection]:
        """The merge sites that other packages put in."""
        return find_hyper_connections(self.modules)

    @cached_property
    def routers(self) -> list[Router]:
        """The routers of mixtures of experts."""
        return find_routers(self.modules)

    @cached_property
    def own(self) -> frozenset[str]:
        """Names of the parameters that are this process' own, of many: its part of the experts, what DDP leaves out."""
        parts = tuple(f"{router.part}." for router in self.routers if router.part)
        held = {name for name, _ in self.model.named_parameters() if parts and name.startswith(parts)}
        for path, module in self.modules:
            held |= {join(path, name) for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        return frozenset(map(display_path, held))

    @cached_property
    def gates(self) -> list[GateCandidate]:
        """The modules that may be gates, none inside a router."""
        return find_gates(self.modules, [router.path for router in self.routers])

    @cached_property
    def named_gates(self) -> list[Named]:
        """The modules that are gates because the user says so.

        Raises:
            FlowscopeError: a pattern matches no module.
        """
        patterns, inside = self._gate_patterns, self.modules[1:]
        for pattern in patterns:
            if not any(_matches(path, pattern) for path, _ in inside):
                raise FlowscopeError(
                    f"watch(gates=...): {pattern!r} matches no module of {type(self.model).__name__}. Expected paths "
                    "as in model.named_modules(), where * matches anything, of modules whose outputs are gates in "
                    "(0, 1)."
                )
        return [(path, module) for path, module in inside if any(_matches(path, pattern) for pattern in patterns)]

    @cached_property
    def dynamics(self) -> list[Named]:
        """The right-hand sides of differential equations, none inside another; the model itself may be one."""
        return list(outermost(self.modules, is_dynamics))

    @cached_property
    def maps(self) -> list[Named]:
        """The modules that may be iterated to a fixed point, none inside another."""
        return [named for named in outermost(self.modules, is_map) if named[0]]

    @cached_property
    def equilibrium_layers(self) -> list[Named]:
        """The layers that solve for a fixed point and say how it went, none inside another."""
        return [named for named in outermost(self.modules, is_equilibrium_layer) if named[0]]

    @cached_property
    def activations(self) -> list[tuple[str, nn.Module, str]]:
        """(path, module, kind) of what shows activations: see `activation_kind`."""
        return [(p, module, kind) for p, module in self.modules if (kind := activation_kind(module)) is not None]

    @cached_property
    def parameters(self) -> ParameterList:
        """The parameters as they are now, by number and name.

        Raises:
            FlowscopeError: a pattern of the user's matches none.
        """
        names = [display_path(name) for name, _ in self.model.named_parameters()] if self._parameters else []
        for pattern in self._parameters:
            if not any(fnmatch.fnmatchcase(name, pattern.removeprefix("!")) for name in names):
                raise FlowscopeError(
                    f"watch(parameters=...): {pattern!r} matches no parameter of {type(self.model).__name__}."
                    f"{nearest(pattern, names)} Expected names as in model.named_parameters(), where * matches "
                    "anything and a leading ! leaves out."
                )
        return ParameterList(self.tree, self._parameters)

    @cached_property
    def devices(self) -> set[torch.device]:
        """Where parameters are."""
        held = [parameter for _, module in self.modules for parameter in module._parameters.values()]
        return {parameter.device for parameter in held if parameter is not None}

    @cached_property
    def batch_norms(self) -> list[Named]:
        """The normalisations that keep running statistics."""
        return [(path, module) for path, module in self.modules if keeps_statistics(module)]


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(display_path(path), pattern)
