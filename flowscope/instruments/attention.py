"""How sure attention is, and how far its logits have grown: largest logit, entropy and attention sink of each layer.

Seen where attention is computed, whatever computes it: `scaled_dot_product_attention`, `nn.MultiheadAttention`,
`flex_attention` or a softmax over a product. While a module that may hold attention runs in a sampled step, a
`TorchFunctionMode` looks at the calls inside: the model's own kernel runs as ever, and the logits of some rows are
computed once more beside it, from q and k, after scale, bias and mask.

Axis letters: B batch, H heads, T queries, S keys, R rows looked at (of T), D features of a head, N layers.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flowscope.config import WatchConfig
from flowscope.hooks.hooks import Hooks
from flowscope.instruments.instrument import Array, Instrument, Taken
from flowscope.metrics import Metric
from flowscope.model.hidden_state import is_compiling
from flowscope.model.plan import display_path
from flowscope.model.view import ModelView
from flowscope.record_builder import RecordBuilder
from flowscope.sums.payload import Part, Sharing
from flowscope.sums.statistics import full_precision, is_host, wide
from flowscope.torch_internals import HOOKED_INTERMEDIATES, in_backward, in_compiled_call, is_compiled, newest_mode

SINK, ROWS, HEADS = 1, 2, 3
"""Columns of a layer's numbers: 0 sum of entropies, SINK sum of shares on the first key, ROWS how many rows were seen
(of all heads), from HEADS on the largest logit of each head."""
MOST_HEADS = 64
"""More heads of a layer than this are taken for one."""
MASKED = -5e3
"""A logit below this is a masked pair (-inf, the least number of a dtype, -1e4 or -1e9); a row of such is left out."""
OFF = -1e30
"""Stands for -inf."""
LEAST = -80.0
"""A logit so far below the largest counts as this: exp of it is nothing, and of less fifty times as slow on a host."""
SAMPLES = 2
"""Where there are more rows than are looked at, those of so many samples."""
FEW = 1 << 14
"""Keys with up to so many entries are copied on the host, and many layers multiplied at once; else at the call."""
NOWHERE = -1
"""The mark where no layer runs."""
LARGE = 1 << 24
"""Of keys with more entries than this, those of one sample only."""
WAITING = 16
"""So many calls of a layer wait to be added up, at most."""

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


# -- numbers of some rows --------------------------------------------------------------------------------------------


def row_values(logits: Tensor) -> Tensor:
    """Return [3, B, H, R]: of each row the entropy, the share on the first key, and the largest logit.

    The entropy is log Z - sum(e l) / Z in nats, with l the logits less the largest, e = exp l, Z = sum e.

    Args:
        logits: [B, H, R, S] fp32 after scale, bias and mask, with OFF where a pair is masked; overwritten.
    """
    top = logits.amax(-1, keepdim=True)
    apart = logits.sub_(top).clamp_min_(LEAST)
    share = apart.exp()
    total, first = share.sum(-1), share[..., 0].clone()
    entropy = total.log() - share.mul_(apart).sum(-1) / total
    return torch.stack([entropy, first / total, top.squeeze(-1)])


def head_sums(values: Tensor) -> Tensor:
    """Return [..., 3 + H], the numbers of a layer, from the values [..., 3, B, H, R] of its rows.

    Rows that are wholly masked, or hold an infinity or a NaN, are left out.
    """
    top = values[..., 2, :, :, :]
    seen = (top > MASKED) & (top < math.inf)
    sums = torch.where(seen.unsqueeze(-4), values[..., :ROWS, :, :, :], 0.0).sum((-1, -2, -3))
    largest = torch.where(seen, top, -math.inf).amax((-1, -3))
    return torch.cat([sums, seen.sum((-1, -2, -3)).unsqueeze(-1), largest], -1)


def combined(one: Tensor, other: Tensor) -> Tensor:
    """The numbers [..., 3 + H] of two sets of rows as one's."""
    sums = one[..., :HEADS] + other[..., :HEADS]
    return torch.cat([sums, torch.maximum(one[..., HEADS:], other[..., HEADS:])], -1)


def strides(batch: int, rows: int, limit: int) -> tuple[int, int]:
    """Each how-many-eth sample and row is looked at: all where B*T <= limit, else about limit / 8, row 0 included."""
    if batch * rows <= limit:
        return 1, 1
    limit = max(2, limit // 8)
    samples = min(batch, max(SAMPLES, limit // rows))
    return -(-batch // samples), max(1, -(-rows * samples // limit))


def heads_last(x: Tensor, heads: int) -> Tensor:
    """Return [B, H, R, C] of [..., R, C]: a third axis from the end holds heads, or samples with their heads."""
    if x.dim() == 3:
        split = heads if 0 < heads <= x.shape[0] and x.shape[0] % heads == 0 else 1
        return x.reshape(-1, split, *x.shape[1:])
    return x.reshape(1, 1, *x.shape) if x.dim() == 2 else x.flatten(0, -4) if x.dim() > 4 else x


def product_logits(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return the logits [B, H, R, S] of queries [B, H, R, D] and keys [B, G, S, D], H a multiple of G (GQA)."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    query, key = query.float() * scale, key.float()
    if (groups := key.shape[1]) not in (1, query.shape[1]):
        grouped = query.reshape(query.shape[0], groups, -1, *query.shape[2:]) @ key.unsqueeze(2).transpose(-1, -2)
        return grouped.flatten(1, 2)
    if query.shape[0] <= SAMPLES and is_host(query):  # one by one, as many would be copied
        return torch.stack([q @ k.transpose(-1, -2) for q, k in zip(query, key, strict=True)])
    return query @ key.transpose(-1, -2)


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits with a mask: where a bool one is False they are OFF, a float one is added."""
    return logits.masked_fill(~mask, OFF) if mask.dtype == torch.bool else (logits + mask).clamp_min_(OFF)


@functools.lru_cache(maxsize=8)
def _late_keys(rows: int, keys: int, stride: int, device: torch.device) -> Tensor:
    """[R, S] to add to logits of causal attention: OFF where a key comes after its query, else 0."""
    after = torch.full((rows, keys), OFF, device=device).triu_(1)
    return after[::stride]


@dataclass(frozen=True, eq=False)
class Product:
    """Queries [B, H, R, D] and keys [B, G, S, D] of one call, copied: on the host many are multiplied at once.

    Attributes:
        query, key: likewise.
        kind: what calls must have in common for it: scale, whether it is causal, queries in all, their stride.
    """

    query: Tensor
    key: Tensor
    kind: tuple[float | None, bool, int, int]

    @property
    def alike(self) -> tuple[Any, ...]:
        """Calls for which this is the same are multiplied at once."""
        return self.query.shape, self.key.shape, self.kind

    def logits(self) -> Tensor:
        """[B, H, R, S]."""
        scale, causal, rows, stride = self.kind
        logits = product_logits(self.query, self.key, scale)
        if causal:
            make = _late_keys.__wrapped__ if is_compiling() else _late_keys
            logits += make(rows, self.key.shape[2], stride, logits.device)
        return logits


def values_of(products: Sequence[Product]) -> list[Tensor]:
    """The `row_values` [3, B, H, R] of each of the products, those that are alike at once."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, product in enumerate(products):
        groups.setdefault(product.alike, []).append(at)
    out: dict[int, Tensor] = {}
    for places in groups.values():
        group = [products[at] for at in places]
        query, key = (torch.cat([getattr(product, name) for product in group]) for name in ("query", "key"))
        values = row_values(Product(query, key, group[0].kind).logits())
        out.update(zip(places, values.chunk(len(group), 1), strict=True))
    return [out[at] for at in range(len(products))]


class Rows:
    """Which rows of one call are looked at.

    Args:
        limit: largest B*T of which all are.
        heads: of the module, where the call does not say it (0: unknown).
    """

    def __init__(self, limit: int, heads: int) -> None:
        self._limit, self.heads = limit, heads

    def _strides(self, batch: int, rows: int, key: Tensor) -> tuple[int, int]:
        b, t = strides(batch, rows, self._limit)
        return (batch, t) if b > 1 and key.numel() // b > LARGE else (b, t)

    def of(self, kind: str) -> Callable[..., Tensor | Product]:
        """What gives the logits [B, H, R, S] of rows, from the arguments of a function of that kind."""
        kinds: dict[str, Callable[..., Tensor | Product]] = {
            "product": self.of_product,
            "multi-head": self.of_multi_head,
            "flex": self.of_flex,
        }
        return kinds.get(kind, self.of_softmax)

    def of_softmax(self, logits: Tensor, *rest: Any, **others: Any) -> Tensor:
        """Rows of the logits [..., T, S] that a softmax over the last axis is given."""
        del rest, others
        logits = heads_last(logits.detach(), self.heads)
        b, t = strides(logits.shape[0], logits.shape[2], self._limit)
        return logits[::b, :, ::t].float().clamp_min(OFF)

    def of_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | Product:
        """Logits of rows of `scaled_dot_product_attention`, whose arguments these are; later where that is cheaper."""
        del value, dropout_p, enable_gqa
        whole = query.shape[:-1]
        query, key = heads_last(query.detach(), self.heads), heads_last(key.detach(), self.heads)
        b, t = self._strides(query.shape[0], query.shape[2], key)
        product = Product(query[::b, :, ::t], key[::b], (scale, is_causal, query.shape[2], t))
        if attn_mask is None and is_host(query) and product.key.numel() <= FEW:
            return Product(product.query.clone(), product.key.clone(), product.kind)
        logits = product.logits()
        if attn_mask is not None:
            mask = heads_last(attn_mask.detach().expand(*whole, key.shape[2]), self.heads)
            logits = _masked(logits, mask[::b, :, ::t])
        return logits

    def of_flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor],
        block_mask: tuple[Any, ...],
        scale: float,
        *rest: Any,
    ) -> Tensor:
        """Logits of rows of `flex_attention`, with its score and mask functions; arguments of the operator."""
        del value, rest
        b, t = self._strides(query.shape[0], query.shape[2], key)
        rows = query.detach()[::b, :, ::t]
        logits = product_logits(rows, key.detach()[::b], scale)
        ranges = (torch.arange(0, n, by, device=query.device) for n, by in zip(query.shape[:3], (b, 1, t), strict=True))
        sample, head, row = (r.view(-1, *[1] * after) for r, after in zip(ranges, (3, 2, 1), strict=True))
        column = torch.arange(key.shape[2], device=query.device)
        logits = score_mod(logits, sample, head, row, column)
        return _masked(logits.clamp_min(OFF), block_mask[-1](sample, head, row, column))

    def of_multi_head(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        *rest: Any,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Logits of rows of `multi_head_attention_forward`, whose arguments these are; it projects q and k inside.

        query, key: [T, B, E] or [T, E].
        """
        del value, embed_dim_to_check, bias_v, rest, others
        if query.dim() == 2:
            query, key = query.unsqueeze(1), key.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        count, batch, width = query.shape
        b, t = self._strides(batch, count, key)
        rows, columns = query.detach()[::t, ::b].float(), key.detach()[:, ::b].float()
        if in_proj_weight is not None:
            q_proj_weight, k_proj_weight = in_proj_weight[:width], in_proj_weight[width : 2 * width]
        bias = None if in_proj_bias is None else in_proj_bias.detach().float().view(3, width)
        assert q_proj_weight is not None
        assert k_proj_weight is not None
        q = F.linear(rows, q_proj_weight.detach().float(), None if bias is None else bias[0])
        k = F.linear(columns, k_proj_weight.detach().float(), None if bias is None else bias[1])
        if bias_k is not None:
            k = torch.cat([k, bias_k.detach().float().expand(1, k.shape[1], -1)])
        if add_zero_attn:
            k = torch.cat([k, k.new_zeros(1, *k.shape[1:])])
        q, k = q.view(*q.shape[:2], num_heads, -1), k.view(*k.shape[:2], num_heads, -1)
        logits = product_logits(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), None)
        if attn_mask is not None:
            mask = attn_mask.detach()
            mask = mask.view(batch, num_heads, *mask.shape[1:])[::b] if mask.dim() == 3 else mask[None, None]
            logits = self._within(logits, mask[:, :, ::t], of_multi_head=True)
        if key_padding_mask is not None:
            logits = self._within(logits, key_padding_mask.detach()[::b, None, None], of_multi_head=True)
        return logits

    @staticmethod
    def _within(logits: Tensor, mask: Tensor, *, of_multi_head: bool) -> Tensor:
        """Logits with a mask for the first keys only; True in a bool one of multi-head attention means masked."""
        if mask.dtype == torch.bool and of_multi_head:
            mask = ~mask
        further = logits.shape[-1] - mask.shape[-1]
        if further:
            mask = F.pad(mask, (0, further), value=True if mask.dtype == torch.bool else 0.0)
        return _masked(logits, mask)


# -- where it looks --------------------------------------------------------------------------------------------------

_CLASS = re.compile(r"att(entio)?n", re.IGNORECASE)
_QUERY = re.compile(
    r"^(to_|w_?|c_|in_)?(q|query|queries|kv|qk|qkv|kqv|query_key_value)s?(_[ab])?(_?proj|_?lin(ear)?)?$"
)
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
_PRODUCTS = (torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.bmm, Tensor.baddbmm)
_SOFTMAXES = (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
_FLEX: Any = getattr(getattr(torch.ops, "higher_order", None), "flex_attention", None)
_KINDS: dict[Any, str] = {
    F.scaled_dot_product_attention: "product",
    F.multi_head_attention_forward: "multi-head",
    **dict.fromkeys(_SOFTMAXES, "softmax"),
    **dict.fromkeys((*_PRODUCTS, Tensor.__matmul__), "scores"),
    **({} if _FLEX is None else {_FLEX: "flex"}),
}


def may_hold_attention(module: nn.Module) -> bool:
    """Whether a module makes queries: it has a child or a parameter of such a name, or is torch's own."""
    return isinstance(module, nn.MultiheadAttention) or any(
        _QUERY.match(name) for held in (module._modules, module._parameters) for name in held
    )


def attention_modules(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Paths and modules inside which attention may run, in module order.

    Those that make queries; and those whose class name says attention, where no such module is inside of them.
    """
    named = [(path, module) for path, module in modules if next(module.children(), None) is not None]
    making = {id(module): module for _, module in named if may_hold_attention(module)}
    out: dict[int, tuple[str, nn.Module]] = {}
    for path, module in named:
        called = _CLASS.search(type(module).__name__) and not any(id(m) in making for m in module.modules())
        if id(module) in making or (called and not any(_CLASS.search(type(m).__name__) for m in _below(module))):
            out[id(module)] = path, module
    return list(out.values())


def _below(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if m is not module and next(m.children(), None) is not None]


def head_count(module: nn.Module) -> int:
    """How many heads a module says it has, 0 where it does not say it."""
    for holder in (module, getattr(module, "config", None)):
        for name in _HEADS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


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


class Looking(TorchFunctionMode):
    """Shows attention the calls of torch functions made while it is on the stack, and changes none of them."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; where it is attention, see its logits too."""
        kwargs = kwargs or {}
        kind = _KINDS.get(func)
        if kind is None and is_compiling():
            # a checkpoint is traced as such a call, and its inside may only touch the stack if the outside has
            self.start()
            self.stop()
        out = func(*args, **kwargs)
        if kind is not None:
            self._attention.saw(kind, out, args, kwargs)
        return out

    def is_on_top(self) -> bool:
        """Whether it is the innermost mode of this thread."""
        return newest_mode() is self

    def start(self) -> None:
        """Look at this thread's calls from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Look no longer; only where it is on top."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def fitted(sums: Tensor, heads: int) -> Tensor:
    """Numbers [3 + H] with at most so many heads: more are taken for one."""
    if sums.shape[0] - HEADS <= heads:
        return sums
    return torch.cat([sums[:HEADS], sums[HEADS:].amax(0, keepdim=True)])


def wider(sums: Tensor, like: Tensor) -> Tensor:
    """Numbers [3 + H] as wide as `like`, which holds those of no rows."""
    sums = fitted(sums.to(like.dtype), like.shape[0] - HEADS)
    return sums if sums.shape == like.shape else torch.cat([sums, like[sums.shape[0] :]])


def blank(table: Tensor) -> Tensor:
    """Numbers [..., 3 + H] of no rows."""
    table[..., :HEADS] = 0.0
    table[..., HEADS:] = -math.inf
    return table


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
        self._inside, self._around = Looking(self), Looking(self)
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
