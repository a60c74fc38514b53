"""Attention logits, entropy and sink against plain loops over q and k, whatever computes attention and however.

Axis letters: B batch, H heads, T queries, S keys, D features of a head.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_models import BY_HEAD, NAMES, B, D, H, Stack, T, data, logits_of, naive
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from two_ranks import torchrun
from watch_models import close_to, watched

import flowscope
from flowscope.hooks import attention_layers
from flowscope.hooks.attention_calls import Rows, attention_modules
from flowscope.hooks.compiled import NO_ATTENTION
from flowscope.sums import attention_rows, attention_table
from flowscope.sums.attention_rows import Product, head_sums, row_values, strides
from flowscope.sums.attention_table import AttentionStep, blank
from flowscope.sums.payload import Sharing

HALVES = slice(0, D // 2), slice(D // 2, D)
KINDS = ("sdpa", "softmax", "multi-head")
CHECKPOINTS = (None, False, True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    torch.manual_seed(0)
    yield
    assert _get_current_function_mode() is None


def steps(model: nn.Module, forward: Any = None, passes: int = 2, count: int = 2) -> list[flowscope.Record]:
    """Steps that change nothing, of `passes` micro-batches each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer) as scope:
        for _ in range(count):
            optimizer.zero_grad()
            for seed in range(passes):
                (forward or model)(data(seed)).square().mean().backward()
            optimizer.step()
    return scope.records


def expected(model: Stack, passes: int = 2) -> dict[str, np.ndarray]:
    blocks = zip(*(logits_of(model, data(seed)) for seed in range(passes)), strict=True)
    rows = [naive(list(block)) for block in blocks]
    return {name: np.array([row[name] for row in rows]) for name in (*NAMES, BY_HEAD)}


def the_same(records: list[flowscope.Record], truth: dict[str, np.ndarray]) -> None:
    for record, name in itertools.product(records, truth):
        close_to(record[name], truth[name], rtol=1e-5)


@pytest.mark.parametrize("reentrant", CHECKPOINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_naive_ones(kind: str, reentrant: bool | None) -> None:
    model = Stack(kind, reentrant)
    records = steps(model)
    the_same(records, expected(model))
    inside = ".inner" if kind == "multi-head" else ""
    assert records[0].labels("attention_sink") == [f"blocks.{i}.mixer{inside}" for i in range(3)]


@pytest.mark.parametrize(
    ("kind", "reentrant"), [*itertools.product(KINDS[:2], CHECKPOINTS), ("multi-head", None), ("multi-head", False)]
)
def test_compiled_numbers_are_the_naive_ones_in_two_graphs(kind: str, reentrant: bool | None) -> None:
    torch.compiler.reset()
    counters.clear()
    model = Stack(kind, reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer, every=lambda step: step != 1) as scope:
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            for seed in range(2):
                call(data(seed)).square().mean().backward()
            optimizer.step()
    the_same(scope.records, expected(model))
    assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["blocks", "method", "loss"])
def test_however_it_is_compiled(how: str) -> None:
    torch.compiler.reset()
    counters.clear()
    model = Stack(depth=12 if how == "blocks" else 3)  # more blocks than dynamo's limit of recompilations
    truth = expected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    with watched(model, optimizer) as scope:
        call: Any = torch.compile(lambda x: model(x), **options) if how == "loss" else model
        if how == "method":
            model.compile(**options)
        elif how == "blocks":
            for block in model.blocks:
                block.compile(**options)
        losses = [call(data(seed)).square().mean() for seed in range(2)] if how == "blocks" else []
        for seed in range(2):
            (losses[seed] if losses else call(data(seed)).square().mean()).backward()
        optimizer.step()
    the_same(scope.records, truth)
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


# -- pure functions


def whole(q: Tensor, k: Tensor, **options: Any) -> np.ndarray:
    """[B, H, T, S] logits by numpy in fp64."""
    logits = np.einsum("bhtd,bhsd->bhts", q.double().numpy(), k.double().numpy())
    logits *= options.get("scale") or q.shape[-1] ** -0.5
    if options.get("is_causal"):
        logits = np.where(np.triu(np.ones(logits.shape[-2:]), 1), -np.inf, logits)
    if (mask := options.get("attn_mask")) is not None:
        mask = mask.double().numpy() if mask.is_floating_point() else np.where(mask.numpy(), 0.0, -np.inf)
        logits = logits + mask
    return logits


def found(logits: Tensor) -> dict[str, float]:
    sums = head_sums(row_values(logits)).double().numpy()
    means = dict(zip(NAMES[2:], sums[:2] / sums[2], strict=True))
    return {"attention_logit_max": sums[3:].max(), "attention_logit_head": sums[3:].argmax(), **means}


def agree(logits: Any, truth: np.ndarray, rtol: float = 1e-5) -> None:
    values = naive([truth])
    for name, value in found(logits.logits() if isinstance(logits, Product) else logits).items():
        np.testing.assert_allclose(value, values[name], rtol=rtol, atol=1e-6, err_msg=name)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.7},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.rand(B, 1, T, 9, generator=torch.Generator().manual_seed(5)) < 0.6},
    "float bias": {"attn_mask": torch.randn(H, T, 9, generator=torch.Generator().manual_seed(6))},
    "infinite bias": {
        "attn_mask": torch.zeros(T, 9).masked_fill(torch.ones(T, 9, dtype=torch.bool).triu(2), -torch.inf)
    },
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_scaled_dot_product_attention(case: str, dtype: torch.dtype) -> None:
    q, k = 2 * torch.randn(B, H, T, 8), 2 * torch.randn(B, H, 9, 8)
    q, k = q.to(dtype), k.to(dtype)
    agree(Rows(256, 0).of_product(q, k, k, **OPTIONS[case]), whole(q, k, **OPTIONS[case]))


def test_a_row_that_is_wholly_masked_is_left_out() -> None:
    q, k = torch.randn(B, H, T, 8), torch.randn(B, H, T, 8)
    mask = torch.ones(T, T, dtype=torch.bool)
    mask[2] = False
    agree(Rows(256, 0).of_product(q, k, k, attn_mask=mask), whole(q, k, attn_mask=mask))
    least = torch.zeros(T, T).masked_fill(~mask, torch.finfo(torch.float32).min)
    agree(Rows(256, 0).of_softmax(torch.from_numpy(whole(q, k)).float() + least), whole(q, k, attn_mask=mask))


def test_rows_with_an_infinity_or_a_nan_are_left_out() -> None:
    logits = torch.randn(1, 2, 4, 5)
    broken = logits.clone()
    broken[0, 0, 1, 2], broken[0, 1, 3, 0] = torch.nan, torch.inf
    truth = logits.double().numpy()
    truth[0, 0, 1], truth[0, 1, 3] = -np.inf, -np.inf
    agree(broken, truth)


def test_large_logits_keep_their_entropy() -> None:
    logits = 1e4 + torch.randn(1, 1, 4, 5)
    agree(logits.clone(), logits.double().numpy())


def test_grouped_queries_share_their_keys() -> None:
    q, k = torch.randn(B, H, T, 8), torch.randn(B, 2, T, 8)
    agree(Rows(256, 0).of_product(q, k, k, enable_gqa=True), whole(q, k.repeat_interleave(2, 1)))


def test_samples_and_heads_in_one_axis() -> None:
    q, k = torch.randn(B, H, T, 8), torch.randn(B, H, T, 8)
    flat = Rows(256, H).of_product(q.flatten(0, 1), k.flatten(0, 1), k)
    agree(flat, whole(q, k))
    agree(Rows(256, 0).of_product(q[None], k[None], k), whole(q, k))


@pytest.mark.parametrize("batch", [1, 2, 8, 500])
@pytest.mark.parametrize("rows", [1, 7, 64, 5000])
def test_all_rows_up_to_the_limit_and_a_fixed_stride_above(batch: int, rows: int) -> None:
    b, t = strides(batch, rows, 256)
    seen = len(range(0, batch, b)) * len(range(0, rows, t))
    assert (b, t) == (1, 1) if batch * rows <= 256 else 16 <= seen <= 256
    q, k = torch.randn(batch, 1, rows, 4), torch.randn(batch, 1, 3, 4)
    agree(Rows(256, 0).of_product(q, k, k), whole(q, k)[::b, :, ::t])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("further", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_logits_of_multi_head_attention(padded: bool, further: bool, apart: bool) -> None:
    """Weights that torch itself returns are those of our logits."""
    widths = {"kdim": 6, "vdim": 6} if apart else {}
    module = nn.MultiheadAttention(D, H, add_bias_kv=further, add_zero_attn=further, batch_first=True, **widths)
    query, key = torch.randn(B, T, D), torch.randn(B, 9, widths.get("kdim", D))
    seen: list[Tensor] = []

    class Keep(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.multi_head_attention_forward:
                seen.append(Rows(256, 0).of_multi_head(*args, **kwargs))
            return func(*args, **(kwargs or {}))

    padding = torch.arange(9).expand(B, 9) > torch.tensor([[8], [5], [3]]) if padded else None
    bias = torch.randn(T, 9)
    bias = bias if padding is None else bias > 1.5
    with Keep(), torch.no_grad():
        _, weights = module(query, key, key, key_padding_mask=padding, attn_mask=bias, average_attn_weights=False)
    np.testing.assert_allclose(seen[0].softmax(-1).numpy(), weights.numpy(), rtol=1e-4, atol=1e-6)


# -- what is looked at, and what is not


class Explicit(nn.Module):
    """Attention and what only looks like it: a router's softmax, one over features, one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.router = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_proj(x), self.k_proj(x)
        linear = q.softmax(-1) @ (k.softmax(-2).transpose(1, 2) @ x)
        return linear + torch.softmax(torch.einsum("btd,bsd->bts", q, k), dim=2) @ x + self.router(x).softmax(-1).sum()


def test_only_a_softmax_over_a_product_is_attention() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Explicit())
    x = torch.randn(3, 6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer) as scope:
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        h = model[0](x)
        truth = naive([whole(model[1].q_proj(h)[:, None], model[1].k_proj(h)[:, None], scale=1.0)])
    for name in NAMES:
        close_to(scope.records[0][name], [truth[name]], rtol=1e-5)


def test_attention_of_frozen_layers_is_seen_too() -> None:
    model = Stack()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    the_same(steps(model), expected(model))


def test_layers_with_fewer_heads_end_in_nan() -> None:
    model = Stack()
    model.blocks[1].mixer.num_heads = 1  # what it says of itself; it computes with H
    model.blocks[2].mixer = nn.MultiheadAttention(D, 2, batch_first=True)
    model.blocks[2].forward = lambda x: model.blocks[2].mixer(x, x, x)[0]
    (record,) = steps(model, passes=1, count=1)
    with torch.no_grad():
        x = model.blocks[1](model.blocks[0](model.embed(data())))
        q, k, _ = F.linear(x, model.blocks[2].mixer.in_proj_weight, model.blocks[2].mixer.in_proj_bias).chunk(3, -1)
    heads = [whole(q[:, None, :, half], k[:, None, :, half], scale=(D // 2) ** -0.5).max() for half in HALVES]
    assert record[BY_HEAD].shape == (3, H)
    close_to(record[BY_HEAD][2], [*heads, np.nan, np.nan], rtol=1e-5)


@pytest.mark.parametrize("places", [0, 1 << 16])
def test_many_ranks_say_at_least_which_head_it_is(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_table, "PLACES", places)
    tables = [blank(torch.empty(2, 6, dtype=torch.float64)) for _ in range(3)]
    tables[0][0], tables[1][0] = torch.tensor([1.0, 2, 3, -4, 5, -6]), torch.tensor([10.0, 20, 30, 4, -5, -torch.inf])
    steps = [AttentionStep([table], 2, 3) for table in tables]
    sharing = [Sharing(3, torch.device("cpu"), rank < 2, 2, 1.0, rank == 0, 0, rank) for rank in range(3)]
    parts = [step.parts(share, {})[0] for step, share in zip(steps, sharing, strict=True)]
    total = sum(part.gather() for part in parts).numpy()
    for step, part in zip(steps, parts, strict=True):
        part.scatter(total)
        sums, largest, head, heads = step.numbers([])
        np.testing.assert_array_equal(sums, [[11, 22, 33], [0, 0, 0]])
        assert (largest[0], head[0], largest[1]) == (5, 1, -np.inf)
        if places:
            np.testing.assert_array_equal(heads, [[4, 5, -6], [-np.inf] * 3])
        else:
            assert heads is None


def test_a_torch_that_cannot_show_compiled_attention_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_layers, "HOOKED_INTERMEDIATES", False)
    torch.compiler.reset()
    model = Stack(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer) as scope:
        torch.compile(model, backend="eager")(data()).square().mean().backward()
        optimizer.step()
    assert NO_ATTENTION in scope.records[0].notes
    assert "attention_entropy" not in scope.records[0].metrics
    assert NO_ATTENTION not in steps(Stack(depth=1), count=1)[0].notes
    torch.compiler.reset()


def test_what_gets_no_backward_is_not_counted() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer) as scope:
        for seed in range(2):
            model(data(seed)).square().mean().backward()
        with torch.no_grad():
            model(100 * data(7))
        model.eval()(100 * data(8))
        model.train()
        optimizer.step()
    the_same(scope.records, expected(model))


@pytest.mark.parametrize("cut", [False, True])
def test_a_pass_is_trained_where_a_gradient_reaches_its_first_or_its_last_layer(cut: bool) -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    truth = expected(model, passes=1)
    held: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: held.append(output))
    if cut:
        model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    with watched(model, optimizer) as scope:
        output = model(data(0))
        (output if cut else held[0]).square().mean().backward()
        model(data(1))  # of which nothing is trained
        optimizer.step()
    the_same(scope.records, truth)


class WritesQueries(nn.Module):
    """Multiplied copies of its queries, so that nothing forbids to write to them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.num_heads = nn.Linear(D, D), nn.Linear(D, D), 1

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x)[:, None], self.k(x)[:, None]
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, k)
        q.zero_()
        return out[:, 0]


def test_queries_that_are_written_to_after_the_call() -> None:
    model = nn.Sequential(nn.Linear(D, D), WritesQueries())
    records = steps(model, passes=1, count=3)
    with torch.no_grad():
        x = model[0](data(0))
        truth = naive([whole(model[1].q(x)[:, None], model[1].k(x)[:, None])])
    assert "attention_entropy" not in records[0].metrics  # seen too late, and known from then on
    for record, name in itertools.product(records[1:], NAMES):
        close_to(record[name], [truth[name]], rtol=1e-5)


@pytest.mark.parametrize("entries", [0, 600, 1200, 1 << 16])  # a call has B H T T = 588
def test_however_many_calls_are_read_at_once(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_rows, "ENTRIES", entries)
    model = Stack(depth=5)
    the_same(steps(model), expected(model))


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("of the user's own")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_where_compiled_code_breaks_off_within_the_model() -> None:
    """`nn.TransformerEncoder` asks whether a mask is a causal one: what follows runs as plain Python for a while."""
    torch.compiler.reset()
    answers, mask = [], nn.Transformer.generate_square_subsequent_mask(T)
    for watches in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, H, D, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        optimizer = torch.optim.SGD(model.parameters())
        scope = flowscope.watch(model, optimizer, every=1) if watches else None
        forward = torch.compile(model, backend="eager")
        for _ in range(2):
            forward(data(), mask=mask).square().mean().backward()
            optimizer.step()
        answers.append(forward(data(), mask=mask))
        torch.compiler.reset()
    assert torch.equal(*answers)
    assert scope is not None
    assert len(scope.records) == 2
    scope.close()


def test_a_forward_that_raises_leaves_no_mode_behind() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer):
        inside, model.blocks[1].mixer.out = model.blocks[1].mixer.out, Raises()
        with pytest.raises(ValueError, match="of the user's own"):
            model(data())
        assert _get_current_function_mode() is None
        model.blocks[1].mixer.out = inside
        model(data()).square().mean().backward()
        optimizer.step()


def test_training_is_what_it_is_without_it_bit_by_bit() -> None:
    for kind in KINDS:
        torch.manual_seed(1)
        model = Stack(kind)
        twin = copy.deepcopy(model)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, twin)]
        with watched(model, optimizers[0]):
            for seed in range(4):
                for one, optimizer in zip((model, twin), optimizers, strict=True):
                    optimizer.zero_grad()
                    one(data(seed)).square().mean().backward()
                    optimizer.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_mode_of_the_user_sees_what_it_saw() -> None:
    class Counts(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    model = Stack()
    bare, beside = Counts(), Counts()
    with bare:
        model(data())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer), beside:
        model(data()).square().mean()
    calls = [name for name in beside.names if name == "scaled_dot_product_attention"]
    assert calls == [name for name in bare.names if name == "scaled_dot_product_attention"]


@pytest.mark.parametrize(("every", "looks"), [(1, range(20)), (3, [*range(10), 12, 15, 18])])
def test_it_looks_at_the_first_samples_and_then_seldom(every: int, looks: Sequence[int]) -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer, config={"seldom_every": every, "attention_logit": 1e3}) as scope:
        for _ in range(20):
            model(data()).square().mean().backward()
            optimizer.step()
    assert [record.step for record in scope.records] == [*range(20)]
    for name in (*NAMES, BY_HEAD, "act_kurtosis"):
        assert [record.step for record in scope.records if name in record.metrics] == [*looks]
    the_same([scope.records[step] for step in looks], expected(model, passes=1))


def test_it_looks_in_every_sample_while_logits_are_large() -> None:
    model = Stack()
    assert expected(model, passes=1)["attention_logit_max"].max() < 200 / 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer, config={"seldom_every": 5, "attention_logit": 200.0}) as scope:
        for step in range(20):
            if step in (8, 13):
                with torch.no_grad():
                    model.blocks[1].mixer.qkv.weight.mul_(10.0 if step == 8 else 0.1)
            model(data()).square().mean().backward()
            optimizer.step()
    # large from 8 to 12; 13 shows that they no longer are, when 14 has begun
    looked = [record.step for record in scope.records if "attention_logit_max" in record.metrics]
    assert looked == [*range(16)]


def test_it_can_be_switched_off() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer, config={"instruments": {"attention": False}}) as scope:
        model(data()).square().mean().backward()
        optimizer.step()
    assert not {*NAMES} & scope.records[0].metrics.keys()


def test_which_modules_may_hold_attention() -> None:
    layer = nn.TransformerEncoderLayer(D, H, batch_first=True)
    assert [path for path, _ in attention_modules(list(layer.named_modules()))] == ["self_attn"]
    assert [path for path, _ in attention_modules(list(Stack().named_modules()))] == [
        f"blocks.{i}.mixer" for i in range(3)
    ]
    assert not attention_modules(list(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).named_modules()))


class Flex(nn.Module):
    """flex_attention with a bias by distance and a causal mask; on a CPU it has no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D).requires_grad_(False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, D // H).permute(2, 0, 3, 1, 4)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, x.shape[1], x.shape[1], device="cpu")
        mixed = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.1 * (j - i) * (h + 1), block_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_flex_attention_forward(how: str) -> None:
    torch.compiler.reset()
    model = nn.Sequential(Flex())
    x = torch.randn(2, 128, D)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with watched(model, optimizer, config={"positions": 1024}) as scope:
        call = model if how == "eager" else torch.compile(model, backend="eager")
        call(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        q, k, _ = model[0].qkv(x).view(2, 128, 3, H, D // H).permute(2, 0, 3, 1, 4)
    distance = np.arange(128)[None, :] - np.arange(128)[:, None]
    bias = 0.1 * distance * (np.arange(H) + 1)[:, None, None]
    truth = naive([np.where(distance > 0, -np.inf, whole(q, k) + bias)])
    for name in NAMES:
        close_to(scope.records[0][name], [truth[name]], rtol=1e-5)
    torch.compiler.reset()


def test_two_ranks_say_what_one_process_says_of_the_whole_batch(tmp_path: Path) -> None:
    torchrun("attention_ranks.py", str(tmp_path), limit=120)
    torch.manual_seed(0)
    truth = [naive([logits]) for logits in logits_of(Stack(), data(batch=6))]
    for rank in range(2):
        for record in json.loads((tmp_path / f"{rank}.json").read_text()):
            for name in (*NAMES, BY_HEAD):
                close_to(np.array(record[name]), np.array([row[name] for row in truth]), rtol=1e-5)
