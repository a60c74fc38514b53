"""The depth axes of the transformers library's architectures, built tiny on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowscope.model.flows import find_flows

pytestmark = pytest.mark.filterwarnings("ignore")
transformers = pytest.importorskip("transformers")

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 50,
}
PAIR: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "vocab_size": 50,
}
HYBRID = {**TEXT, "num_hidden_layers": 4, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
EXPERTS = {**TEXT, "num_key_value_heads": 2, "num_local_experts": 3}

CASES: list[tuple[str, str, dict[str, Any], list[tuple[str, str, int]]]] = [
    ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4}, [("transformer.h", "blocks", 3)]),
    ("LlamaForCausalLM", "LlamaConfig", TEXT, [("model.layers", "blocks", 3)]),
    ("MixtralForCausalLM", "MixtralConfig", EXPERTS, [("model.layers", "blocks", 3)]),
    ("JambaForCausalLM", "JambaConfig", {**HYBRID, "use_mamba_kernels": False}, [("model.layers", "blocks", 4)]),
    (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 3},
        [("backbone.layers", "blocks", 3)],
    ),
    ("BertForMaskedLM", "BertConfig", TEXT, [("bert.encoder.layer", "blocks", 3)]),
    ("BertModel", "BertConfig", TEXT, [("encoder.layer", "blocks", 3)]),
    ("AlbertModel", "AlbertConfig", {**TEXT, "embedding_size": 16}, [("encoder.albert_layer_groups", "blocks", 1)]),
    (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_ff": 40, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4},
        [("encoder.block", "blocks", 2), ("decoder.block", "blocks", 3)],
    ),
    (
        "BartForConditionalGeneration",
        "BartConfig",
        PAIR,
        [("model.encoder.layers", "blocks", 3), ("model.decoder.layers", "blocks", 2)],
    ),
    ("ViTForImageClassification", "ViTConfig", TEXT, [("vit.layers", "blocks", 3)]),
    (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": {**TEXT, "num_hidden_layers": 2}},
        [("text_model.encoder.layers", "blocks", 3), ("vision_model.encoder.layers", "blocks", 2)],
    ),
    (
        "SwinForImageClassification",
        "SwinConfig",
        {"embed_dim": 8, "depths": [1, 2, 3], "num_heads": [2, 2, 4], "window_size": 4},
        [
            ("network", "network", 6),
            ("swin.encoder.layers.1.blocks", "stage", 2),
            ("swin.encoder.layers.2.blocks", "stage", 3),
        ],
    ),
    (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 3]},
        [
            ("network", "network", 5),
            ("resnet.encoder.stages.0.layers", "stage", 2),
            ("resnet.encoder.stages.1.layers", "stage", 3),
        ],
    ),
    (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [2, 1, 3, 1]},
        [
            ("network", "network", 7),
            ("convnext.encoder.stages.0.layers", "stage", 2),
            ("convnext.encoder.stages.2.layers", "stage", 3),
        ],
    ),
    (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        TEXT,
        [("encoder.layers", "blocks", 3), ("feature_extractor.conv_layers", "blocks", 7)],
    ),
]


@pytest.mark.parametrize(("architecture", "config", "options", "expected"), CASES, ids=[case[0] for case in CASES])
def test_transformers_architectures(
    architecture: str, config: str, options: dict[str, Any], expected: list[tuple[str, str, int]]
) -> None:
    with torch.device("meta"):
        model = getattr(transformers, architecture)(getattr(transformers, config)(**options))
    plan = find_flows(model)
    assert [(f.name, f.kind, len(f.outputs)) for f in plan] == expected
    for flow in plan:
        for path in flow.outputs:
            model.get_submodule(path)
        assert flow.entry == flow.outputs[0]


def test_parts_in_sibling_lists() -> None:
    """XLM keeps attentions, norms and feed-forwards in lists of their own; a block ends with its second norm."""
    with torch.device("meta"):
        model = transformers.XLMModel(transformers.XLMConfig(emb_dim=32, n_layers=3, n_heads=4, vocab_size=50))
    (flow,) = find_flows(model)
    assert flow.outputs == ("layer_norm2.0", "layer_norm2.1", "layer_norm2.2")
    assert flow.entry == "attentions.0"
