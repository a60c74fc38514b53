"""How sure attention is, and how far its logits have grown: largest logit, entropy and attention sink of each layer.

Seen where attention is computed, whatever computes it: `scaled_dot_product_attention`, `nn.MultiheadAttention`,
`flex_attention` or a softmax over a product. While a module that may hold attention runs in a sampled step, a
`TorchFunctionMode` looks at the calls inside: the model's own kernel runs as ever, and the logits of some rows are
computed once more beside it, from q and k, after scale, bias and mask.

Axis letters: B batch, H heads, T queries, S keys, R rows looked at (of T), D features of a head, N layers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowscope.config import WatchConfig
from flowscope.hooks.attention_calls import Looking, Rows, attention_modules, head_count
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.attention_rows import (
    HEADS,
    ROWS,
    SINK,
    Product,
    blank,
    combined,
    fitted,
    head_sums,
    row_values,
    values_of,
    wider,
)
from flowscope.sums.payload import Part, Sharing
from flowscope.sums.statistics import full_precision, wide
from flowscope.torch_internals import HOOKED_INTERMEDIATES, in_backward, in_compiled_call, is_compiled

NOWHERE = -1
"""The mark where no layer runs."""
WAITING = 16
"""So many calls of a layer wait to be added up, at most."""
MOST_HEADS = 64
"""More heads of a layer than this are taken for one."""

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


class Layer:
    """One module inside which attention may run.

    Args:
        path: of the module.
    """

    def __init__(self, path: str) -> None:
        self.label = display_path(path)
        self.within = False
        """Whether another one is around it."""
        self.known = False
        """Whether it has ever shown attention: then it has a row in every record."""
        self.has_run = False
        """Whether it ran outside of compiled code."""
        self.entered = False
        """Whether a pass with gradient of the forward under way was seen."""
        self.marks: dict[torch.device, Tensor] = {}
        """[1] its number, on each device."""
        self.waiting: list[Tensor | Product] = []
        self.sums: Tensor | None = None

    def is_first_pass(self, *, recomputing: bool) -> bool:
        """Whether no earlier pass of a call waits for its gradient: a checkpoint's recomputation mostly is none."""
        if recomputing:
            return not self.entered
        self.entered = True
        return True

    def deposit(self, values: Tensor | Product, gradient: Tensor | None) -> None:
        """Keep the values [3, B, H, R] of a call's rows, or what they will be computed from."""
        del gradient
        self.waiting.append(values)
        if len(self.waiting) >= WAITING:
            self.sums = self.take()

    def take(self) -> Tensor | None:
        """[3 + H] what calls outside of compiled code deposited, None where there were none; and start again."""
        (taken,) = take_all([self])
        return taken


def take_all(layers: Sequence[Layer]) -> list[Tensor | None]:
    """What `Layer.take` gives, of many layers at once."""
    calls = [(layer, waiting) for layer in layers for waiting in layer.waiting]
    products = [waiting for _, waiting in calls if isinstance(waiting, Product)]
    computed = iter(values_of(products)) if products else iter(())
    values = [next(computed) if isinstance(waiting, Product) else waiting for _, waiting in calls]
    alike = len({(v.shape, v.device) for v in values}) == 1
    sums = list(head_sums(torch.stack(values)).unbind()) if alike else [head_sums(v) for v in values]
    found: dict[int, list[Tensor]] = {id(layer): [] if layer.sums is None else [layer.sums] for layer in layers}
    for (layer, _), numbers in zip(calls, sums, strict=True):
        found[id(layer)].append(numbers)
    for layer in layers:
        layer.waiting, layer.sums = [], None
    return [reduce(combined, found[id(layer)]) if found[id(layer)] else None for layer in layers]


@dataclass
class Call:
    """A call of a layer that is under way.

    Attributes:
        layer: which one.
        pushed: whether it put the mode on the stack.
        products: the last two axes of the products made in it.
    """

    layer: Layer
    pushed: bool
    products: set[tuple[int, ...]] = field(default_factory=set)


class Attention(Instrument):
    """The attention layers of a model.

    Outside of compiled code the layer of a call is the innermost module under way. What is traced may write nothing but
    tensors that exist: there a mark on the device says which layer runs, and each adds to its row of one table.
    """

    name = "attention"
    metrics = ATTENTION

    @classmethod
    def found_in(cls, view: ModelView, config: WatchConfig) -> Sequence[Instrument]:
        """One, where a module may hold attention."""
        held = attention_modules(view.modules)
        return [cls(held, config.positions)] if held else []

    def __init__(self, held: Sequence[tuple[str, nn.Module]], limit: int) -> None:
        self._held = held
        heads = {head_count(module) for _, module in held}
        self._rows = Rows(limit, heads.pop() if len(heads) == 1 else 0)
        self._layers = [Layer(path) for path, _ in held]
        for layer, (path, _) in zip(self._layers, held, strict=True):
            layer.within = any(path.startswith(f"{other}." if other else "") and path != other for other, _ in held)
        self._under_way = threading.local()
        self._inside, self._around = Looking(self.saw), Looking(self.saw)
        """Pushed while one layer runs, and while the whole model does, where parts of it are compiled."""
        self._whole = False
        self._tables: dict[torch.device, Tensor] = {}
        self._marks: dict[torch.device, Tensor] = {}

    def attach(self, view: ModelView, hooks: Hooks) -> None:
        """Look while the modules run."""
        self._hooks, self._modules = hooks, [module for _, module in view.modules]
        width = HEADS + (self._rows.heads if 0 < self._rows.heads <= MOST_HEADS else MOST_HEADS)
        for device in {parameter.device for parameter in view.model.parameters()}:
            self._tables[device] = blank(torch.empty(len(self._held), width, dtype=wide(device), device=device))
            self._marks[device] = torch.full((1,), NOWHERE, device=device)
            for at, layer in enumerate(self._layers):
                layer.marks[device] = torch.full((1,), at, device=device)
        hooks.before(view.model, self.fuse, self._enter_model, hooks.switch)
        hooks.after(view.model, self._ends, self._leave_model, always=True)
        for layer, (_, module) in zip(self._layers, self._held, strict=True):
            hooks.before(module, self.fuse, partial(self._enter, layer), hooks.switch)
            hooks.after(module, self.fuse, partial(self._leave_traced, layer), hooks.switch)

    @property
    def _ends(self) -> str:
        return f"{self.fuse} ends"

    # -- which layer runs --------------------------------------------------------------------------------------------

    def start_forward(self) -> None:
        """A training forward of the model begins."""
        for layer in self._layers:
            layer.entered = False

    def _looks(self, module: nn.Module) -> bool:
        if self._hooks.switch.paused or not torch.is_grad_enabled():
            return False
        # multi-head attention in evaluation has a kernel of its own, which it leaves where somebody looks
        return module.training or not isinstance(module, nn.MultiheadAttention)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        compiles = is_compiling() or in_compiled_call() or any(map(is_compiled, self._modules))
        self._whole = HOOKED_INTERMEDIATES and self._looks(module) and compiles
        if self._whole:
            self._around.start()

    def _leave_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._around.is_on_top():
            self._around.stop()

    def _enter(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_compiling():
            self._mark(layer)
            if self._whole and not self._around.is_on_top() and not layer.within:
                self._inside.start()  # inside of a checkpoint, which runs with the mode around it taken off
        elif self._looks(module) and layer.is_first_pass(recomputing=in_backward()):
            if not layer.has_run:
                # even where the forward raises: no mode may outlive it. Not before, because the hook's number would be
                # a constant of what is traced, and each of many equal blocks a graph of its own
                self._hooks.after(module, self._ends, partial(self._leave, layer), always=True)
                layer.has_run = True
            self._mark(layer)
            calls = self._calls()
            pushes = not (calls or self._around.is_on_top())
            calls.append(Call(layer, pushes))
            if pushes:
                self._inside.start()

    def _leave_traced(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling():
            for mark in self._marks.values():
                mark.fill_(NOWHERE)
            if self._inside.is_on_top() and not layer.within:
                self._inside.stop()

    def _leave(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls = self._calls() if not is_compiling() else []
        if calls and calls[-1].layer is layer and calls.pop().pushed and self._inside.is_on_top():
            self._inside.stop()

    def _mark(self, layer: Layer) -> None:
        # tensors, as a number would be a constant of what is traced
        for device, mark in self._marks.items():
            mark.copy_(layer.marks[device])

    def _calls(self) -> list[Call]:
        """The layers under way in this thread, the innermost last."""
        calls: list[Call] = self._under_way.__dict__.setdefault("calls", [])
        return calls

    # -- what it does ------------------------------------------------------------------------------------------------

    def saw(self, kind: str, out: Any, args: Any, kwargs: Any) -> None:
        """A torch function of some kind was called while a layer runs."""
        if self.fuse in self._hooks.faults.failed or not (is_compiling() or self._calls()):
            return
        try:
            if kind == "scores":
                self._saw_product(out, args)
            elif kind != "softmax" or self._is_attention(args[0], kwargs.get("dim", args[1] if args[1:] else None)):
                result = out if isinstance(out, Tensor) else out[0]
                with torch.no_grad(), full_precision(result):
                    rows = self._rows.of(kind)(*args, **kwargs)
                    self._wait(result, rows if isinstance(rows, Product) else row_values(rows))
        except Exception as error:
            self._hooks.faults.report(self.fuse, error)

    def _saw_product(self, out: Tensor, args: Any) -> None:
        if not is_compiling() and out.dim() > 2 and min(t.dim() for t in args if isinstance(t, Tensor)) > 2:
            self._calls()[-1].products.add(tuple(out.shape[-2:]))

    def _is_attention(self, logits: Tensor, dim: Any) -> bool:
        """Whether a softmax is one over keys: of a product of this call; compiled, of as many keys as queries."""
        if logits.dim() < 3 or dim not in (-1, logits.dim() - 1) or not logits.is_floating_point():
            return False
        if is_compiling():
            return logits.shape[-1] == logits.shape[-2]
        return tuple(logits.shape[-2:]) in self._calls()[-1].products

    def _wait(self, result: Tensor, values: Tensor | Product) -> None:
        """Let the values of a call's rows wait for the gradient of its result."""
        if is_compiling():
            assert isinstance(values, Tensor)
            # at once: a table that the backward changes must not be what its forward has saved for it
            self._add_traced(head_sums(values))
            return
        deposit = self._calls()[-1].layer.deposit
        if result.requires_grad:
            self._hooks.on_gradient(result, self.fuse, partial(deposit, values), "attention")
        else:
            deposit(values, None)

    def _add_traced(self, sums: Tensor) -> None:
        table, mark = self._tables.get(sums.device), self._marks.get(sums.device)
        if table is None or mark is None:
            return
        sums = fitted(sums.to(table.dtype), table.shape[1] - HEADS)
        sums = F.pad(sums, (0, table.shape[1] - sums.shape[0]), value=-math.inf)
        mine = torch.arange(table.shape[0], device=table.device) == mark
        table.copy_(torch.where(mine[:, None], combined(table, sums[None]), table))

    # -- the step ----------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Forget what was deposited."""
        for layer in self._layers:
            layer.waiting, layer.sums = [], None
        for table in self._tables.values():
            blank(table)

    def take(self) -> Taken | None:
        """Return the numbers of this step, and start again."""
        seen = take_all(self._layers)
        devices = {sums.device for sums in seen if sums is not None} | set(self._tables)
        tables = [table for device in devices if (table := self._taken(device, seen)) is not None]
        if not tables and not any(layer.known for layer in self._layers):
            return None
        step = Step(tables, len(self._held))
        return Taken(self.name, tables, partial(self._read, step), step.parts)

    def _taken(self, device: torch.device, seen: list[Tensor | None]) -> Tensor | None:
        """[N, 3 + H] the numbers on one device; None where it is known that there are none."""
        traced = self._tables.get(device)
        if traced is not None and device.type == "cpu" and not bool(traced[:, ROWS].any()):
            traced = None
        own = {at: sums for at, sums in enumerate(seen) if sums is not None and sums.device == device}
        if traced is not None:
            traced, table = traced.clone(), traced
            blank(table)
        if not own:
            return traced
        width = max(sums.shape[0] for sums in own.values()) if traced is None else traced.shape[1]
        none = blank(torch.empty(width, dtype=wide(device), device=device))
        found = torch.stack([wider(own[at], none) if at in own else none for at in range(len(seen))])
        return found if traced is None else combined(traced, found)

    def _read(self, step: Step, out: RecordBuilder, parts: list[Array]) -> None:
        sums, largest, head = step.numbers(parts)
        shown = sums[:, ROWS] > 0
        for layer, now in zip(self._layers, shown, strict=True):
            layer.known = layer.known or bool(now)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = sums[:, :ROWS] / sums[:, ROWS:]
        largest, head = (np.where(shown, values, np.nan) for values in (largest, head))
        known = [at for at, layer in enumerate(self._layers) if layer.known]
        labels = [self._layers[at].label for at in known]
        if labels:
            for metric, values in zip(ATTENTION, (largest, head, means[:, 0], means[:, SINK]), strict=True):
                out.add(metric.name, values[known], labels)


class Step:
    """The numbers of one step.

    Args:
        tables: [N, 3 + H], one a device.
        count: N.
    """

    def __init__(self, tables: list[Tensor], count: int) -> None:
        self._tables, self._count = tables, count
        self._shared: tuple[Array, Array] | None = None

    def numbers(self, parts: list[Array]) -> tuple[Array, Array, Array]:
        """[N, 3] the sums, [N] the largest logit and its head, from the host's copies or of all ranks."""
        if self._shared is not None:
            sums, slots = self._shared
            first = np.where(slots[..., 1] > 0, slots[..., 0], -np.inf).argmax(0)
            largest, head = slots[first, np.arange(self._count)].T
            return sums, largest, head - 1
        sums = np.zeros((self._count, HEADS))
        largest, head = np.full(self._count, -np.inf), np.zeros(self._count)
        for table in parts:
            sums += table[:, :HEADS]
            own = table[:, HEADS:]
            head = np.where(own.max(1) > largest, own.argmax(1), head)
            largest = np.maximum(largest, own.max(1))
        return sums, largest, head

    def parts(self, sharing: Sharing, agreed: Mapping[str, int]) -> list[Part]:
        """The part of the all-reduce vector: the sums, and of each rank the largest logits and their heads."""
        del agreed
        count, device = self._count, sharing.device
        sizes = HEADS * count, sharing.ranks * count * 2

        def gather() -> Tensor:
            vector = torch.zeros(sum(sizes), dtype=wide(device), device=device)
            if not sharing.states or not self._tables:
                return vector
            table = reduce(combined, [_padded(t.to(device), self._tables) for t in self._tables])
            largest, head = table[:, HEADS:].max(1)
            seen = largest > -math.inf
            own = torch.stack([torch.where(seen, largest, 0.0), torch.where(seen, head + 1, 0)], 1)
            vector[: sizes[0]] = table[:, :HEADS].reshape(-1)
            # a sum has no largest: each rank has places of its own
            vector[sizes[0] :].view(sharing.ranks, -1)[sharing.rank] = own.reshape(-1)
            return vector

        def scatter(total: Array) -> None:
            slots = total[sizes[0] :].reshape(sharing.ranks, count, 2)
            self._shared = total[: sizes[0]].reshape(count, HEADS), slots

        return [Part(f"attention {count}", sum(sizes), gather, scatter, fixed=False)]


def _padded(table: Tensor, others: list[Tensor]) -> Tensor:
    """A table [N, 3 + H] with as many heads as the widest."""
    width = max(other.shape[1] for other in others)
    return F.pad(table, (0, width - table.shape[1]), value=-math.inf)
