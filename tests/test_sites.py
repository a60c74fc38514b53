"""Discovery of merge sites: counts and kinds known from reading the models, and nothing changed by looking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import wrap_models as models
from torch import nn
from wrap_models import B, D, T

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.model.sites import find_sites
from flowscope.model.tracing import trace_block

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BART = {"vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [2, 2], "layer_type": "basic", "num_labels": 3}

# name, class, config, sites of each flow, kinds, norms
CASES: list[tuple[str, dict[str, Any], dict[str, int], set[str], set[str]]] = [
    ("GPT2LMHeadModel", GPT2, {"transformer.h": 4}, {"identity"}, {"pre"}),
    ("LlamaForCausalLM", SMALL, {"model.layers": 4}, {"identity"}, {"pre"}),
    ("GPTNeoXForCausalLM", SMALL, {"gpt_neox.layers": 2}, {"identity"}, {"pre"}),
    ("GPTJForCausalLM", GPT2 | {"rotary_dim": 4}, {"transformer.h": 2}, {"identity"}, {"pre"}),
    ("BertForMaskedLM", SMALL, {"bert.encoder.layer": 4}, {"identity"}, {"post"}),
    (
        "AlbertForMaskedLM",
        SMALL | {"embedding_size": 16},
        {"albert.encoder.albert_layer_groups": 2},
        {"identity"},
        {"post"},
    ),
    ("T5ForConditionalGeneration", T5, {"encoder.block": 4, "decoder.block": 6}, {"identity"}, {"pre"}),
    (
        "BartForConditionalGeneration",
        BART,
        {"model.encoder.layers": 4, "model.decoder.layers": 9},
        {"identity"},
        {"post"},
    ),
    (
        "MixtralForCausalLM",
        SMALL | {"num_key_value_heads": 2, "num_local_experts": 3},
        {"model.layers": 4},
        {"identity"},
        {"pre"},
    ),
    (
        "MambaForCausalLM",
        {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2},
        {"backbone.layers": 2},
        {"identity"},
        {"pre"},
    ),
    (
        "ResNetForImageClassification",
        RESNET,
        {"resnet.encoder.stages.0.layers": 2, "resnet.encoder.stages.1.layers": 2},
        {"identity", "projection"},
        {"none"},
    ),
]


def build(name: str, fields: dict[str, Any]) -> nn.Module:
    """A tiny transformers model."""
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**fields))


@pytest.mark.parametrize(("name", "fields", "flows", "kinds", "norms"), CASES, ids=[case[0] for case in CASES])
def test_transformers_sites(
    name: str, fields: dict[str, Any], flows: dict[str, int], kinds: set[str], norms: set[str]
) -> None:
    plan = find_sites(build(name, fields))
    assert {flow: sum(s.flow == flow for s in plan) for flow in dict.fromkeys(s.flow for s in plan)} == flows
    assert {site.kind for site in plan} == kinds
    assert {site.norm for site in plan} == norms
    assert plan.traced
    assert plan.refused == ()


def test_cross_attention_has_three_sites_a_block() -> None:
    plan = find_sites(build("BartForConditionalGeneration", BART))
    assert [s.index for s in plan if s.path == "model.decoder.layers.1"] == [0, 1, 2]
    assert [s.index for s in plan if s.path == "model.encoder.layers.1"] == [0, 1]


@pytest.mark.parametrize(
    ("block", "sites", "norm"),
    [
        (models.PreNormBlock, 2, "pre"),
        (models.PostNormBlock, 2, "post"),
        (models.ParallelBlock, 1, "pre"),
        (models.ChainedBlock, 2, "pre"),
        (models.FunctionalDropoutBlock, 2, "none"),
        (models.sequential_block, 1, "pre"),
    ],
)
@pytest.mark.parametrize("given", [True, False], ids=["inputs", "structure"])
def test_hand_written_blocks(block: Any, sites: int, norm: str, given: bool) -> None:
    model = models.Stack(block)
    plan = find_sites(model, models.hidden_states() if given else None)
    assert [(s.path, s.index) for s in plan] == [(f"blocks.{b}", i) for b in range(2) for i in range(sites)]
    assert {s.norm for s in plan} == {norm}
    assert plan.traced is given
    if given:
        assert {s.shape for s in plan} == {(B, T, D)}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (models.LoopAddsBlock, "an add of its own joins two branches"),
        (models.LerpBlock, "the tensors meet in lerp"),
    ],
)
@pytest.mark.parametrize("given", [True, False], ids=["inputs", "structure"])
def test_sum_of_two_branches_is_no_merge(block: Any, reason: str, given: bool) -> None:
    plan = find_sites(models.Stack(block), models.hidden_states() if given else None)
    assert len(plan) == 0
    assert [path for path, _ in plan.refused] == ["blocks.0", "blocks.1"]
    assert all(reason in said for _, said in plan.refused)


def test_scaled_carry_is_a_merge_that_streams_do_not_pass() -> None:
    model, x = models.Stack(models.ScaledCarryBlock), models.hidden_states()
    plan = find_sites(model, x)
    assert [s.kind for s in plan] == ["projection"] * 2
    assert [(b.first, b.last) for b in plan.blocks] == [(True, True)] * 2
    expected = model(x)
    torch.testing.assert_close(flowscope.wrap(model, "dhc", example_inputs=x)(x), expected, rtol=1e-5, atol=1e-6)
    flowscope.wrap(flowscope.unwrap(model), "keel", init_bias=-1.0, example_inputs=x)
    t, h = torch.sigmoid(torch.tensor(-1.0)), model.stem(x)
    for block in model.blocks:
        h = 0.9 * h + t * block.branches(h)
    torch.testing.assert_close(model(x), model.head(h))


def test_add_of_two_carries_is_refused_and_the_merge_after_it_is_not() -> None:
    plan = find_sites(models.Stack(models.TwoHalvesBlock), models.hidden_states())
    assert [(s.path, s.kind) for s in plan] == [("blocks.0", "identity"), ("blocks.1", "identity")]
    assert [path for path, _ in plan.refused] == ["blocks.0", "blocks.1"]
    assert "not wrapped: blocks.0: an add of its own joins two branches" in str(plan)


def test_projection_without_a_change_of_width_is_known_from_its_siblings() -> None:
    made = iter([True, False, False])
    plan = find_sites(models.Stack(lambda: models.SumOnlyBlock(next(made)), 3), models.hidden_states())
    assert [s.kind for s in plan] == ["projection", "identity", "identity"]
    assert len(find_sites(models.Stack(lambda: models.SumOnlyBlock(True), 3), models.hidden_states())) == 0


def test_two_convolutions_that_are_added_are_no_shortcut_where_a_sibling_changes_the_stride() -> None:
    """RepVGG: the first block of a stage may be one with a projection, the others are sums of branches."""

    class Rep(nn.Module):
        def __init__(self, stride: int) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, stride, 1), nn.Conv2d(4, 4, 1, stride)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.a(x) + self.b(x))

    plan = find_sites(nn.Sequential(Rep(2), Rep(1), Rep(1)), torch.randn(2, 4, 8, 12))
    assert [(s.path, s.kind) for s in plan] == [("0", "projection")]
    assert [path for path, _ in plan.refused] == ["1", "2"]


def test_sum_is_an_add() -> None:
    """`sum([x, f])` is (0 + x) + f."""
    model, x = models.Stack(models.SumFunctionBlock), models.hidden_states()
    assert [s.kind for s in find_sites(model, x)] == ["identity"] * 2
    expected = model(x)
    torch.testing.assert_close(flowscope.wrap(model, "dhc", example_inputs=x)(x), expected, rtol=1e-5, atol=1e-6)


def test_adds_that_are_no_sites() -> None:
    assert len(find_sites(models.Stack(models.StatementBlock), models.hidden_states())) == 4


def test_block_that_cannot_run_alone_is_named() -> None:
    plan = find_sites(models.Stack(models.StatementBlock))
    assert plan.refused == tuple((f"blocks.{i}", "it cannot be run alone: pass example_inputs") for i in range(2))


def test_encoder_layer_of_torch_takes_no_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
    plan = find_sites(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), models.hidden_states())
    assert len(plan) == 6
    assert {s.norm for s in plan} == {"post"}


def test_convnet_stages_are_flows_of_their_own() -> None:
    plan = find_sites(models.ConvNet(), torch.randn(2, 3, 8, 12))
    assert [(s.path, s.kind, s.shape) for s in plan] == [
        ("layer1.0", "identity", (2, 4, 8, 12)),
        ("layer1.1", "identity", (2, 4, 8, 12)),
        ("layer2.0", "projection", (2, 6, 4, 6)),
        ("layer2.1", "identity", (2, 6, 4, 6)),
    ]
    assert [s.flow for s in plan] == ["layer1", "layer1", "layer2", "layer2"]
    assert [(b.first, b.last) for b in plan.blocks] == [(True, False), (False, True)] * 2


def test_streams_do_not_pass_a_tensor_that_others_read() -> None:
    class Skipping(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.blocks[0](self.stem(x))
            second = self.blocks[1](first)
            return self.head(self.blocks[2](second) * first)

    plan = find_sites(Skipping(models.PreNormBlock, 3), models.hidden_states())
    assert [(b.first, b.last) for b in plan.blocks] == [(True, True), (True, False), (False, True)]


def test_streams_do_not_pass_a_tensor_given_twice() -> None:
    class Attends(models.PreNormBlock):
        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return x + self.mix(self.norm1(memory))

    class Stack(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, x)
            return x

    plan = find_sites(Stack(Attends), models.hidden_states())
    assert [(b.first, b.last) for b in plan.blocks] == [(True, True)] * 2


def test_shared_block_keeps_its_streams_to_itself() -> None:
    plan = find_sites(build("AlbertForMaskedLM", SMALL | {"embedding_size": 16}))
    assert [(b.first, b.last) for b in plan.blocks] == [(True, True)]


@pytest.mark.parametrize("inputs", [(models.hidden_states(),), [models.hidden_states()], {"x": models.hidden_states()}])
def test_forms_of_example_inputs(inputs: Any) -> None:
    assert len(find_sites(models.Stack(models.PreNormBlock), inputs)) == 4


def test_inputs_of_a_wrong_shape() -> None:
    with pytest.raises(FlowscopeError, match=r"could not be run on them.*float32\[3, 5, 9\]"):
        find_sites(models.Stack(models.PreNormBlock), torch.randn(B, T, D + 1))


def test_inputs_of_a_wrong_type() -> None:
    with pytest.raises(FlowscopeError, match="got str, expected a tensor, a tuple of positional"):
        find_sites(models.Stack(models.PreNormBlock), "text")


def test_fused_add_is_named() -> None:
    plan = find_sites(models.Stack(models.AddcmulBlock), models.hidden_states())
    assert len(plan) == 0
    assert plan.refused == tuple((f"blocks.{i}", "no residual add: the tensors meet in addcmul") for i in range(2))
    assert "not wrapped: blocks.0: no residual add: the tensors meet in addcmul" in str(plan)


def test_changed_carry_is_named() -> None:
    class Changed(models.AddcmulBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) + 0.8 * self.a(x)

    plan = find_sites(models.Stack(Changed), models.hidden_states())
    assert len(plan) == 0
    assert "it is changed on its way to the add" in plan.refused[0][1]


def test_model_without_residuals() -> None:
    plan = find_sites(nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)), models.hidden_states())
    assert len(plan) == 0
    assert plan.refused


def test_looking_changes_nothing() -> None:
    model = models.ConvNet().train()
    model.layer1[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    attributes = [set(vars(module)) for module in model.modules()]
    find_sites(model, torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_random_draws_of_the_forward_are_taken_back() -> None:
    class Noisy(models.PreNormBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn(1))

    model = models.Stack(Noisy)
    state = torch.get_rng_state()
    find_sites(model, torch.ones(B, T, D))
    assert torch.equal(torch.get_rng_state(), state)


def test_plan_prints_a_table() -> None:
    lines = str(find_sites(models.Stack(models.PreNormBlock), models.hidden_states())).splitlines()
    assert lines[0] == "flow blocks: 4 sites"
    assert lines[1].split() == ["block", "site", "shape", "kind", "norm", "add", "in"]
    assert lines[3].split() == ["blocks.0", "1", "3x5x8", "identity", "pre", "blocks.0"]


def test_plan_says_where_adds_are_counted() -> None:
    assert "note: in 2 blocks (blocks.0 ...)" in str(
        find_sites(models.Stack(models.FunctionalDropoutBlock), models.hidden_states())
    )
    assert "note:" not in str(find_sites(models.Stack(models.PreNormBlock), models.hidden_states()))


def test_replaced_forward_is_named() -> None:
    model = models.Stack(models.PreNormBlock)
    model.blocks[1].forward = model.blocks[1].forward
    plan = find_sites(model, models.hidden_states())
    assert plan.refused == (("blocks.1", "its forward was replaced on the instance"),)


def test_an_argument_given_twice_is_no_operation() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(D, D)

        def forward(self, query: torch.Tensor, key: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            self.proj(key)
            return query + (query * 0.5 + memory)  # no weights on either way

    x, memory = torch.ones(B, T, D), torch.ones(B, T, D)
    block = Mixes()
    assert trace_block(block, block.forward, (x, x, memory), {})[1].strict[0].sites == ()
    assert trace_block(block, block.forward, (x, x.clone(), memory), {})[1].strict[0].sites == ()


def test_a_branch_whose_only_weight_is_a_view_is_a_branch() -> None:
    """`x + scale.view(1, -1, 1) * (mean(x) - x)`, as pooling with layer scale in front of a convolution net's MLP."""

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Conv1d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + (x.mean(-1, keepdim=True) - x) * self.scale.view(1, -1, 1)
            return x + self.layer(x)

    model = nn.Sequential(*(Pool() for _ in range(3)))
    assert [(s.path, s.kind) for s in find_sites(model, torch.randn(2, 4, 6))] == [
        (str(k), "identity") for k in range(3) for _ in range(2)
    ]
