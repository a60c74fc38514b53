"""Every causal, masked and sequence-to-sequence architecture of transformers, in a tiny configuration."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from benchmarks.zoo.judging import Inputs, Row, judge

TINY: dict[int, str] = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size embedding_dim word_embed_proj_dim",
    128: "intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner hidden_dim max_position_embeddings "
    "n_positions",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts",
    16: "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim",
    32: "kv_lora_rank q_lora_rank",
    256: "vocab_size",
    1: "n_group topk_group first_k_dense_replace bos_token_id",
}
EXTRA = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
EXTRA |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "pad_token_id": 0, "eos_token_id": 2}
SIZES = {name: size for size, names in TINY.items() for name in names.split()} | EXTRA
VARIATIONS: tuple[dict[str, int], ...] = (  # tried in turn until the model runs
    {},
    {"num_key_value_heads": 4},  # multi-head latent attention has as many
    {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4},  # hybrids need a layer of each kind
    {"num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 32},
)
SPECIAL_BASE = {"vocab_size": 256}
OWN: dict[str, dict[str, Any]] = {  # sizes that must fit each other in their own way
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "mamba2": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "state_size": 16,
    },
}
MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
LARGEST = 30_000_000


def tiny_config(config_class: type[Any], **sizes: int) -> Any:
    """Return a configuration with the sizes of `TINY` (or the given ones) where the architecture has such fields."""
    default = config_class()
    if default.model_type in OWN:
        return config_class(**SPECIAL_BASE, **OWN[default.model_type])
    fields: dict[str, Any] = {}
    for name, size in {**SIZES, **sizes}.items():
        value = getattr(default, name, "absent")
        if isinstance(value, int) or (value is None and name.endswith("_id")):
            fields[name] = size
    for name, part in getattr(config_class, "sub_configs", {}).items():
        kind = type(getattr(default, name, None)) if part.__name__ == "AutoConfig" else part
        if hasattr(kind, "model_type"):
            fields[name] = tiny_config(kind, **sizes)
    try:
        config = config_class(**fields)
    except Exception:
        config = default
        for name, size in fields.items():
            with contextlib.suppress(Exception):
                setattr(config, name, size)
    if not hasattr(config, "pad_token_id"):
        config.pad_token_id = 0
    if config.model_type == "encoder-decoder":
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
    return config


def architectures(chosen: list[str]) -> Iterator[tuple[str, str, type[nn.Module], type[Any]]]:
    """Yield (model type, task, model class, configuration class), each class once."""
    seen: set[str] = set()
    for task, names in MAPPINGS.items():
        for model_type, class_name in names.items():
            class_name = class_name if isinstance(class_name, str) else class_name[0]
            if class_name in seen or (chosen and model_type not in chosen):
                continue
            seen.add(class_name)
            with contextlib.suppress(Exception):
                model_class = getattr(transformers, class_name)
                yield model_type, task, model_class, transformers.AutoConfig.for_model(model_type).__class__


def build(model_class: type[Any], config_class: type[Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a tiny model in evaluation mode and inputs that it runs on."""
    errors = []
    for sizes in VARIATIONS:
        torch.manual_seed(0)
        try:
            config = tiny_config(config_class, **sizes)
            config.use_cache = False
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
            if size > LARGEST:
                raise RuntimeError(f"{size:,} parameters, its sizes are not among those of TINY")
            model = model_class(config).eval()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        ids = torch.randint(3, 100, (2, 16))
        for more in ({}, {"decoder_input_ids": ids}, {"attention_mask": torch.ones_like(ids)}):
            try:
                with torch.no_grad():
                    logits_of(model(input_ids=ids, **more))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                return model, {"input_ids": ids, **more}
    raise RuntimeError(errors[0])


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output."""
    logits: Tensor = output["logits"] if "logits" in output else output[0]
    return logits


def given(inputs: dict[str, Tensor]) -> Inputs:
    """Return what makes other ids of the same shapes."""

    def make(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        return (), {
            name: x.clone() if name == "attention_mask" else torch.randint(3, 100, x.shape, generator=generator)
            for name, x in inputs.items()
        }

    return make


def made(model_class: type[Any], config_class: type[Any]) -> tuple[nn.Module, Inputs]:
    """Return a model and what makes its inputs."""
    model, inputs = build(model_class, config_class)
    return model, given(inputs)


def rows(chosen: list[str]) -> Iterator[tuple[Row, Any]]:
    """Yield a row for each architecture and what fills it."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for name, task, model_class, config_class in architectures(chosen):
        row = Row(name, task)
        yield row, functools.partial(judge, row, functools.partial(made, model_class, config_class), watch=False)


def about() -> str:
    """Return the versions."""
    return f"transformers {transformers.__version__}"
