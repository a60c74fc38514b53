"""How sure attention is, and how far its logits have grown: largest logit, entropy and attention sink of each layer.

Seen where attention is computed, whatever computes it: `scaled_dot_product_attention`, `nn.MultiheadAttention`,
`flex_attention` or a softmax over a product. While a module that may hold attention runs in a sampled step, a
`TorchFunctionMode` looks at the calls inside: the model's own kernel runs as ever, and the logits of some rows are
computed once more beside it, from q and k, after scale, bias and mask.

Axis letters: B batch, H heads, T queries, S keys, R rows looked at (of T), D features of a head, N layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks import compiled
from flowscope.hooks.attention_calls import Rows, attention_modules, head_count
from flowscope.hooks.attention_layers import AttentionLayers
from flowscope.hooks.attention_pass import Later, Pass, later
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.attention_rows import HEADS, ROWS, SINK, Piles, Product, Seen, calls_sums, head_sums, row_values
from flowscope.sums.attention_table import AttentionStep, add, blank, combined, fitted
from flowscope.sums.statistics import full_precision, wide

WAITING = 16
"""So many calls of each layer wait to be added up, at most."""
MOST_HEADS = 128
"""More heads of a layer than this are taken for one, and more than SOME where no module says how many it has."""
SOME = 64

_LAYERS = partial(Metric, view="Attention", rows="modules")
ATTENTION: tuple[Metric, ...] = (
    _LAYERS(
        "attention_logit_max",
        "Largest attention logit of a layer (after scale, bias and mask, over all heads). One that keeps growing ends "
        "in a softmax that is one-hot, and in a run that diverges; over 100 is a fault, tens are usual.",
        formula="max over b, h, t, s of q_t . k_s * scale + bias",
        healthy="under 100, and not growing without end",
        source="Dehghani et al. 2023 (arXiv 2302.05442, section 3); Kimi K2 (arXiv 2507.20534, QK-Clip at 100)",
        scale="log",
        limits=("attention_logit",),
        logged=True,
    ),
    _LAYERS(
        "attention_logit_head",
        "The head that attention_logit_max is of.",
        formula="argmax over h",
        drawn=False,
    ),
    _LAYERS(
        "attention_logit_max_by_head",
        "Largest attention logit of each head of a layer. A layer with fewer heads than others ends in NaN.",
        formula="max over b, t, s of q_t . k_s * scale + bias, [layers, heads]",
        healthy="heads of a layer alike; one that runs away is what QK-Clip scales down",
        source="Kimi K2 (arXiv 2507.20534, QK-Clip by head)",
        scale="log",
        shape="matrix",
    ),
    _LAYERS(
        "attention_entropy",
        "Entropy of the rows of the attention matrix, in nats: 0 looks at one token, log S at all alike.",
        unit="nats",
        formula="mean over b, h, t of -sum_s p log p",
        healthy="between the two; a fall towards 0 in training is entropy collapse",
        source="Zhai et al. 2023 (arXiv 2303.06296)",
        logged=True,
    ),
    _LAYERS(
        "attention_sink",
        "Share of the attention that goes to the first token. Trained decoders have .3 to .9 in many layers.",
        formula="mean over b, h, t of p_1",
        healthy="no range: a sink is usual; all of it at 1 is a layer that does nothing",
        source="Xiao et al. 2024 (arXiv 2309.17453)",
        bounds=(0.0, 1.0),
    ),
)


class Attention(Instrument):
    """The attention layers of a model: each adds to its row of one table a device, which the traced ones need.

    Queries and keys are read when the forward ends, as long as its graph keeps them; else at the call. What is copied
    of them are logits, 256 KiB of them and as much room beside for calls of one shape (`Piles`), and of each call three
    numbers a row until the step ends.
    """

    name = "attention"
    metrics = ATTENTION

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One, where a module may hold attention."""
        held = attention_modules(view.modules)
        return [cls(held, config)] if held else []

    def __init__(self, held: Sequence[tuple[str, nn.Module]], config: WatchConfig) -> None:
        heads = {head_count(module) for _, module in held}
        self._rows = Rows(config.positions, max(heads) if len(heads) == 1 else 0)
        self._heads = min(max(heads), MOST_HEADS) if 0 not in heads else SOME
        self._layers = AttentionLayers(held, self.saw, self._begin)
        self._piles, self._may_wait = Piles(), True
        self._waiting: list[Seen] = []
        self._tables: dict[torch.device, Tensor] = {}
        self._known = np.zeros(len(held), bool)
        """[N] which have ever shown attention: they have a row in every record."""
        self._large, self._grows = config.attention_logit / 4, False
        """From a quarter of the limit on each sampled step is looked at; whether a layer is there."""
        self._shown = 0
        """So many heads the widest of them has."""

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look while the modules run."""
        self._hooks = hooks
        devices = {parameter.device for parameter in view.model.parameters()}
        for device in devices:
            self._table(device)
        self._layers.attach([module for _, module in view.modules], devices, hooks, self.fuse)

    def _table(self, device: torch.device) -> Tensor:
        """[N, 3 + H]."""
        if device not in self._tables:
            shape = len(self._known), HEADS + self._heads
            self._tables[device] = blank(torch.empty(shape, dtype=wide(device), device=device))
        return self._tables[device]

    def begin_step(self) -> None:
        """A sampled step begins: it looks in each where logits are large, else seldom."""
        self._layers.has_turn = self._hooks.switch.seldom or self._grows

    def start_forward(self) -> None:
        """A training forward of the model begins."""
        self._layers.start_forward()

    # -- what a layer does -------------------------------------------------------------------------------------------

    def saw(self, kind: str, out: Any, args: Any, kwargs: Any) -> None:
        """A torch function of some kind was called while a layer runs."""
        if not (is_compiling() or self._layers.calls()):
            return
        if kind == "scores":
            self._saw_product(out, args)
        elif kind != "softmax" or self._is_attention(args[0], kwargs.get("dim", args[1] if args[1:] else None)):
            self._saw_attention(kind, out if isinstance(out, Tensor) else out[0], args, kwargs)

    def _saw_product(self, out: Tensor, args: Any) -> None:
        if not is_compiling() and out.dim() > 2 and min(t.dim() for t in args if isinstance(t, Tensor)) > 2:
            self._layers.calls()[-1].products.add(tuple(out.shape[-2:]))

    def _is_attention(self, logits: Tensor, dim: Any) -> bool:
        """Whether a softmax is one over keys: of a product of this call; compiled, of as many keys as queries."""
        if logits.dim() < 3 or dim not in (-1, logits.dim() - 1) or not logits.is_floating_point():
            return False
        if is_compiling():
            return logits.shape[-1] == logits.shape[-2]
        return tuple(logits.shape[-2:]) in self._layers.calls()[-1].products

    def _saw_attention(self, kind: str, result: Tensor, args: Any, kwargs: Any) -> None:
        """A layer has computed attention: let its numbers wait for the gradient of the result."""
        if is_compiling():
            with torch.no_grad(), full_precision(result):
                rows = self._rows.of(kind)(*args, **kwargs)
                # at once: a table that the backward changes must not be what its forward has saved for it
                self._add_traced(head_sums(row_values(rows.logits() if isinstance(rows, Product) else rows)))
            return
        layer, forward = self._layers.calls()[-1].layer, self._layers.forward()
        call = Seen(layer.number)
        waits = forward is not None and self._may_wait and kind == "product"
        if waits and (waiting := later(call, result, args, kwargs)) is not None:
            forward.wait(waiting)
        else:
            with torch.no_grad(), full_precision(result):
                self._piles.add(call, self._rows.of(kind)(*args, **kwargs))
        if not result.requires_grad:
            self._count([call])
        elif forward is None:
            self._on_gradient(result, lambda gradient: self._count([call]))
        else:
            forward.join(call, layer, result)

    def _begin(self) -> Pass:
        return Pass(self._on_gradient, self._count, partial(self._hooks.faults.guard, self.fuse, self._read_rows))

    def _on_gradient(self, result: Tensor, arrived: Callable[[Tensor | None], None]) -> None:
        self._hooks.on_gradient(result, self.fuse, arrived, "attention")

    def _read_rows(self, waiting: Sequence[Later]) -> None:
        """The forward has ended: read the calls that have waited for it."""
        for call in waiting:
            if call.is_unchanged():
                with torch.no_grad():
                    self._piles.add(call.call, self._rows.of_product(*call.args, **call.kwargs))
            else:
                self._may_wait = False  # this call is not counted; from now on they are read at once

    def _count(self, calls: Sequence[Seen]) -> None:
        """These calls are trained."""
        self._waiting.extend(calls)
        if len(self._waiting) >= WAITING * len(self._known):
            self._settle()

    def _add_traced(self, sums: Tensor) -> None:
        table, mark = self._tables.get(sums.device), self._layers.marks.get(sums.device)
        if table is None or mark is None:
            return
        mine = torch.arange(table.shape[0], device=table.device) == mark
        table.copy_(torch.where(mine[:, None], combined(table, fitted(sums, table)), table))

    # -- the step ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Add up the calls that wait."""
        self._piles.read()
        waiting, self._waiting = self._waiting, []
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for layer, sums in calls_sums([call for call in waiting if call.values is not None]):
            by_device.setdefault(sums.device, []).append((layer, sums))
        for device, calls in by_device.items():
            add(self._table(device), calls)

    def discard(self) -> None:
        """Forget what was deposited."""
        self._waiting = []
        for table in self._tables.values():
            blank(table)

    def take(self) -> Taken | None:
        """Return the numbers of this step, and start again."""
        self._settle()
        seen = [table for table in self._tables.values() if not table.is_cpu or bool(table[:, ROWS].any())]
        tables = [table.clone() for table in seen]
        for table in seen:
            blank(table)
        known = self._known.any() and self._layers.has_turn
        if not tables and not known and not self._layers.unseen:
            return None
        step = AttentionStep(tables, len(self._known), self._heads)
        return Taken(self.name, tables, partial(self._read, step), step.parts)

    def _read(self, step: AttentionStep, out: RecordBuilder, parts: list[Array]) -> None:
        sums, largest, head, heads = step.numbers(parts)
        shown = sums[:, ROWS] > 0
        self._known |= shown
        self._grows = bool((largest[shown] > self._large).any())
        if self._layers.unseen and not self._known.all():
            out.note(compiled.NO_ATTENTION)
        if not self._known.any():
            return
        with np.errstate(invalid="ignore", divide="ignore"):
            means = sums[:, :ROWS] / sums[:, ROWS:]
        found = {
            "attention_logit_max": np.where(shown, largest, np.nan),
            "attention_logit_head": np.where(shown, head, np.nan),
            "attention_entropy": means[:, 0],
            "attention_sink": means[:, SINK],
        }
        if heads is not None:
            self._shown = max(self._shown, 1 + int(np.flatnonzero(np.isfinite(heads).any(0)).max(initial=0)))
            found["attention_logit_max_by_head"] = np.where(np.isfinite(heads), heads, np.nan)[:, : self._shown]
        labels = [layer.label for layer, known in zip(self._layers.all, self._known, strict=True) if known]
        for name, values in found.items():
            out.add(name, values[self._known], labels)
