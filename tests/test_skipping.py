"""`skip_by_gates` against explicit loops, zeroed branches and counted operations. Sizes are distinct: B=3, T=5, D=8."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import wrap_models as models
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from wrap_models import B, D, T, inputs

import flowscope
from flowscope.errors import FlowscopeError

CLOSED = -9.0


def wrapped(mode: str, block: type[nn.Module] = models.PreNormBlock, spread: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(0)
    model = flowscope.wrap(models.Stack(block, 3), mode, example_inputs=models.hidden_states(), **options).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("generator"):
                parameter += spread * torch.randn_like(parameter)
    return model


def close(model: Any, block: int, site: int) -> None:
    with torch.no_grad():
        model.blocks[block].connection.gates[site].bias.fill_(CLOSED)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def flops(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        run(model, x)
    return counter.get_total_flops()


def by_hand(model: Any, x: Tensor, mode: str, open_rows: Any) -> tuple[Tensor, list[Tensor]]:
    """The stack with t = 0 for the samples that `open_rows(block, site, t)` does not name; and the gates."""
    h, gates = model.stem(x), []
    for number, block in enumerate(model.blocks):
        for site, gate in enumerate(block.connection.gates):
            t = torch.sigmoid(h @ gate.generator.T + gate.bias)
            gates.append(t)
            t = t * open_rows(number, site, t).reshape(-1, 1, 1)
            f = block.branches(h, site)
            h = h + t * f if mode == "keel" else h + t * (f - h)
    return model.head(h) if hasattr(model, "head") else h, gates


@pytest.mark.parametrize(("mode", "options"), [("keel", {}), ("keel", {"gate": "feature"}), ("highway", {})])
def test_closed_branches_are_left_out_for_all(mode: str, options: dict[str, Any]) -> None:
    model = wrapped(mode, **options)
    close(model, 1, 0)
    close(model, 2, 1)
    x, before = inputs()[0], run(model, inputs()[0])
    work = flops(model, x)
    skipping = flowscope.skip_by_gates(model, 0.01, loader=inputs())
    assert skipping.chosen == {("blocks.1", 0), ("blocks.2", 1)}
    with torch.no_grad():
        expected, _ = by_hand(
            model, x, mode, lambda b, s, t: torch.full((B,), float((f"blocks.{b}", s) not in skipping.chosen))
        )
    with skipping:
        run(model, x)  # the first call learns what the children return
        torch.testing.assert_close(run(model, x), expected)
        # the 8x8 mixing of block 1, the 8x16 and 16x8 of block 2, and both gates' merges
        gate = 2 * B * T * D * (D if mode == "highway" or options else 1)
        assert work - flops(model, x) == 2 * B * T * (D * D + 2 * D * 2 * D) + 2 * gate
        assert not torch.equal(run(model, x), before)
    report = skipping.report()
    closed = ("blocks.1#0", "blocks.2#1")
    assert report.shares == {f"blocks.{b}#{s}": float(f"blocks.{b}#{s}" in closed) for b in range(3) for s in range(2)}
    assert report.share == pytest.approx(2 / 6)
    assert not report.refused
    assert torch.equal(run(model, x), before)


@pytest.mark.parametrize(("mode", "options"), [("keel", {}), ("keel", {"gate": "feature"}), ("highway", {})])
def test_samples_with_closed_gates_are_left_out(mode: str, options: dict[str, Any]) -> None:
    model, data = wrapped(mode, spread=0.4, **options), inputs()
    with torch.no_grad():
        _, gates = by_hand(model, data[0], mode, lambda b, s, t: torch.ones(B))
        largest = sorted(t.flatten(1).amax(1).max().item() for t in gates)
        limit = max(g.flatten(1).amax(1).sort().values[1].item() for g in gates) + 1e-6
    assert largest[0] < limit
    decided: list[Tensor] = []

    def open_rows(block: int, site: int, t: Tensor) -> Tensor:
        decided.append((t.flatten(1).amax(1) >= limit).float())
        return decided[-1]

    skipping = flowscope.skip_by_gates(model, limit, per="sample")
    for x in data:
        with torch.no_grad():
            expected, _ = by_hand(model, x, mode, open_rows)
        with skipping:
            torch.testing.assert_close(run(model, x), expected)
    report = skipping.report()
    assert not report.refused
    some = torch.stack(decided)
    assert 0 < some.mean() < 1
    assert any(0 < row.sum() < B for row in decided)
    assert report.share == pytest.approx(1 - some.mean().item())
    for number, share in enumerate(report.shares.values()):
        assert share == pytest.approx(1 - some[number :: len(report.shares)].mean().item())


def test_preserve_compares_the_weight_of_the_branch() -> None:
    model = wrapped("keel", preserve=True, init_bias=-5.0)
    assert flowscope.skip_by_gates(model, 0.5, loader=inputs()).chosen == set()
    with torch.no_grad():
        model.blocks[0].connection.gates[1].bias.sub_(1.0)  # from 1 to about e^-1
    assert flowscope.skip_by_gates(model, 0.5, loader=inputs()).chosen == {("blocks.0", 1)}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (models.ChainedBlock, "two sites share a branch"),
        (models.FunctionalDropoutBlock, "its carry cannot be followed"),
    ],
)
def test_a_block_that_cannot_is_run_as_it_is_and_says_why(block: type[nn.Module], reason: str) -> None:
    model = wrapped("keel", block)
    expected = [run(model, x) for x in inputs()]
    close(model, 1, 0)
    close(model, 2, 0)
    expected = [run(model, x) for x in inputs()]
    skipping = flowscope.skip_by_gates(model, 0.01, loader=inputs())
    with skipping:
        assert all(torch.equal(run(model, x), y) for x, y in zip(inputs(), expected, strict=True))
    report = skipping.report()
    assert report.share == 0
    assert "blocks.1" in report.refused
    assert reason in report.refused["blocks.1"]
    assert f"blocks.1: not skipped, {reason}" in str(report)


@pytest.mark.parametrize("block", [models.PostNormBlock, models.ParallelBlock, models.FlatteningBlock])
def test_other_blocks(block: type[nn.Module]) -> None:
    model = wrapped("keel", block)
    for number in (0, 2):
        close(model, number, 0)
    twin = copy.deepcopy(model)
    for number in (0, 2):  # the independent way: a branch of exactly zero, x + t*0
        first = {"PostNormBlock": ["mix"], "ParallelBlock": ["a", "b"], "FlatteningBlock": ["a"]}[block.__name__]
        for name in first:
            for parameter in getattr(twin.blocks[number], name).parameters():
                nn.init.zeros_(parameter)
    skipping = flowscope.skip_by_gates(model, 0.01, loader=inputs())
    with skipping:
        for x in inputs():
            torch.testing.assert_close(run(model, x), run(twin, x))
    report = skipping.report()
    assert {label for label, share in report.shares.items() if share} == {"blocks.0#0", "blocks.2#0"}


class WithMaps(nn.Module):
    """Attention that returns its maps [B, T, T] beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        attended, maps = self.attention(h, h, h)
        return x + attended * (1.0 + maps.mean(-1, keepdim=True))


def test_what_a_skipped_child_returns_beside_its_output_is_no_part_of_the_merge() -> None:
    model = wrapped("keel", WithMaps)
    close(model, 1, 0)
    skipping = flowscope.skip_by_gates(model, 0.01, loader=inputs())
    for x in inputs():
        with torch.no_grad():
            h = model.blocks[0](model.stem(x))
            expected = model.head(model.blocks[2](h))
        with skipping:
            torch.testing.assert_close(run(model, x), expected)
    assert not skipping.report().refused


def test_a_batch_of_one_is_not_computed_twice() -> None:
    model = wrapped("keel")
    for block in range(3):
        close(model, block, 1)
    x, work = inputs()[0][:1], flops(model, inputs()[0][:1])
    with flowscope.skip_by_gates(model, 0.01, per="sample"):
        run(model, x)  # learns
        run(model, x)
        gates = 2 * T * D
        # what is left: the MLPs and their merges' gates gone, the deciding gates of all six sites come on top
        assert flops(model, x) == work - 3 * (2 * T * 2 * D * 2 * D + gates) + 6 * gates


class Encoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=batch_first, norm_first=True)
            for _ in range(2)
        )

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return x


def test_masks_go_with_their_samples() -> None:
    model, x = flowscope.wrap(Encoder(True), "keel", example_inputs=inputs()[0]).eval(), inputs()[0]
    with torch.no_grad():
        for layer in model.layers:
            for gate in layer.connection.gates:
                gate.bias.fill_(9.0)
        model.layers[1].connection.gates[0].generator.normal_(std=3.0)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, 3:], padding[2, 2:] = True, True
    whole = {}
    handle = model.layers[1].register_forward_pre_hook(lambda m, args: whole.update(x=args[0]))
    with torch.no_grad():
        model(x, padding)
    handle.remove()
    gate = model.layers[1].connection.gates[0]
    largest = torch.sigmoid(whole["x"] @ gate.generator.T + gate.bias).flatten(1).amax(1).tolist()
    limit = (sorted(largest)[0] + sorted(largest)[1]) / 2
    least = largest.index(min(largest))
    skipping = flowscope.skip_by_gates(model, limit, per="sample")
    with skipping, torch.no_grad():
        out = model(x, padding)
    expected = Encoder(True).eval()
    flowscope.wrap(expected, "keel", example_inputs=x)
    expected.load_state_dict(model.state_dict())

    def zero(module: nn.Module, args: Any, output: Any) -> Any:
        attended = output[0].clone()
        attended[least] = 0
        return attended, *output[1:]

    expected.layers[1].self_attn.register_forward_hook(zero)
    with torch.no_grad():
        torch.testing.assert_close(out, expected(x, padding))
    assert skipping.report().shares["layers.1#0"] == pytest.approx(1 / B)


def test_mixed_samples_are_noticed() -> None:
    model = flowscope.wrap(Encoder(False), "keel", example_inputs=inputs()[0]).eval()
    with torch.no_grad():
        model.layers[0].connection.gates[0].generator[0, 0] = 30.0
    x = inputs()[0]  # T first: three positions of five sequences, so "samples" attend to each other
    x[:, :, 0] = torch.tensor([-1.0, 1.0, 1.0])[:, None]
    expected = run(model, x)
    skipping = flowscope.skip_by_gates(model, 0.01, per="sample")
    with skipping:
        torch.testing.assert_close(run(model, x), expected, rtol=0, atol=0)
    assert any("mix samples" in reason for reason in skipping.report().refused.values())


# -- transformers


@pytest.fixture
def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=37, n_positions=24, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    return flowscope.wrap(GPT2LMHeadModel(config), "keel").eval()


def shut(model: Any, *places: tuple[int, int]) -> set[tuple[str, int]]:
    with torch.no_grad():
        for block, site in places:
            model.transformer.h[block].connection.gates[site].bias.fill_(CLOSED)
    return {(f"transformer.h.{block}", site) for block, site in places}


def test_gpt2_without_attention_and_mlp(gpt2: Any) -> None:
    chosen = shut(gpt2, (0, 1), (1, 0), (2, 0), (2, 1))
    ids = torch.randint(37, (B, 7))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    skipping = flowscope.skip_by_gates(gpt2, 0.01, loader=[batch])
    assert skipping.chosen == chosen
    with torch.no_grad():
        plain = gpt2(**batch).logits
        with skipping:
            got = gpt2(**batch)
    handles = [
        getattr(gpt2.transformer.h[int(path[-1])], ("attn", "mlp")[site]).register_forward_hook(
            lambda m, a, out: (torch.zeros_like(out[0]), *out[1:]) if isinstance(out, tuple) else torch.zeros_like(out)
        )
        for path, site in chosen
    ]
    with torch.no_grad():
        expected = gpt2(**batch)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(got.logits, expected.logits)
    assert not torch.equal(got.logits, plain)
    report = skipping.report([batch, batch])
    assert report.loss_before == pytest.approx(gpt2(**batch).loss.item(), rel=1e-6)
    assert report.loss_after == pytest.approx(expected.loss.item(), rel=1e-6)
    assert report.share == pytest.approx(4 / 6)
    assert report.seconds_before > 0 < report.seconds_after
    assert "66.7% of the branches left out" in str(report)


def test_gpt2_with_a_key_value_cache_keeps_what_fills_it(gpt2: Any) -> None:
    shut(gpt2, (0, 1), (1, 0), (2, 1))
    ids = torch.randint(37, (B, 7))
    skipping = flowscope.skip_by_gates(gpt2, 0.01, loader=[{"input_ids": ids}])
    words: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with skipping, torch.no_grad():
        cached = gpt2.generate(ids, **words)
    report = skipping.report()
    assert report.shares["transformer.h.0#1"] == 1
    assert report.shares["transformer.h.1#0"] == 0  # it fills the cache: later tokens need it
    skipping.chosen -= {("transformer.h.1", 0)}
    with skipping, torch.no_grad():
        assert torch.equal(cached, gpt2.generate(ids, use_cache=False, **words))


# -- on, off, errors


def test_nothing_is_left_behind() -> None:
    model, x = wrapped("keel"), inputs()[0]
    close(model, 0, 0)
    names = {path: set(vars(module)) for path, module in model.named_modules()}
    before, state = run(model, x), copy.deepcopy(model.state_dict())
    skipping = flowscope.skip_by_gates(model, 0.01, loader=inputs())
    assert {path: set(vars(module)) for path, module in model.named_modules()} == names
    with skipping:
        run(model, x)
    with pytest.raises(FlowscopeError, match="got str, expected"), skipping:
        flowscope.gate_profile(model, ["no tensor"])
    assert {path: set(vars(module)) for path, module in model.named_modules()} == names
    assert torch.equal(run(model, x), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with skipping:
        assert not torch.equal(run(model, x), before)


def test_report_over_a_loader_with_a_loss() -> None:
    model = wrapped("keel")
    close(model, 1, 1)
    data = [(x, x.roll(1, -1)) for x in inputs()]

    def loss(one: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(one(batch[0])[..., :D], batch[1][..., : one(batch[0]).shape[-1]])

    skipping = flowscope.skip_by_gates(model, 0.01, loader=inputs())
    report = skipping.report(data, loss, steps=3)
    with torch.no_grad():
        before = [loss(model, batch).item() for batch in data[:3]]
        with skipping:
            after = [loss(model, batch).item() for batch in data[:3]]
    assert report.loss_before == pytest.approx(math.fsum(before) / 3, rel=1e-6)
    assert report.loss_after == pytest.approx(math.fsum(after) / 3, rel=1e-6)
    assert report.loss_before != report.loss_after


def test_errors_say_what_to_do() -> None:
    model = wrapped("keel")
    with pytest.raises(FlowscopeError, match=r"no loader.*per='sample'"):
        flowscope.skip_by_gates(model)
    with pytest.raises(FlowscopeError, match=r"got 1.5, expected a gate between 0 and 1"):
        flowscope.skip_by_gates(model, 1.5, per="sample")
    with pytest.raises(FlowscopeError, match=r"got 'token', expected 'block' or 'sample'"):
        flowscope.skip_by_gates(model, per="token")  # type: ignore[arg-type]
    with pytest.raises(FlowscopeError, match=r"got no batch"):
        flowscope.skip_by_gates(model, loader=[])
    with pytest.raises(FlowscopeError, match=r"has no gates"):
        flowscope.skip_by_gates(models.Stack(models.PreNormBlock, 2), per="sample")
    skipping = flowscope.skip_by_gates(model, per="sample")
    with skipping:
        with pytest.raises(FlowscopeError, match=r"on already"), flowscope.skip_by_gates(model, per="sample"):
            pass
        with pytest.raises(FlowscopeError, match=r"outside the `with`"):
            skipping.report(inputs())
        model.train()
        with pytest.raises(FlowscopeError, match=r"blocks.0 is in training mode.*model.eval"):
            model(inputs()[0])
