"""Mixtures of experts: loads, entropies and dead experts against counting by hand, on own and transformers' models."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flows_models import IN, MixtureStack, T, inputs, record_of, square
from torch import Tensor, nn

import flowscope
from flowscope.instruments.routing import route_metrics, route_sums
from flowscope.model.view import ModelView
from flowscope.records import Record

BATCH, LENGTH, WORDS = 3, 7, 40


def by_hand(choices: Sequence[Sequence[int]], logits: Iterable[Sequence[float]], experts: int) -> dict[str, float]:
    """Load, entropy and dead experts with Python numbers: choices and logits of one token each."""
    load = [0] * experts
    for chosen in choices:
        for expert in chosen:
            load[expert] += 1
    entropies = []
    for row in logits:
        weights = [math.exp(value - max(row)) for value in row]
        chances = [weight / sum(weights) for weight in weights]
        entropies.append(-sum(p * math.log(p) for p in chances if p > 0) / math.log(experts))
    return {
        "route_entropy": sum(entropies) / len(entropies),
        "route_max_violation": max(load) / (sum(load) / experts) - 1,
        "route_dead": sum(count == 0 for count in load) / experts,
        "route_worst": experts / len(choices[0]) - 1,
        "route_load": sum(load) / experts,
    }


def best(logits: Tensor, count: int) -> list[list[int]]:
    rows = logits.flatten(0, -2).tolist()
    return [sorted(range(len(row)), key=lambda e, row=row: -row[e])[:count] for row in rows]


def assert_equal(record: Any, index: int, truth: dict[str, float]) -> None:
    for name, value in truth.items():
        assert record[name][index] == pytest.approx(value, rel=1e-5), name


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=5))


def qwen() -> nn.Module:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, num_experts=5, head_dim=4))


def olmoe() -> nn.Module:
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SMALL, num_experts=5))


def gpt_oss() -> nn.Module:
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SMALL, num_local_experts=5, head_dim=4))


def on_words(model: nn.Module, *sizes: int) -> tuple[Record, Any, list[Tensor]]:
    """The record of a step on micro-batches of these sizes, the model as it was before, and the words [B, T]."""
    plain = copy.deepcopy(model)
    words = [torch.randint(1, WORDS, (size, LENGTH)) for size in sizes]
    return record_of(model, [words], lambda m, x: m(input_ids=x, labels=x).loss), plain, words


@pytest.mark.parametrize(
    ("make", "router"),
    [(mixtral, "gate"), (qwen, "gate"), (olmoe, "gate"), (gpt_oss, "router")],
    ids=["mixtral", "qwen", "olmoe", "gpt-oss"],
)
def test_routers_of_transformers_send_what_counting_the_logits_gives(make: Any, router: str) -> None:
    torch.manual_seed(0)
    record, plain, words = on_words(make().train(), BATCH, 2)
    assert record.labels("route_entropy") == [f"model.layers.{layer}.mlp.{router}" for layer in range(2)]
    given = [plain(input_ids=x, output_router_logits=True).router_logits for x in words]
    for layer in range(2):
        logits = torch.cat([logits[layer].detach() for logits in given])
        assert_equal(record, layer, by_hand(best(logits, 2), logits.tolist(), 5))


def test_deepseeks_sigmoid_router_with_groups() -> None:
    config = transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4},
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        head_dim=4,
    )
    torch.manual_seed(0)
    record, plain, (words,) = on_words(transformers.DeepseekV3ForCausalLM(config).train(), BATCH)
    assert record.labels("route_dead") == ["model.layers.1.mlp.gate"]
    seen: list[Tensor] = []
    router = plain.model.layers[1].mlp.gate
    router.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    plain(input_ids=words)
    logits = (seen[0].reshape(-1, 16).float() @ router.weight.detach().float().T).tolist()
    choices = []
    for row in logits:
        scores = [1 / (1 + math.exp(-value)) for value in row]
        groups = [sum(sorted(scores[g * 4 : g * 4 + 4])[-2:]) for g in range(2)]
        group = groups.index(max(groups))
        choices.append(sorted(range(group * 4, group * 4 + 4), key=lambda e, s=scores: -s[e])[:2])
    assert_equal(record, 0, by_hand(choices, logits, 8))


def test_switch_transformers_masks() -> None:
    config = transformers.SwitchTransformersConfig(
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=5,
        vocab_size=WORDS,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
    )
    torch.manual_seed(0)
    record, plain, (words,) = on_words(transformers.SwitchTransformersForConditionalGeneration(config).train(), BATCH)
    labels = ["encoder.block.1.layer.1.mlp.router", "decoder.block.1.layer.2.mlp.router"]
    assert record.labels("route_max_violation") == labels
    for index, path in enumerate(labels):
        seen: list[Tensor] = []
        plain.get_submodule(path + ".classifier").register_forward_hook(lambda m, a, out, s=seen: s.append(out))
        plain(input_ids=words, labels=words)
        logits = seen[0].detach().flatten(0, 1)
        assert_equal(record, index, by_hand(best(logits, 1), logits.tolist(), 5))


def test_a_linear_router_beside_experts_and_micro_batches() -> None:
    torch.manual_seed(1)
    model = MixtureStack()
    plain = copy.deepcopy(model)
    batches = inputs(2, tokens=(T,))
    record = record_of(model, [batches], square)
    assert record.labels("route_dead") == ["blocks.0.mlp.gate", "blocks.1.mlp.gate"]
    for index, (experts, chosen) in enumerate(((4, 2), (3, 1))):
        seen: list[Tensor] = []
        plain.blocks[index].mlp.gate.register_forward_hook(lambda m, a, out, s=seen: s.append(out.detach()))
        for x in batches:
            plain(x)
        logits = torch.cat([x.flatten(0, 1) for x in seen])
        assert_equal(record, index, by_hand(best(logits, chosen), logits.tolist(), experts))


def test_evaluation_and_no_grad_are_not_counted() -> None:
    torch.manual_seed(1)
    bare, disturbed = MixtureStack(), MixtureStack()
    disturbed.load_state_dict(bare.state_dict())
    x, other = inputs(2, tokens=(T,))

    def call(model: nn.Module, x: Tensor) -> Tensor:
        loss = square(model, x)
        with torch.no_grad():
            model(other)
        model.eval()
        model(other)
        model.train()
        return loss

    expected, record = record_of(bare, [[x]], square), record_of(disturbed, [[x]], call)
    for name in ("route_entropy", "route_max_violation", "route_dead"):
        np.testing.assert_array_equal(record[name], expected[name])


def test_all_tokens_to_one_expert_by_hand() -> None:
    model = MixtureStack(((4, 1), (5, 2)))
    with torch.no_grad():
        model.blocks[0].mlp.gate.weight.zero_()
        model.blocks[0].mlp.gate.bias.copy_(torch.tensor([0.0, 0.0, 60.0, 0.0]))
        model.blocks[1].mlp.gate.weight.zero_()
        model.blocks[1].mlp.gate.bias.zero_()
    record = record_of(model, [inputs(1, tokens=(T,))], square)
    assert record["route_dead"].tolist() == pytest.approx([3 / 4, 3 / 5])
    assert record["route_max_violation"].tolist() == pytest.approx([3.0, 1.5])  # 2 of 5 get half of all choices each
    assert record["route_entropy"].tolist() == pytest.approx([0.0, 1.0], abs=1e-6)


def test_what_a_router_may_return() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]])
    truth = by_hand([[0], [1]], logits.tolist(), 3)
    mask = torch.tensor([[1, 0, 0], [0, 1, 0]])
    outputs = [
        logits,  # the best score is the choice
        logits.softmax(-1),  # probabilities
        (logits, torch.tensor([[0], [1]])),
        {"mask": mask.bool(), "logits": logits},
        (mask, logits.softmax(-1).max(-1, keepdim=True).values, logits),
        # scores that are zero but for the chosen expert come first (Llama 4)
        (torch.tensor([[0.88, 0.0, 0.0], [0.0, 0.95, 0.0]]), logits),
        (logits.unsqueeze(0), torch.tensor([[[0], [1]]])),
    ]
    for output in outputs:
        sums = route_sums(output, 3, 1)
        assert sums is not None
        values = route_metrics(sums.double().numpy(), 3, 1)
        assert values == pytest.approx(tuple(truth.values()), rel=1e-5)
    # an index that is no expert (a rank's marker of "not mine") is in no load, and NaN scores in no entropy
    sums = route_sums((torch.tensor([[0], [3], [-1]]), torch.tensor([[0.0, 0.0, torch.nan]])), 3, 1)
    assert sums is not None
    assert sums.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert route_sums(None, 3, 1) is None
    assert route_sums(torch.zeros(2, 4), 3, 1) is None
    assert all(math.isnan(value) for value in route_metrics(np.zeros(5), 3, 1))


class Shared(nn.Module):
    """A mixture with a shared expert and its gate, which routes nothing; heads that are no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_experts = nn.ModuleList(nn.Linear(IN, IN) for _ in range(2))
        self.shared_expert_gate = nn.Linear(IN, 1)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(IN, IN) for i in range(3)})
        self.router = nn.Sequential(nn.Linear(IN, IN), nn.Tanh(), nn.Linear(IN, 3))
        self.router.top_k = 2  # type: ignore[assignment]


def test_which_modules_are_routers() -> None:
    found = ModelView(
        nn.ModuleDict({"mlp": Shared(), "heads": nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])})
    ).routers
    assert [(r.path, r.experts, r.chosen) for r in found] == [("mlp.router", 3, 2)]
    assert ModelView(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).routers == []


def test_few_tokens_for_many_experts_raise_nothing() -> None:
    """Chance leaves half of 48 experts out where 15 tokens choose; the same router with 240 tokens is told."""
    torch.manual_seed(1)
    kinds = []
    for tokens in (T, 16 * T):
        model = MixtureStack(((48, 1),))
        with torch.no_grad():
            model.blocks[0].mlp.gate.bias[7] += 30.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
            for x in inputs(14, tokens=(tokens,)):  # the first ten steps of a router are not judged
                square(model, x).backward()
                optimizer.step()
            kinds.append({alert.kind for alert in scope.alerts} & {"expert_collapse"})
    assert kinds == [set(), {"expert_collapse"}]


def test_compiled_routers_count_the_same_in_one_graph() -> None:
    torch.manual_seed(1)
    eager, compiled = MixtureStack(), MixtureStack()
    compiled.load_state_dict(eager.state_dict())
    (x,) = inputs(1, tokens=(T,))
    expected = record_of(eager, [[x]], square)
    try:
        record = record_of(
            compiled,
            [[x]],
            lambda model, x: torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().mean(),
        )
    finally:
        torch.compiler.reset()
    for name in ("route_entropy", "route_max_violation", "route_dead"):
        np.testing.assert_allclose(record[name], expected[name], rtol=1e-5)


def test_watching_routers_changes_nothing_and_leaves_nothing() -> None:
    torch.manual_seed(1)
    bare, watched = MixtureStack(), MixtureStack()
    watched.load_state_dict(bare.state_dict())
    batches = inputs(3, tokens=(T,))
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05)
    for x in batches:
        square(bare, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    record_of(watched, [[x] for x in batches], square)
    for name, value in bare.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    assert flowscope.find_flows(watched)[0].name == "blocks"
