"""Where a mixture of experts sends its tokens: the load of each expert and how sure the router is.

A router is recognised by what it gives, never by one library's class: indices of the chosen experts, a mask of them, or
a score per expert.

Axis letters: N tokens, E experts, K experts chosen for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken, table_rows
from flowscope.metrics import Metric
from flowscope.model.nested import nested_tensors
from flowscope.model.plan import display_path
from flowscope.model.routers import Router
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.buffer import DepositBuffer
from flowscope.sums.payload import local
from flowscope.sums.statistics import full_precision

TOLERANCE = 1e-2
"""Scores that are nowhere negative and add up to 1 within this (bf16 rounds to 4e-3) are probabilities."""


_routing = partial(Metric, view="Routing", rows="modules")


class Routing(Instrument):
    """The routers of a model: loads and entropies, added up over the training forwards of a step.

    Counted in the forward, as indices carry no gradient: a recomputed forward counts twice, which changes no ratio.
    """

    name = "routing"
    metrics = (
        _routing(
            "route_entropy",
            "How undecided a router is, in units of log(experts). 1: all equal.",
            formula="mean over tokens of the entropy of the probabilities / log E",
            bounds=(0.0, 1.0),
        ),
        _routing(
            "route_max_violation",
            "Tokens of the fullest expert over the mean, less 1.",
            formula="largest load / mean load - 1",
            healthy="under 1; alert over 3",
            source="arXiv 2408.15664",
            limits=("expert_violation",),
            opens=True,
        ),
        _routing(
            "route_dead",
            "Share of experts without a token.",
            healthy="0; alert over 0.5",
            bounds=(0.0, 1.0),
            limits=("expert_dead",),
        ),
        _routing(
            "route_worst",
            "The violation of a router that sends all tokens to the same experts.",
            formula="E / K - 1",
            drawn=False,
        ),
        _routing(
            "route_load",
            "Tokens an expert gets in a step, mean. Under 4 the others say little.",
            formula="tokens K / E",
            unit="tokens",
            scale="log",
        ),
    )
    HEAD = 2
    """Sum of the tokens' entropies, tokens; then the load of each expert."""
    buffer: DepositBuffer

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers
        self._labels = [display_path(router.path) for router in routers]
        self._chosen = [router.chosen for router in routers]

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One, where the model has routers."""
        return [cls(view.routers)] if view.routers else []

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look at what the routers return."""
        self._switch = hooks.switch
        self.buffer = DepositBuffer(self.HEAD + max(router.experts for router in self._routers))
        for row, router in enumerate(self._routers):
            self.buffer.new_row()
            hooks.after(router.module, self.fuse, partial(self._after, row, router), hooks.switch)

    def _after(self, row: int, router: Router, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._switch.paused or not module.training or not torch.is_grad_enabled():
            return
        self._chosen[row] = chosen_in(output, router.experts, router.chosen)
        with torch.no_grad():
            sums = route_sums(output, router.experts, router.chosen)
        if sums is not None:
            self.buffer.add(row, 0, sums)

    def take(self) -> Taken:
        """The sums [routers, columns]."""
        return Taken(self.name, self.buffer.take(), self._read, "table")

    def _read(self, out: RecordBuilder, parts: list[Array]) -> None:
        """The metrics of `route_metrics`, one entry a router; NaN where no token was seen."""
        sums = table_rows(parts, self.buffer.columns, self.buffer.rows)
        rows = [
            route_metrics(row, router.experts, chosen)
            for row, router, chosen in zip(sums, self._routers, self._chosen, strict=True)
        ]
        for metric, values in zip(self.metrics, np.array(rows).T, strict=True):
            out.add(metric.name, values, self._labels)


def route_metrics(sums: Array, experts: int, chosen: int) -> tuple[float, float, float, float, float]:
    """Return the metrics of `Routing` in their order: of one router's sums, its experts E and those chosen K."""
    entropy, tokens = sums[:2]
    load = sums[2 : 2 + experts]
    certain = float(entropy / tokens / np.log(experts)) if tokens > 0 else float("nan")
    if not load.sum() > 0:
        return certain, float("nan"), float("nan"), float("nan"), float("nan")
    violation, dead = float(load.max() / load.mean() - 1.0), float((load == 0).mean())
    return certain, violation, dead, experts / chosen - 1.0, float(load.mean())


def route_sums(output: Any, experts: int, chosen: int) -> Tensor | None:
    """Return [2 + E]: sum of the tokens' entropies, tokens that have one, load of each expert.

    An integer tensor is the choice: a mask where its last axis is E (and K is not), else indices. A floating tensor
    whose last axis is E is a score per expert: probabilities where its rows are, else logits; of two, the one that is
    negative somewhere. Without a choice, the K best scores of a token are it. Nothing is read on the host.

    Args:
        output: what a router returned.
        experts: E.
        chosen: K.
    """
    choice, scores = _given(output, experts, chosen)
    if choice is None and not scores:
        return None
    reference = choice if choice is not None else scores[0]
    with full_precision(reference):
        logits = _logits(scores) if scores else None
        entropy = _entropy(logits) if logits is not None else reference.new_zeros(2, dtype=torch.float32)
        if choice is None:
            assert logits is not None
            choice = logits.topk(chosen, dim=-1).indices
        return torch.cat([entropy, _load(choice, experts, chosen)])


def chosen_in(output: Any, experts: int, chosen: int) -> int:
    """K as the router's own choice shows it: the last axis of its indices; what was known where it gives none."""
    choice, _ = _given(output, experts, chosen)
    indices = choice is not None and choice.dim() > 1 and choice.shape[-1] < experts
    return int(choice.shape[-1]) if choice is not None and indices else chosen


def _given(output: Any, experts: int, chosen: int) -> tuple[Tensor | None, list[Tensor]]:
    """Among what a router returned: its choice, and its scores."""
    tensors = [local(x) for x in nested_tensors(output) if x.layout == torch.strided and not x.is_meta]
    whole = [t for t in tensors if not t.is_floating_point() and not t.is_complex() and t.dim() and t.numel()]
    scores = [t for t in tensors if t.is_floating_point() and t.dim() and t.shape[-1] == experts and t.numel()]
    return next((t for t in whole if t.shape[-1] in (experts, chosen)), whole[0] if whole else None), scores


def _logits(scores: list[Tensor]) -> Tensor:
    """[N, E] fp32 of the scores to read, the last of two only where the first is nowhere negative."""
    first = scores[0].detach().float().flatten(0, -2)
    alike = [t for t in scores[1:] if t.numel() == scores[0].numel()]
    if not alike:
        return first
    return torch.where((first < 0).any(), first, alike[0].detach().float().reshape(first.shape))


def _entropy(scores: Tensor) -> Tensor:
    """Return [2]: sum over tokens of the entropy of each, and how many have one."""
    total = scores.sum(-1, keepdim=True)
    given = ((scores >= 0).all() & ((total - 1.0).abs() < TOLERANCE).all()) & torch.ones_like(total, dtype=torch.bool)
    chance = torch.where(given, scores / total, scores.softmax(-1))
    entropy = torch.special.entr(chance).sum(-1)
    finite = entropy.isfinite()
    return torch.stack([torch.where(finite, entropy, 0.0).sum(), finite.sum().to(entropy.dtype)])


def _load(choice: Tensor, experts: int, chosen: int) -> Tensor:
    """Return [E]: how many tokens each expert gets."""
    if choice.shape[-1] == experts and chosen != experts:
        return choice.detach().reshape(-1, experts).float().sum(0)
    index = choice.detach().reshape(-1).long()
    # an index that is no expert (padding, another rank's) goes to a place of its own
    index = torch.where((index >= 0) & (index < experts), index, experts)
    ones = torch.ones(index.shape, dtype=torch.float32, device=index.device)
    counted = torch.zeros(experts + 1, dtype=torch.float32, device=index.device)
    return counted.scatter_add(0, index, ones)[:experts]
