"""Calls that compute attention: inside which modules they are looked for, how they are seen, the logits of some rows.

Axis letters: B batch, H heads, T queries, S keys, R rows looked at (of T), D features of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowscope.faults import Faults
from flowscope.model.hidden_state import is_compiling
from flowscope.sums.attention_rows import OFF, Product, heads_last, masked, product_logits, strides
from flowscope.torch_internals import FunctionMode, newest_mode

LARGE = 1 << 24
"""Of keys with more entries than this, those of one sample only."""

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
        """Logits of rows of `scaled_dot_product_attention`, whose arguments these are; their factors without a mask."""
        del value, dropout_p, enable_gqa
        whole = query.shape[:-1]
        query, key = heads_last(query.detach(), self.heads), heads_last(key.detach(), self.heads)
        b, t = self._strides(query.shape[0], query.shape[2], key)
        product = Product(query[::b, :, ::t], key[::b], scale, is_causal, query.shape[2], t)
        if attn_mask is None:
            return product
        mask = heads_last(attn_mask.detach().expand(*whole, key.shape[2]), self.heads)
        return masked(product.logits(), mask[::b, :, ::t])

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
        return masked(logits.clamp_min(OFF), block_mask[-1](sample, head, row, column))

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
        return masked(logits, mask)


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


class Looking(FunctionMode):
    """Shows the calls of torch functions made while it is on the stack, and changes none of them.

    Args:
        saw: told of each that may be part of attention: its kind, what it returned, its arguments.

    Attributes:
        faults: who is told where `saw` fails.
        fuse: what that switches off.
    """

    def __init__(self, saw: Callable[[str, Any, Any, Any], None]) -> None:
        super().__init__()
        self._saw, self.faults, self.fuse = saw, Faults(), "attention"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; where it is attention, see its logits too."""
        kwargs = kwargs or {}
        kind = _KINDS.get(func)
        if kind is None and is_compiling():
            # a checkpoint is traced as such a call, and its inside may only touch the stack if the outside has
            self.start()
            self.stop()
        # dynamo cannot trace this method where a mode calls it: it asks `super()` for itself
        unflattens = is_compiling() and getattr(func, "__name__", "") == "unflatten"
        out = (torch.unflatten if unflattens else func)(*args, **kwargs)
        if kind is not None:
            self.faults.guard(self.fuse, self._saw, kind, out, args, kwargs)
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

    def remove(self) -> None:
        """Look no longer, where it is on: a fault may have left it so."""
        if self.is_on_top():
            self.stop()
