"""Models of vit-pytorch, x-transformers and diffusers, each class that is a model of its own, small."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.images import with_operators
from benchmarks.zoo.judging import Inputs, Row, judge, one_line, run

Sizes = dict[str, Any]
Shape = tuple[int, ...]

POOL: Sizes = {
    "image_size": 64,
    "patch_size": 8,
    "num_classes": 10,
    "dim": 32,
    "depth": 3,
    "heads": 2,
    "dim_head": 16,
    "mlp_dim": 64,
    "frames": 4,
    "max_frames": 4,
    "image_patch_size": 8,
    "frame_patch_size": 2,
    "freq_patch_size": 8,
    "seq_len": 64,
    "max_tokens_per_depth": (32, 16, 16),
    "cls_depth": 2,
    "spatial_depth": 2,
    "temporal_depth": 2,
    "num_residual_streams": 4,
    "ndim": 2,
    "input_shape": 64,
    "num_slots": 4,
    "num_hierarchies": 3,
    "block_repeats": (1, 1, 2),
    "num_register_tokens": 2,
}
"""What the classes of vit-pytorch ask for, by the argument's name."""
OWN: dict[str, Sizes] = {
    "cct.CCT": {"img_size": 32, "embedding_dim": 32, "num_layers": 3, "num_heads": 2, "num_classes": 10},
    "cct_3d.CCT": {
        "img_size": 32,
        "num_frames": 4,
        "embedding_dim": 32,
        "n_conv_layers": 1,
        "num_layers": 3,
        "num_heads": 2,
        "num_classes": 10,
        "frame_kernel_size": 3,
        "frame_stride": 1,
        "frame_padding": 1,
    },
    "cross_vit.CrossViT": {"image_size": 64, "num_classes": 10, "sm_dim": 32, "lg_dim": 48, "depth": 2},
    "crossformer.CrossFormer": {"num_classes": 10, "dim": (16, 16, 32, 32), "depth": (1, 1, 2, 1)},
    "cvt.CvT": {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 48, "s3_depth": 3},
    "levit.LeViT": {"image_size": 224, "num_classes": 10, "dim": (32, 48, 64), "depth": 2, "heads": 2, "mlp_mult": 2},
    "max_vit.MaxViT": {"num_classes": 10, "dim": 32, "dim_head": 16, "depth": (1, 2), "window_size": 7},
    "max_vit_with_registers.MaxViT": {"num_classes": 10, "dim": 32, "dim_head": 16, "depth": (1, 2), "window_size": 7},
    "mobile_vit.MobileViT": {
        "image_size": (64, 64),
        "dims": [32, 48, 64],
        "num_classes": 10,
        "channels": [16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96],
    },
    "pit.PiT": {**POOL, "image_size": 64, "patch_size": 16, "depth": (2, 2)},
    "regionvit.RegionViT": {"dim": (16, 24, 32, 32), "depth": (1, 1, 2, 1), "num_classes": 10},
    "scalable_vit.ScalableViT": {
        "num_classes": 10,
        "dim": 16,
        "heads": (1, 2),
        "depth": (2, 2),
        "reduction_factor": (4, 2),
        "window_size": (8, None),
    },
    "sep_vit.SepViT": {"num_classes": 10, "dim": 16, "dim_head": 16, "heads": (1, 2), "depth": (2, 2)},
    "t2t.T2TViT": {"image_size": 64, "num_classes": 10, "dim": 32, "depth": 3, "heads": 2, "mlp_dim": 64},
    "twins_svt.TwinsSVT": {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 24, "s3_emb_dim": 32, "s4_emb_dim": 48},
    "vit_nd_rotary.ViTND": {**POOL, "heads": 2, "dim_head": 16},
}
PARTS = (
    *(["AcceptVideoWrapper", "Attention", "Transformer", "FeedForward", "TransformerBlock", "TransformerEncoderLayer"]),
    *(
        [
            "TransformerClassifier",
            "CrossTransformer",
            "MobileViTBlock",
            "R2LTransformer",
            "FactorizedTransformer",
            "Specialized",
        ]
    ),
    *(
        [
            "PatchDropout",
            "PatchMerger",
            "HyperConnection",
            "Parallel",
            "JetViTLinearAttention",
            "XCATransformer",
            "MOSS",
        ]
    ),
    *(
        [
            "Dino",
            "EsViTTrainer",
            "Extractor",
            "LeJEPA",
            "LeVJEPA",
            "LeVJEPAND",
            "MAE",
            "MP3",
            "MPP",
            "Recorder",
            "SimMIM",
            "VAT",
            "NDTransformer",
        ]
    ),
    *(["VideoTransformer", "DistillableViT", "DistillableT2TViT", "DistillableEfficientViT", "SigLIP"]),
)
"""Classes of vit-pytorch that are parts, or wrap another model, or repeat one under another name."""
PICTURES: tuple[Shape, ...] = ((3, 64, 64), (3, 32, 32), (3, 224, 224), (3, 256, 256), (3, 4, 64, 64), (3, 64))
IDS, VECTORS = "ids", "vectors"


def of_shape(shape: Shape) -> Inputs:
    """Return what makes two samples of a shape."""

    def make(seed: int) -> tuple[tuple[Any, ...], Sizes]:
        return (torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed)),), {}

    return make


def from_pool(model_class: type[nn.Module]) -> nn.Module:
    """Return a model of vit-pytorch, with what it asks for."""
    asked = inspect.signature(model_class.__init__).parameters
    sizes = {name: POOL[name] for name, one in asked.items() if name in POOL and one.default is one.empty}
    return model_class(**sizes, **({"dim_head": 16} if "dim_head" in asked else {}))


def first_that_runs(make: Callable[[], nn.Module], row: Row) -> tuple[nn.Module, Inputs]:
    """Return a model with the first kind of picture that it takes, evaluating and training."""
    torch.manual_seed(0)
    model = make()
    errors = []
    for shape in PICTURES:
        try:
            run(model.eval(), of_shape(shape), 0)
            run(model.train(), of_shape(shape), 0)
        except Exception as error:
            errors.append(one_line(error, 100))
        else:
            row.about = f"({'x'.join(map(str, shape))})"
            return model, of_shape(shape)
    raise RuntimeError(errors[0])


def vit_pytorch_rows(chosen: list[str]) -> Iterator[tuple[Row, Any]]:
    """Yield a row for each model class of vit-pytorch and what fills it."""
    with_operators()
    package = importlib.import_module("vit_pytorch")
    for info in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"vit_pytorch.{info.name}")
            for name, one in vars(module).items():
                path = f"{info.name}.{name}"
                own = inspect.isclass(one) and issubclass(one, nn.Module) and one.__module__ == module.__name__
                vision = any(part in name for part in ("iT", "ormer", "SVT", "NesT", "CCT", "RvT", "CvT", "WWT"))
                if not own or not vision or name in PARTS or (chosen and path not in chosen):
                    continue
                row = Row(path, "vit-pytorch")
                make = functools.partial(one, **OWN[path]) if path in OWN else functools.partial(from_pool, one)
                yield row, functools.partial(judge, row, functools.partial(first_that_runs, make, row))


def ids(length: int = 16) -> Inputs:
    """Return what makes two rows of ids."""

    def make(seed: int) -> tuple[tuple[Any, ...], Sizes]:
        return (torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(seed)),), {}

    return make


def x_transformers_models() -> dict[str, tuple[Callable[[], nn.Module], Inputs]]:
    """Return makers of x-transformers' models: its classes, and the options that change how branches are merged."""
    import x_transformers as x

    layers: dict[str, tuple[type[Any], Sizes]] = {
        "Decoder": (x.Decoder, {}),
        "Encoder": (x.Encoder, {}),
        "PrefixDecoder": (importlib.import_module("x_transformers.x_transformers").PrefixDecoder, {}),
        "Decoder(pre_norm=False)": (x.Decoder, {"pre_norm": False}),
        "Decoder(sandwich_norm)": (x.Decoder, {"sandwich_norm": True}),
        "Decoder(use_rmsnorm, rotary, swish glu)": (
            x.Decoder,
            {"use_rmsnorm": True, "rotary_pos_emb": True, "ff_swish": True, "ff_glu": True},
        ),
        "Decoder(scale_residual)": (x.Decoder, {"scale_residual": True}),
        "Decoder(macaron)": (x.Decoder, {"macaron": True}),
        "Decoder(sandwich_coef)": (x.Decoder, {"sandwich_coef": 1}),
        "Decoder(cross_attend=False, attn_on_attn)": (x.Decoder, {"attn_on_attn": True}),
        "Decoder(layer_dropout)": (x.Decoder, {"layer_dropout": 0.1}),
        "Decoder(use_layerscale)": (x.Decoder, {"use_layerscale": True}),
        "Decoder(shift_tokens)": (x.Decoder, {"shift_tokens": 1}),
        "Decoder(resi_dual)": (x.Decoder, {"resi_dual": True}),
        "Decoder(gate_residual)": (x.Decoder, {"gate_residual": True}),
    }

    def decoder(kind: type[Any], options: Sizes) -> nn.Module:
        stack = kind(dim=32, depth=3, heads=2, attn_dim_head=16, **options)
        return x.TransformerWrapper(num_tokens=128, max_seq_len=32, attn_layers=stack)  # type: ignore[no-any-return]

    def vision() -> nn.Module:
        stack = x.Encoder(dim=32, depth=3, heads=2, attn_dim_head=16)
        return x.ViTransformerWrapper(image_size=32, patch_size=8, attn_layers=stack, num_classes=10)  # type: ignore[no-any-return]

    def continuous() -> nn.Module:
        stack = x.Decoder(dim=32, depth=3, heads=2, attn_dim_head=16)
        return x.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=32, attn_layers=stack)  # type: ignore[no-any-return]

    def both() -> nn.Module:
        common = {"num_tokens": 128, "depth": 2, "heads": 2, "max_seq_len": 32, "attn_dim_head": 16}
        sizes = {f"{side}_{name}": size for side in ("enc", "dec") for name, size in common.items()}
        return x.XTransformer(dim=32, **sizes)  # type: ignore[no-any-return]

    def pairs(seed: int) -> tuple[tuple[Any, ...], Sizes]:
        one, two = ids()(seed)[0][0], ids()(seed + 50)[0][0]
        return (one, two), {}

    made = {name: (functools.partial(decoder, *one), ids()) for name, one in layers.items()}
    made["ViTransformerWrapper"] = (vision, of_shape((3, 32, 32)))
    made["ContinuousTransformerWrapper"] = (continuous, of_shape((16, 8)))
    made["XTransformer"] = (both, pairs)
    return made


def keywords(**shapes: Any) -> Inputs:
    """Return what makes keyword arguments: noise for a shape, any other value as it is."""

    def make(seed: int) -> tuple[tuple[Any, ...], Sizes]:
        generator = torch.Generator().manual_seed(seed)
        values = {
            name: torch.randn(*one, generator=generator) if isinstance(one, tuple) else one
            for name, one in shapes.items()
        }
        return (), values

    return make


def diffusers_models() -> dict[str, tuple[Callable[[], nn.Module], Inputs]]:
    """Return makers of diffusers' models."""
    import diffusers as d

    blocks = {"block_out_channels": (32, 64), "layers_per_block": 2, "norm_num_groups": 8}
    time = torch.tensor([3, 7])
    two = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 16}
    flux = {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    return {
        "UNet2DModel": (
            lambda: d.UNet2DModel(
                sample_size=16,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                attention_head_dim=8,
                **blocks,
            ),
            keywords(sample=(2, 3, 16, 16), timestep=time),
        ),
        "UNet2DConditionModel": (
            lambda: d.UNet2DConditionModel(
                sample_size=16,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
                cross_attention_dim=32,
                attention_head_dim=8,
                **blocks,
            ),
            keywords(sample=(2, 4, 16, 16), timestep=time, encoder_hidden_states=(2, 6, 32)),
        ),
        "UNet1DModel": (
            lambda: d.UNet1DModel(sample_size=64, in_channels=2, out_channels=2, extra_in_channels=16),
            keywords(sample=(2, 2, 64), timestep=time),
        ),
        "UNet3DConditionModel": (
            lambda: d.UNet3DConditionModel(
                sample_size=16,
                down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
                up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
                cross_attention_dim=32,
                attention_head_dim=8,
                block_out_channels=(32, 64),
                layers_per_block=1,
                norm_num_groups=8,
            ),
            keywords(sample=(2, 4, 3, 16, 16), timestep=time, encoder_hidden_states=(2, 6, 32)),
        ),
        "AutoencoderKL": (
            lambda: d.AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **blocks
            ),
            keywords(sample=(2, 3, 16, 16)),
        ),
        "DiTTransformer2DModel": (
            lambda: d.DiTTransformer2DModel(in_channels=4, sample_size=8, patch_size=2, norm_num_groups=8, **two),
            keywords(hidden_states=(2, 4, 8, 8), timestep=time, class_labels=torch.tensor([1, 2])),
        ),
        "PixArtTransformer2DModel": (
            lambda: d.PixArtTransformer2DModel(
                in_channels=4, sample_size=8, norm_num_groups=8, cross_attention_dim=32, caption_channels=32, **two
            ),
            keywords(
                hidden_states=(2, 4, 8, 8),
                timestep=time,
                encoder_hidden_states=(2, 6, 32),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ),
        ),
        "SD3Transformer2DModel": (
            lambda: d.SD3Transformer2DModel(
                sample_size=16,
                in_channels=4,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pooled_projection_dim=32,
                pos_embed_max_size=16,
                **{**two, "num_layers": 4},
            ),
            keywords(
                hidden_states=(2, 4, 16, 16),
                encoder_hidden_states=(2, 6, 32),
                pooled_projections=(2, 32),
                timestep=time,
            ),
        ),
        "FluxTransformer2DModel": (
            lambda: d.FluxTransformer2DModel(
                num_layers=2, num_single_layers=3, num_attention_heads=2, attention_head_dim=16, **flux
            ),
            keywords(
                hidden_states=(2, 16, 4),
                encoder_hidden_states=(2, 6, 32),
                pooled_projections=(2, 32),
                timestep=torch.tensor([0.1, 0.5]),
                img_ids=torch.zeros(16, 3),
                txt_ids=torch.zeros(6, 3),
            ),
        ),
        "Transformer2DModel": (
            lambda: d.Transformer2DModel(in_channels=32, norm_num_groups=8, cross_attention_dim=32, **two),
            keywords(hidden_states=(2, 32, 8, 8), encoder_hidden_states=(2, 6, 32)),
        ),
        "LatteTransformer3DModel": (
            lambda: d.LatteTransformer3DModel(
                in_channels=4,
                sample_size=8,
                patch_size=2,
                norm_num_groups=8,
                video_length=3,
                caption_channels=32,
                **two,
            ),
            keywords(
                hidden_states=(2, 4, 3, 8, 8),
                timestep=time,
                encoder_hidden_states=(2, 6, 32),
                enable_temporal_attentions=True,
            ),
        ),
        "WanTransformer3DModel": (
            lambda: d.WanTransformer3DModel(
                in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=64, cross_attn_norm=True, **two
            ),
            keywords(hidden_states=(2, 4, 2, 8, 8), timestep=time, encoder_hidden_states=(2, 6, 32)),
        ),
        "AuraFlowTransformer2DModel": (
            lambda: d.AuraFlowTransformer2DModel(
                sample_size=16,
                in_channels=4,
                num_mmdit_layers=2,
                num_single_dit_layers=2,
                num_attention_heads=2,
                attention_head_dim=16,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pos_embed_max_size=64,
            ),
            keywords(hidden_states=(2, 4, 16, 16), encoder_hidden_states=(2, 6, 32), timestep=time / 10),
        ),
        "SanaTransformer2DModel": (
            lambda: d.SanaTransformer2DModel(
                in_channels=4,
                out_channels=4,
                sample_size=8,
                caption_channels=32,
                cross_attention_dim=32,
                num_cross_attention_heads=2,
                cross_attention_head_dim=16,
                **two,
            ),
            keywords(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 6, 32), timestep=time),
        ),
    }


def built(make: Callable[[], nn.Module], inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Return a model that runs, and its inputs."""
    torch.manual_seed(0)
    model = make()
    run(model.eval(), inputs, 0)
    return model, inputs


def rows(chosen: list[str]) -> Iterator[tuple[Row, Any]]:
    """Yield a row for each model of the libraries that are installed, and what fills it."""
    with_operators()
    if importlib.util.find_spec("vit_pytorch"):
        yield from vit_pytorch_rows(chosen)
    for library, models in (("x_transformers", x_transformers_models), ("diffusers", diffusers_models)):
        for name, one in models().items() if importlib.util.find_spec(library) else ():
            if not chosen or name in chosen:
                row = Row(name, library.replace("_", "-"))
                yield row, functools.partial(judge, row, functools.partial(built, *one))


def about() -> str:
    """Return the versions."""
    from importlib.metadata import version

    names = [n for n in ("vit-pytorch", "x-transformers", "diffusers") if importlib.util.find_spec(n.replace("-", "_"))]
    return ", ".join(f"{name} {version(name)}" for name in names)
