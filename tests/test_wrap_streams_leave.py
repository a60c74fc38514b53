"""Streams never reach what is not a block: hidden states, layer drop, lists cut short, hierarchical vision models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
import wrap_models as models
from torch import Tensor, nn
from torch.nn import functional
from wrap_models import B, D

from flowscope.errors import FlowscopeError
from flowscope.merging.wrapping import connections, wrap

STREAM_MODES = ["shc", "dhc", "mhc"]


def segformer(kind: Any) -> nn.Module:
    sizes = {"depths": [2, 2], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "patch_sizes": [7, 3]}
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, strides=[4, 2], sr_ratios=[2, 1], mlp_ratios=[2, 2], decoder_hidden_size=24, **sizes
    )
    return kind(config)


def hierarchical(name: str) -> nn.Module:
    if name == "segformer":
        return segformer(transformers.SegformerModel)
    if name == "segformer for segmentation":
        return segformer(transformers.SegformerForSemanticSegmentation)
    if name == "cvt":
        config = transformers.CvtConfig(embed_dim=[16, 32, 48], num_heads=[1, 2, 3], depth=[1, 2, 3])
        return transformers.CvtModel(config)
    if name == "pvt v2":
        sizes = {"hidden_sizes": [16, 32, 48, 64], "depths": [2] * 4, "num_attention_heads": [1, 2, 3, 4]}
        return transformers.PvtV2Model(transformers.PvtV2Config(**sizes))
    sizes = {"hidden_sizes": [16, 32], "depths": [2, 2]}
    return transformers.ConvNextModel(transformers.ConvNextConfig(num_stages=2, **sizes))


def all_tensors(output: Any) -> list[Tensor]:
    return [
        x
        for value in output.values()
        for x in (value if isinstance(value, tuple) else [value])
        if isinstance(x, Tensor) and x.is_floating_point()
    ]


@pytest.mark.parametrize("mode", ["dhc", "mhc"])
@pytest.mark.parametrize("name", ["segformer", "segformer for segmentation", "cvt", "pvt v2", "convnext"])
def test_feature_maps_of_hierarchical_models_are_whole(name: str, mode: str) -> None:
    torch.manual_seed(0)
    model, pixels = hierarchical(name).eval(), torch.randn(1, 3, 64, 64)
    expected = all_tensors(model(pixels, output_hidden_states=True))
    wrap(model, mode, example_inputs=pixels)
    got = all_tensors(model(pixels, output_hidden_states=True))
    assert len(got) == len(expected) >= 3
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Collects(nn.Module):
    """Returns hidden states, and a map [B, C, H, W] that ends in (streams, features) as its streams do."""

    config, dummy_inputs = None, None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.PreNormBlock() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"hidden_states": tuple(states), "map": x.unsqueeze(2).repeat(1, 1, 4, 1)}


def test_a_map_of_the_shape_of_streams_is_left() -> None:
    model, x = Collects(), models.hidden_states()
    expected = all_tensors(model(x))
    wrap(model, "dhc", streams=4, example_inputs=(x,))
    got = all_tensors(model(x))
    assert got[-1].shape == (B, 5, 4, D)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()  # dynamo reads .grad of what enters a block, which warns where it is no leaf
@pytest.mark.parametrize("whole", [True, False])
def test_hidden_states_of_compiled_blocks_are_plain(whole: bool) -> None:
    model, x = Collects(), models.hidden_states()
    expected = model(x)["hidden_states"]
    wrap(model, "dhc", example_inputs=(x,))
    if whole:
        got = torch.compile(model, backend="eager")(x)["hidden_states"]
    else:
        for block in model.blocks:
            block.compile(backend="eager")
        got = model(x)["hidden_states"]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def m2m100() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 4), ("ffn_dim", 64))}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 32, "vocab_size": 64}
    config = transformers.M2M100Config(
        **sizes, max_position_embeddings=32, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        encoder_layerdrop=0.4, decoder_layerdrop=0.4,
    )  # fmt: skip
    ids = torch.arange(16).view(2, 8) % 60 + 3
    return transformers.M2M100ForConditionalGeneration(config), {"input_ids": ids, "decoder_input_ids": ids}


def wav2vec2(stable: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.Wav2Vec2Config(
        **sizes, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.4,
        do_stable_layer_norm=stable, feat_extract_norm="layer" if stable else "group",
    )  # fmt: skip
    return transformers.Wav2Vec2Model(config), {"input_values": torch.randn(2, 400)}


def without_dropout(model: nn.Module) -> nn.Module:
    """The layers are dropped still."""
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "activation_dropout", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


@pytest.mark.parametrize("mode", STREAM_MODES)
@pytest.mark.parametrize("make", [m2m100, lambda: wav2vec2(False), lambda: wav2vec2(True)])
def test_layer_drop_at_any_block(make: Any, mode: str) -> None:
    """Each step draws which layers run; the plain twin draws the same."""
    torch.manual_seed(0)
    model, inputs = make()
    twin = without_dropout(copy.deepcopy(model))
    wrap(model, mode, example_inputs=inputs)
    without_dropout(model)
    for step in range(15):
        torch.manual_seed(step)
        expected = all_tensors(twin(**inputs, output_hidden_states=True))
        torch.manual_seed(step)
        got = all_tensors(model(**inputs, output_hidden_states=True))
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        got[0].sum().backward()


def trained(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for _, connection in connections(model):
            for parameter in connection.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


class WithNorm(models.Stack):
    """A norm between the blocks and the head."""

    def __init__(self) -> None:
        super().__init__(models.PreNormBlock, 4)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("mode", STREAM_MODES)
def test_list_cut_short_at_the_end(mode: str) -> None:
    """After training: what leaves the third block is the mean of its streams."""
    torch.manual_seed(0)
    model, x = WithNorm().double(), models.hidden_states().double()
    wrap(model, mode, example_inputs=x)
    trained(model)
    h = model.stem(x)
    for block in model.blocks[:3]:
        h = block(h)
    assert h.shape == (B, 5, 4, D)
    expected = model.head(model.norm(h.mean(-2)))
    model.blocks = model.blocks[:3]
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", STREAM_MODES)
def test_list_cut_short_at_the_beginning(mode: str) -> None:
    model, x = WithNorm(), models.hidden_states()
    short = copy.deepcopy(model)
    short.blocks = short.blocks[2:]
    wrap(model, mode, example_inputs=x)
    model.blocks = model.blocks[2:]
    torch.testing.assert_close(model(x), short(x), rtol=1e-5, atol=1e-6)


class ByFunction(models.Stack):
    """What follows its blocks is no module."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return functional.layer_norm(x, (D,)).mean(1)


def test_streams_that_a_function_would_take_are_an_error() -> None:
    model, x = ByFunction(models.PreNormBlock, 3), models.hidden_states()
    wrap(model, "dhc", example_inputs=x)
    model(x)
    model.blocks = model.blocks[:2]
    with pytest.raises(FlowscopeError, match="ByFunction: the last block of a flow with streams did not run"):
        model(x)


class Returns(nn.Module):
    """An encoder that returns what its last block returned, inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.PreNormBlock() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        for block in self.blocks:
            x = block(x)
        return x, None


def test_streams_end_where_the_module_that_runs_the_blocks_returns() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Returns()

        def forward(self, x: Tensor) -> Tensor:
            return functional.silu(self.encoder(x)[0])

    model, x = Outer(), models.hidden_states()
    short = copy.deepcopy(model)
    short.encoder.blocks = short.encoder.blocks[:2]
    wrap(model, "mhc", example_inputs=x)
    model.encoder.blocks = model.encoder.blocks[:2]
    torch.testing.assert_close(model(x), short(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_may_be_dropped_too(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, inputs = m2m100()
    twin = without_dropout(copy.deepcopy(model))
    wrap(model, "dhc", example_inputs=inputs)
    without_dropout(model)
    settings = {"use_reentrant": reentrant}
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(settings)
    for step in range(6):
        torch.manual_seed(step)
        expected = all_tensors(twin(**inputs, use_cache=False, output_hidden_states=True))
        torch.manual_seed(step)
        got = all_tensors(model(**inputs, use_cache=False, output_hidden_states=True))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        grads = [m.zero_grad() or out[0].sum().backward() for m, out in ((model, got), (twin, expected))]
        assert len(grads) == 2
        torch.testing.assert_close(model.model.shared.weight.grad, twin.model.shared.weight.grad, rtol=1e-3, atol=1e-5)


class SkipsFirst(nn.Module):
    """Layer drop of the block that expands."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.PreNormBlock() for _ in range(3))
        self.begin = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[self.begin :]:
            x = block(x)
        return x


@pytest.mark.parametrize("mode", ["shc", "dhc"])
def test_distinct_streams_begin_alike_where_the_first_block_does_not_run(mode: str) -> None:
    torch.manual_seed(0)
    model, x = SkipsFirst(), models.hidden_states()
    plain = copy.deepcopy(model)
    wrap(model, mode, streams_init="distinct", example_inputs=x)
    model = copy.deepcopy(model)  # the copy's blocks begin with the scale of the copy's first
    for part in (model.blocks[0].mix, model.blocks[0].down):  # adds nothing, as if it had not run
        nn.init.zeros_(part.weight)
        nn.init.zeros_(part.bias)
    with torch.no_grad():
        model.blocks[0].connection.stream_scale.mul_(0.5)
    whole = model(x)
    model.begin = 1
    torch.testing.assert_close(model(x), whole)
    assert (whole - plain(x)).abs().max() > 0.1
