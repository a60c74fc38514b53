"""The front door: what `wrap` changes, what survives, what `unwrap` gives back, what is refused."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import torch
import transformers
import wrap_models as models
from torch import nn
from wrap_models import D

from flowscope.errors import FlowscopeError
from flowscope.merging.wrapping import connections, is_wrapped, unwrap, wrap
from flowscope.model.sites import find_sites, plan_sites

PRESERVING = [
    ("residual", {}),
    ("shc", {}),
    ("dhc", {"streams": 2}),
    ("mhc", {"streams": 3}),
    ("keel", {"preserve": True}),
]
BLOCKS = [
    models.PreNormBlock,
    models.PostNormBlock,
    models.ParallelBlock,
    models.FunctionalDropoutBlock,
    models.FlatteningBlock,
]


def gpt2(**fields: Any) -> nn.Module:
    """A tiny GPT-2 with tied weights."""
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **fields)).eval()


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that must be as before after `unwrap` or a failure."""
    return {
        "classes": [type(module) for module in model.modules()],
        "names": [name for name, _ in model.named_modules()],
        "parameters": [(name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "attributes": [set(vars(module)) for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "modes": [module.training for module in model.modules()],
    }


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("mode", "options"), PRESERVING)
def test_output_is_kept_and_unwrap_is_exact(block: Any, mode: str, options: dict[str, Any]) -> None:
    model, x = models.Stack(block).eval(), models.hidden_states()
    before, expected = snapshot(model), model(x)
    assert wrap(model, mode, example_inputs=x, **options) is model
    assert is_wrapped(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert unwrap(model) is model
    assert not is_wrapped(model)
    assert torch.equal(model(x), expected)
    assert snapshot(model) == before


@pytest.mark.parametrize("mode", ["shc", "dhc", "mhc"])
def test_convnet_keeps_its_output_per_stage(mode: str) -> None:
    model, x = models.ConvNet().eval(), torch.randn(2, 3, 8, 12)
    expected = model(x)
    wrap(model, mode, example_inputs=x)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert [(path, c.first, c.last, c.features) for path, c in connections(model)] == [
        ("layer1.0.connection", True, False, 4),
        ("layer1.1.connection", False, True, 4),
        ("layer2.0.connection", True, False, 6),
        ("layer2.1.connection", False, True, 6),
    ]
    assert {c.axis for _, c in connections(model)} == {1}
    model.train()(x).sum().backward()
    assert all(any(p.grad is not None and p.grad.any() for p in c.parameters()) for _, c in connections(model))


@pytest.mark.parametrize("mode", ["keel", "highway", "keel-postln"])
def test_modes_that_change_the_output_train(mode: str) -> None:
    model, x = models.Stack(models.PreNormBlock, 3), models.hidden_states()
    expected = model(x)
    wrap(model, mode, example_inputs=x)
    assert not torch.allclose(model(x), expected)
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for _, c in connections(model) for p in c.parameters())


def test_nothing_moves() -> None:
    model = gpt2()
    before = snapshot(model)
    handle = model.transformer.h[1].register_forward_hook(lambda *_: None)
    wrap(model, "keel")
    names = [name for name, _ in model.named_modules() if "connection" not in name]
    assert names == before["names"]
    old = before["parameters"]
    assert [
        p
        for p in ((n, id(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False))
        if "connection" not in p[0]
    ] == old
    block_class = transformers.models.gpt2.modeling_gpt2.GPT2Block
    block = model.transformer.h[1]
    assert isinstance(block, block_class)
    assert (type(block).__name__, type(block).__module__) == (block_class.__name__, block_class.__module__)
    assert len(block._forward_hooks) == 1
    assert model.lm_head.weight is model.transformer.wte.weight
    handle.remove()


def test_checkpoint_saved_before_loads_strictly(caplog: pytest.LogCaptureFixture) -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(x)
    wrap(model, "dhc", example_inputs=x)
    initial = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with caplog.at_level(logging.INFO, "flowscope"):
        model.load_state_dict(saved, strict=True)
    assert all(torch.equal(tensor, initial[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(x), expected)
    assert sum("saved before wrap" in message for message in caplog.messages) == 1


def test_loading_part_of_a_checkpoint_leaves_the_connections() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    wrap(model, "keel", example_inputs=x)
    with torch.no_grad():
        connections(model)[0][1].gates[0].bias.fill_(5)
    model.load_state_dict({"head.bias": torch.zeros(7)}, strict=False)
    assert connections(model)[0][1].gates[0].bias.item() == 5


def test_state_dict_round_trip_and_weights_only() -> None:
    torch.manual_seed(0)
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    wrap(model, "dhc", example_inputs=x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = wrap(models.Stack(models.PreNormBlock), "dhc", example_inputs=x)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("mode", ["dhc", "keel-postln"])
def test_copies(way: str, mode: str) -> None:
    model, x = models.Stack(models.PostNormBlock), models.hidden_states()
    wrap(model, mode, example_inputs=x)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert torch.equal(other(x), model(x))
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    with torch.no_grad():
        model.blocks[1].norm1.weight.add_(1)  # the copy's connection must hold the copy's norms
    assert not torch.equal(other(x), model(x))
    unwrap(other)
    assert is_wrapped(model)


def test_device_dtype_and_modes_follow_the_block() -> None:
    model, x = models.Stack(models.PreNormBlock).to(torch.bfloat16).train(), models.hidden_states().bfloat16()
    wrap(model, "dhc", example_inputs=x)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())
    assert model(x).dtype == torch.bfloat16


def test_optimizer_gets_the_new_parameters() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    wrap(model, "keel", optimizer=optimizer, example_inputs=x)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(p) in owned for p in model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    bias = connections(model)[1][1].gates[0].bias
    before = bias.detach().clone()
    model(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, bias)


def test_optimizer_with_names_gets_the_names() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    optimizer = torch.optim.AdamW(model.named_parameters())
    wrap(model, "keel", optimizer=optimizer, example_inputs=x)
    named = {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    assert named.keys() == dict(model.named_parameters()).keys()
    assert all(named[name] is p for name, p in model.named_parameters())


def test_foreign_optimizer_is_refused_and_the_model_left() -> None:
    model = models.Stack(models.PreNormBlock)
    before = snapshot(model)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(FlowscopeError, match="holds no parameter of this model"):
        wrap(model, "keel", optimizer=optimizer, example_inputs=models.hidden_states())
    assert snapshot(model) == before
    assert len(optimizer.param_groups) == 1


def test_log_says_once_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flowscope"):
        wrap(models.Stack(models.PostNormBlock), "keel", example_inputs=models.hidden_states())
    (message,) = caplog.messages
    assert "4 sites in 2 blocks, 36 parameters added" in message  # 4 gates of 8 weights and a bias
    assert "gate bias -2" in message
    assert "output at the start not kept" in message


def test_unwrap_says_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    wrap(model, "dhc", example_inputs=x)
    unwrap(model)
    assert not [m for m in caplog.messages if m.startswith("unwrap")]
    wrap(model, "dhc", example_inputs=x)
    with torch.no_grad():
        next(connections(model)[1][1].parameters()).add_(0.5)
    unwrap(model)
    (message,) = [m for m in caplog.messages if m.startswith("unwrap")]
    assert "1 connections were trained" in message


class Busy(nn.Module):
    """Uses many tensors and frees them all."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        used = [x * 1.0 for _ in range(500)]
        return self.block(sum(used) / len(used))


def test_tensors_freed_outside_the_blocks_do_not_part_them() -> None:
    """A tensor used between two wrapped stretches is freed, and its id given to what the next block returns."""
    model, x = models.Stack(models.PreNormBlock, 4), models.hidden_states()
    model.blocks[1] = Busy(model.blocks[1])
    plan, _ = plan_sites(model, x, ["blocks.0", "blocks.[23]"])
    assert [(b.path, b.first, b.last) for b in plan.blocks] == [
        ("blocks.0", True, True),
        ("blocks.2", True, False),
        ("blocks.3", False, True),
    ]


def test_where_takes_patterns() -> None:
    model, x = models.Stack(models.PreNormBlock, 4), models.hidden_states()
    wrap(model, "dhc", example_inputs=x, where=["blocks.0", "blocks.[23]"])
    assert [(path, c.first, c.last) for path, c in connections(model)] == [
        ("blocks.0.connection", True, True),
        ("blocks.2.connection", True, False),
        ("blocks.3.connection", False, True),
    ]


def test_a_child_called_connection_stays() -> None:
    class Named(models.PreNormBlock):
        def __init__(self) -> None:
            super().__init__()
            self.connection = nn.Linear(D, D)

    model = models.Stack(Named)
    wrap(model, "keel", example_inputs=models.hidden_states())
    assert [path for path, _ in connections(model)] == ["blocks.0.flow_connection", "blocks.1.flow_connection"]
    assert isinstance(model.blocks[0].connection, nn.Linear)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "kele"}, "expected one of residual, keel"),
        ({"mode": "dhc", "gate": "token"}, "gate is an option of mode keel, highway"),
        ({"mode": "dhc", "streams": 0}, "greater than or equal to 1"),
        ({"mode": "keel", "init_bias": float("nan")}, "finite number"),
        ({"mode": "keel", "optimizer": [1]}, "got list, expected a torch.optim.Optimizer"),
        ({"mode": "keel", "where": "nowhere.*"}, "no block's path matches"),
        ({"mode": "keel", "example_inputs": torch.ones(2, 3, D + 1)}, "could not be run on them"),
        ({"mode": "deepnorm"}, "expected post-norm sites"),
    ],
)
def test_bad_input_leaves_the_model(arguments: dict[str, Any], message: str) -> None:
    model = models.Stack(models.PreNormBlock)
    before = snapshot(model)
    with pytest.raises(FlowscopeError, match=message):
        wrap(model, **{"example_inputs": models.hidden_states(), **arguments})
    assert snapshot(model) == before


def test_model_without_residuals_is_refused() -> None:
    model = models.Stack(models.AddcmulBlock)
    before = snapshot(model)
    with pytest.raises(FlowscopeError, match=r"no residual merge found in Stack.*the tensors meet in addcmul"):
        wrap(model, "keel", example_inputs=models.hidden_states())
    assert snapshot(model) == before


def test_sites_of_a_wrapped_model_are_refused() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    wrap(model, "keel", example_inputs=x)
    with pytest.raises(FlowscopeError, match="wrapped already"):
        find_sites(model, x)
    assert len(find_sites(unwrap(model), x)) == 4


def test_wrapping_twice_is_refused() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    wrap(model, "keel", example_inputs=x)
    with pytest.raises(FlowscopeError, match="wrapped already"):
        wrap(model, "dhc", example_inputs=x)
    unwrap(model)
    with pytest.raises(FlowscopeError, match="not wrapped"):
        unwrap(model)


def test_failure_of_the_wrapped_model_leaves_it() -> None:
    class CountsChildren(models.PreNormBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert len(list(self.children())) == 6
            return super().forward(x)

    model, x = models.Stack(CountsChildren), models.hidden_states()
    before = snapshot(model)
    with pytest.raises(FlowscopeError, match="could not be run"):
        wrap(model, "keel", example_inputs=x)
    assert snapshot(model) == before


def test_structure_alone_is_checked_at_the_first_forward() -> None:
    class Skips(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[0](self.stem(x)))

    x = models.hidden_states()
    model = wrap(models.Stack(models.PreNormBlock), "keel")
    model(x)
    assert not any(module._forward_hooks for module in model.modules())
    skipping = wrap(Skips(models.PreNormBlock), "keel")
    with pytest.raises(FlowscopeError, match=r"1 of 2 wrapped blocks did not run in this forward: blocks\.1"):
        skipping(x)


def test_x_of_other_axes_is_refused() -> None:
    model, x = models.Stack(models.PreNormBlock, 3), models.hidden_states()
    wrap(model, "dhc", example_inputs=x)
    with pytest.raises(FlowscopeError, match=r"blocks\.1: got 2 axes.*expected 4: streams were not reduced"):
        model.blocks[1](x[0])


def test_generate_with_cache_gives_the_same_tokens() -> None:
    torch.manual_seed(0)
    model = wrap(gpt2(), "dhc")
    with torch.no_grad():
        for _, connection in connections(model):
            for parameter in connection.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    ids = torch.randint(3, 50, (3, 5))
    settings = {"max_new_tokens": 7, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    cached = model.generate(ids, use_cache=True, **settings)
    assert cached.shape == (3, 12)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))


def test_hidden_states_are_those_of_the_model() -> None:
    model, ids = gpt2(), torch.randint(3, 50, (3, 5))
    expected = model(ids, output_hidden_states=True).hidden_states
    wrap(model, "mhc")
    got = model(ids, output_hidden_states=True).hidden_states
    assert len(got) == len(expected) == 4
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_random_state_is_left() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    state = torch.get_rng_state()
    wrap(model, "dhc", init="sparse", example_inputs=x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("block", [models.PostNormBlock, models.FlatteningPostNormBlock])
def test_keel_postln_skips_the_norm_it_applies_itself(block: Any) -> None:
    torch.manual_seed(0)
    model, x = models.Stack(block, 2).double(), models.hidden_states().double()

    def rms(h: torch.Tensor) -> torch.Tensor:
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    h = model.stem(x)
    first, second = model.blocks
    h = h + first.mix(rms(h))
    h = h + torch.tanh(first.mlp(rms(h)))
    h = second.norm1(4 * h + second.mix(rms(h)))
    h = second.norm2(4 * h + torch.tanh(second.mlp(rms(h))))
    expected = model.head(h)
    wrap(model, "keel-postln", example_inputs=x)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


def test_keel_postln_and_deepnorm_count_a_shared_block_at_each_call() -> None:
    class Repeats(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(x)

    def rms(h: torch.Tensor) -> torch.Tensor:
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    torch.manual_seed(0)
    model, x = Repeats(models.PostNormBlock, 2).double(), models.hidden_states().double()
    h, block = model.stem(x), model.blocks[0]
    for _ in range(3):
        h = block.norm1(6 * h + block.mix(rms(h)))
        h = block.norm2(6 * h + torch.tanh(block.mlp(rms(h))))
    expected = model.head(h)
    wrap(model, "keel-postln", example_inputs=x)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
    unwrap(model)
    wrap(model, "deepnorm", example_inputs=x)
    assert connections(model)[0][1].alpha == pytest.approx([(2 * 3) ** 0.25] * 2)


def test_transformers_model_inside_another_module_needs_no_inputs() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = gpt2(), nn.Linear(50, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(tokens).logits)

    model, tokens = Tagger().eval(), torch.randint(3, 50, (3, 5))
    expected = model(tokens)
    wrap(model, "dhc")
    assert [path for path, _ in connections(model)] == [f"body.transformer.h.{i}.connection" for i in range(3)]
    assert [(c.first, c.last) for _, c in connections(model)] == [(True, False), (False, False), (False, True)]
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-6)


def test_blocks_left_out_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Mixed(models.Stack):
        def __init__(self) -> None:
            super().__init__(models.PreNormBlock, 3)
            self.blocks[1] = models.AddcmulBlock()

    wrap(Mixed(), "keel", example_inputs=models.hidden_states())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "1 blocks or adds not wrapped (see find_sites), such as blocks.1: no residual add" in caplog.text


def test_decoder_layers_are_found_by_structure_alone() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(D, 2, 2, 3, 12, dropout=0.0, batch_first=True)
    source, target = torch.randn(3, 5, D), torch.randn(3, 4, D)
    expected = model(source, target)
    wrap(model, "dhc")
    assert {path.split(".")[0]: c.sites for path, c in connections(model)} == {"encoder": 2, "decoder": 3}
    assert len(connections(model)) == 5
    torch.testing.assert_close(model(source, target), expected, rtol=1e-5, atol=1e-6)


def test_deepnorm_knows_both_sides_of_an_encoder_decoder() -> None:
    sizes = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, **sizes
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    before = [model.model.encoder.layers[0].fc1.weight.clone(), model.model.encoder.layers[0].fc1.bias.clone()]
    wrap(model, "deepnorm")
    alphas = {path.split(".")[1]: c.alpha[0] for path, c in connections(model)}
    assert alphas["encoder"] == pytest.approx(0.81 * (2**4 * 3) ** (1 / 16))
    assert alphas["decoder"] == pytest.approx((3 * 3) ** 0.25)
    weight, bias = model.model.encoder.layers[0].fc1.weight, model.model.encoder.layers[0].fc1.bias
    assert not torch.equal(weight, before[0])
    assert torch.equal(bias, before[1])
    expected = 0.87 * (2**4 * 3) ** (-1 / 16) * (2 / (32 + 48)) ** 0.5  # Xavier's deviation times beta
    assert weight.std().item() == pytest.approx(expected, rel=0.1)


def test_keel_postln_leaves_projection_blocks(caplog: pytest.LogCaptureFixture) -> None:
    model, x = models.ConvNet().eval(), torch.randn(2, 3, 8, 12)
    with caplog.at_level(logging.INFO, "flowscope"):
        wrap(model, "keel-postln", example_inputs=x)
    assert [path.rpartition(".")[0] for path, _ in connections(model)] == ["layer1.0", "layer1.1", "layer2.1"]
    assert "layer2.0: keel-postln has no place for a projection shortcut" in caplog.text
