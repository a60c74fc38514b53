"""Which parameters train at all: frozen ones, those that no optimizer holds, their learning rates and precision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.parameters import ParameterList
from flowscope.model.view import ModelView
from flowscope.model.zero import steps_as_copy
from flowscope.record_builder import RecordBuilder

_parameter = partial(Metric, view="Parameters", rows="parameters")


class Wiring(Instrument):
    """The parameters of a model and the optimizers that hold them."""

    name = "wiring"
    metrics = (
        _parameter("param_trainable", "1 where the parameter asks for a gradient.", bounds=(0.0, 1.0)),
        _parameter("param_optimized", "1 where an optimizer holds the parameter.", bounds=(0.0, 1.0)),
        _parameter("param_lr", "Learning rate of the group that holds the parameter. Grey: none.", scale="log"),
        _parameter("param_is_norm", "1 where the parameter belongs to a normalisation layer.", bounds=(0.0, 1.0)),
        _parameter("param_epsilon", "Machine epsilon of the parameter's numbers.", scale="log"),
    )

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Nothing of the model is called."""
        self._parameters, self._hooks = view.parameters, hooks
        self._epsilons: tuple[list[torch.dtype | None], Array] = ([], np.zeros(0))

    def take(self) -> Taken:
        """No tensors: which parameters are trainable, which are in an optimizer, and their rates."""
        found: dict[str, Array] = {"param_trainable": trainable(self._parameters)}
        self._look(found)
        return Taken(self.name, [], partial(self._read, found), joined=partial(self._look, found))

    def _look(self, found: dict[str, Array], joined: Any = None) -> None:
        """Ask all known optimizers, one that `joined` after the step among them."""
        optimizers = self._hooks.optimizers()
        found["param_optimized"] = optimized(self._parameters, optimizers)
        found["param_lr"] = learning_rates(self._parameters, optimizers)

    def _read(self, found: dict[str, Array], out: RecordBuilder, parts: list[Array]) -> None:
        # parameters found since this step stand behind its own
        count = len(found["param_trainable"])
        known = {"param_is_norm": self._parameters.is_norm, "param_epsilon": self._precision()}
        for name, values in {**found, **known}.items():
            out.add(name, values[:count], self._parameters.names[:count])

    def _precision(self) -> Array:
        """The machine epsilon of each parameter's numbers: the relative distance from 1 to the next."""
        kinds = [None if p is None else p.dtype for p in self._parameters.current()]
        if kinds != self._epsilons[0]:
            known = {kind: np.nan if kind is None else torch.finfo(kind).eps for kind in set(kinds)}
            self._epsilons = kinds, np.array([known[kind] for kind in kinds])
        return self._epsilons[1]


def trainable(parameters: ParameterList) -> Array:
    """1 where a parameter asks for a gradient, 0 where it is frozen."""
    return np.array([float(p is not None and p.requires_grad) for p in parameters.current()])


def optimized(parameters: ParameterList, optimizers: Sequence[Any]) -> Array:
    """1 where an optimizer holds the parameter, 0 where none does, NaN while none is known or a copy is stepped."""
    if not optimizers:
        return np.full(len(parameters.names), np.nan)
    held = set[int]().union(*map(held_by, optimizers))
    now = parameters.current()
    return np.array(
        [np.nan if p is not None and steps_as_copy(p) else float(p is not None and id(p) in held) for p in now]
    )


def learning_rates(parameters: ParameterList, optimizers: Sequence[Any]) -> Array:
    """The learning rate of the group that holds each parameter (the last of several), NaN where none does."""
    rates: dict[int, float] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rates.update(dict.fromkeys(map(id, group["params"]), _rate(group.get("lr"))))
    return np.array([np.nan if p is None else rates.get(id(p), np.nan) for p in parameters.current()])


def held_by(optimizer: Any) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _rate(value: Any) -> float:
    """A group's learning rate as a number. One that lies on a device is not waited for: NaN."""
    known = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.device.type == "cpu")
    return float(value) if known else np.nan
