"""Statistics of the parameters around an optimizer step: norms, gradient norms, and the true change of the weights.

`param_grad_norm` is what the optimizer consumes (unscaled, reduced, after clipping). `update_ratio` is |dw| / |w| over
up to `update_samples` fixed, evenly spaced entries of each tensor before and after the step: exact for smaller tensors,
and no copy of the weights is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.discovery.plan import display_path
from flowscope.discovery.structure import is_norm
from flowscope.probes.statistics import wide

SAMPLE_BUDGET = 1 << 22


class ParameterObserver:
    """All floating-point parameters of a model, tied ones once, under their first name."""

    def __init__(self, model: nn.Module, config: WatchConfig) -> None:
        self._model, self._config = model, config
        self.names: list[str] = []
        self._places: list[tuple[nn.Module, str]] = []
        self._paths: list[tuple[str, str]] = []
        self._children = _children(model)
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen or not _floating(parameter):
                    continue
                seen.add(id(parameter))
                self.names.append(display_path(f"{prefix}.{key}" if prefix else key))
                self._places.append((module, key))
                self._paths.append((prefix, key))
        self.is_norm = np.array([float(is_norm(module)) for module, _ in self._places])
        share = SAMPLE_BUDGET // max(1, len(self.names))
        self._samples = max(1, min(config.update_samples, share))
        self._views: dict[int, tuple[tuple[int, int], Tensor]] = {}
        self._before: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.updates: dict[int, tuple[Tensor, Tensor]] = {}

    def current(self) -> list[Tensor | None]:
        """The parameters as they are now (they may have been replaced since attaching)."""
        return [module._parameters.get(key) for module, key in self._places]

    def trainable(self) -> NDArray[np.float64]:
        """1 where a parameter asks for a gradient, 0 where it is frozen."""
        return np.array([float(p is not None and p.requires_grad) for p in self.current()])

    def _follow_replaced_modules(self) -> None:
        """Find the parameters again by their paths where a submodule was replaced since attaching."""
        if all(siblings.get(name) is child for siblings, name, child in self._children):
            return
        modules = dict(self._model.named_modules(remove_duplicate=False))
        self._places = [(modules.get(path, held), key) for (path, key), (held, _) in zip(self._paths, self._places, strict=True)]
        self._children = _children(self._model)

    @torch.no_grad()
    def before_step(self) -> None:
        """Take the weights' norms and samples, before the optimizer changes them."""
        self._follow_replaced_modules()
        parameters = self.current()
        live = {i: p.detach() for i, p in enumerate(parameters) if p is not None and p.requires_grad}
        self.norms = dict(zip(live, _norms(list(live.values())), strict=True))
        self._before = self._sample(live)

    @torch.no_grad()
    def read_gradients(self, only: set[int] | None = None) -> None:
        """Take the gradients' norms.

        Args:
            only: ids of the parameters to read now (one optimizer's); None reads all that were not read yet.
        """
        found: dict[int, Tensor] = {}
        for i, parameter in enumerate(self.current()):
            if parameter is None or parameter.grad is None or i in self.gradients:
                continue
            if only is None or id(parameter) in only:
                gradient = parameter.grad.detach()
                found[i] = gradient.coalesce().values() if gradient.is_sparse else gradient
        self.gradients.update(zip(found, _norms(list(found.values())), strict=True))

    @torch.no_grad()
    def after_step(self) -> None:
        """Take the samples again: the change per tensor."""
        parameters = self.current()
        live = {i: p.detach() for i, p in enumerate(parameters) if p is not None and i in self._before}
        after = self._sample(live)
        shared = [i for i in after if after[i].shape == self._before[i].shape]
        if shared:
            before = [self._before[i] for i in shared]
            change = torch._foreach_sub([after[i] for i in shared], before)
            norms = zip(torch._foreach_norm(change), torch._foreach_norm(before), strict=True)
            self.updates = dict(zip(shared, norms, strict=True))
        self._before = after

    def _sample(self, live: dict[int, Tensor]) -> dict[int, Tensor]:
        """Copies of the sampled entries, fp32, one flat tensor a device cut into views."""
        by_device: dict[torch.device, list[int]] = {}
        for i, weight in live.items():
            by_device.setdefault(weight.device, []).append(i)
        out: dict[int, Tensor] = {}
        for indices in by_device.values():
            views = [self._view(i, live[i]) for i in indices]
            flat = torch.cat([v if v.dtype == torch.float32 else v.float() for v in views])
            out.update(zip(indices, torch.split(flat, [v.numel() for v in views]), strict=True))
        return out

    def _view(self, i: int, weight: Tensor) -> Tensor:
        stamp = (weight.data_ptr(), weight.numel())
        held = self._views.get(i)
        if held is not None and held[0] == stamp:
            return held[1]
        real = torch.view_as_real(weight) if weight.is_complex() else weight
        flat = real.reshape(-1)
        view = flat[:: max(1, -(-flat.numel() // self._samples))]
        if weight.is_contiguous():
            self._views[i] = (stamp, view)
        return view

    def take(self) -> list[tuple[Tensor, list[tuple[int, int]]]]:
        """Return this step's numbers, in vectors, each with the (row, parameter) its entries belong to.

        Rows: 0 norm, 1 gradient norm, 2 norm of the sampled change, 3 norm of the sampled entries before the step.
        """
        columns: dict[tuple[torch.device, torch.dtype], list[tuple[int, int, Tensor]]] = {}
        rows: list[tuple[int, dict[int, Tensor]]] = [(0, self.norms), (1, self.gradients)]
        rows += [(2 + k, {i: pair[k] for i, pair in self.updates.items()}) for k in range(2)]
        for row, values in rows:
            for i, value in values.items():
                columns.setdefault((value.device, value.dtype), []).append((row, i, value))
        self.norms, self.gradients, self.updates = {}, {}, {}
        return [
            (torch.stack([value for *_, value in items]), [(row, i) for row, i, _ in items])
            for items in columns.values()
        ]

    def drop(self) -> None:
        """Forget what was read for a step that did not happen."""
        self.norms, self.gradients, self.updates, self._before = {}, {}, {}, {}

    def has_sample(self) -> bool:
        """Whether `after_step` has something to compare with."""
        return bool(self._before)

    def optimized(self, optimizers: Iterable[Any]) -> NDArray[np.float64]:
        """1 where an optimizer holds the parameter, 0 where none does, NaN while none is known."""
        known = list(optimizers)
        if not known:
            return np.full(len(self.names), np.nan)
        held = {id(p) for optimizer in known for group in optimizer.param_groups for p in group["params"]}
        return np.array([float(p is not None and id(p) in held) for p in self.current()])


def _children(model: nn.Module) -> list[tuple[dict[str, nn.Module | None], str, nn.Module | None]]:
    return [(module._modules, name, child) for module in model.modules() for name, child in module._modules.items()]


def _floating(parameter: Tensor) -> bool:
    return (
        (parameter.is_floating_point() or parameter.is_complex())
        and not isinstance(parameter, nn.parameter.UninitializedParameter)
        and parameter.layout == torch.strided
    )


FP32_SAFE = (1e-15, 1e15)
"""Norms in this range are right to fp32 rounding; outside it, squares of entries under- or overflow fp32."""


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms with the exactness of fp64 accumulation.

    On the CPU one fused fp32 call, and fp64 again for the few whose norm leaves the safe range (reading a number there
    waits for nothing); elsewhere fp64 from the start.
    """
    fused = [i for i, t in enumerate(tensors) if t.dtype == torch.float32 and t.device.type == "cpu"]
    norms: dict[int, Tensor] = {}
    if fused:
        values = torch._foreach_norm([tensors[i] for i in fused])
        safe = [FP32_SAFE[0] < value < FP32_SAFE[1] for value in torch.stack(values).tolist()]
        norms = {i: value for i, value, right in zip(fused, values, safe, strict=True) if right}
    return [norms[i] if i in norms else _exact_norm(t) for i, t in enumerate(tensors)]


def _exact_norm(x: Tensor) -> Tensor:
    """The norm with fp64 accumulation: squares of gradients near 1e-22 vanish in fp32."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return torch.linalg.vector_norm(x, dtype=wide(x.device))
