"""The depth axis of models whose depth axis a person can read off: expected paths are written by hand."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flowscope
from flowscope.errors import FlowscopeError
from flowscope.model.flows import Flow, FlowPlan, display_path, find_flows


def paths(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for i in range(count))


def shape(plan: FlowPlan) -> list[tuple[str, str, int]]:
    return [(f.name, f.kind, len(f.outputs)) for f in plan]


class Block(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Moe(nn.Module):
    def __init__(self, width: int = 8, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, width)) for _ in range(count)
        )


class MoeBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Moe()


class Transformer(nn.Module):
    """Embedding, blocks, norm, head; `blocks` is whatever holds them."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 8), blocks
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)


# ---------------------------------------------------------------- repeated blocks


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList(Block() for _ in range(5)),
        nn.Sequential(*(Block() for _ in range(5))),
        nn.Sequential(OrderedDict((f"block_{i}", Block()) for i in range(5))),
        nn.ModuleDict({f"block{i}": Block() for i in range(5)}),
        nn.ModuleList([Block(), MoeBlock(), Block(), MoeBlock(), Block()]),
    ],
)
def test_blocks_in_any_container(container: nn.Module) -> None:
    plan = find_flows(Transformer(container))
    outputs = tuple(f"blocks.{name}" for name in container._modules)
    assert plan.flows == (Flow("blocks", "blocks", outputs, outputs[0]),)


def test_numbered_attributes_and_gpt_style_dict() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block0, self.block1, self.block2, self.head = Block(), Block(), Block(), nn.Linear(8, 3)

    assert find_flows(Net()).flows == (Flow("block", "blocks", ("block0", "block1", "block2"), "block0"),)

    class NanoGpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict(
                {"wte": nn.Embedding(11, 8), "h": nn.ModuleList(Block() for _ in range(3)), "ln_f": nn.LayerNorm(8)}
            )
            self.lm_head = nn.Linear(8, 11)

    flow = Flow("transformer.h", "blocks", paths("transformer.h", 3), "transformer.h.0")
    assert find_flows(NanoGpt()).flows == (flow,)


def test_sequential_leaves_out_stem_and_head_but_keeps_what_lies_between() -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(3, 8)

    class Shrink(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

    model = nn.Sequential(Stem(), Block(), Block(), Shrink(), Block(), Stem())
    assert find_flows(model).flows == (Flow("network", "blocks", ("1", "2", "3", "4"), "1"),)


def test_mixture_of_experts_and_parallel_lists_are_no_flows() -> None:
    assert shape(find_flows(Transformer(nn.ModuleList(MoeBlock() for _ in range(4))))) == [("blocks", "blocks", 4)]

    class Multi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(5, 8)
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(4))

    plan = find_flows(Multi())
    assert len(plan) == 0
    assert any(note.startswith("heads: side by side") for note in plan.notes)
    alone = find_flows(Moe())
    assert len(alone) == 0


def test_shared_blocks() -> None:
    block = Block()
    for container in (nn.ModuleList([block] * 6), nn.Sequential(*[block] * 6)):
        assert find_flows(Transformer(container)).flows == (Flow("blocks", "blocks", ("blocks.0",), "blocks.0"),)
    one = find_flows(Transformer(nn.ModuleList([Block()])))
    assert one.flows == (Flow("blocks", "blocks", ("blocks.0",), "blocks.0"),)

    class Universal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(11, 8), Block(), nn.Linear(8, 11)

    assert find_flows(Universal()).flows == (Flow("block", "blocks", ("block",), "block"),)


def test_blocks_as_lists_of_branches() -> None:
    """The layout of many written-out transformers: `for attn, ff in self.layers: x = attn(x) + x; x = ff(x) + x`."""

    class PreNorm(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(8), inner

    def layer() -> nn.ModuleList:
        feed = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        return nn.ModuleList([PreNorm(nn.MultiheadAttention(8, 2)), PreNorm(feed)])

    plan = find_flows(Transformer(nn.ModuleList(layer() for _ in range(3))))
    outputs = tuple(f"blocks.{i}.{j}" for i in range(3) for j in range(2))
    assert plan.flows == (Flow("blocks", "blocks", outputs, "blocks.0.0"),)
    assert "never called" in plan.notes[0]


def test_torch_transformers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    encoder = find_flows(nn.TransformerEncoder(layer, 3))
    assert encoder.flows == (Flow("layers", "blocks", paths("layers", 3), "layers.0"),)
    both = find_flows(nn.Transformer(8, 2, 3, 4, 12, batch_first=True))
    assert [f.name for f in both] == ["encoder.layers", "decoder.layers"]
    assert [f.outputs for f in both] == [paths("encoder.layers", 3), paths("decoder.layers", 4)]


# ---------------------------------------------------------------- convnets, as torchvision writes them


class BasicBlock(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(into, out, 3), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3), nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(nn.Conv2d(into, out, 1), nn.BatchNorm2d(out)) if into != out else None

    def forward(self, x: Tensor) -> Tensor:
        return x


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool = (
            nn.Conv2d(3, 4, 7),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(3),
        )
        into = 4
        for i, depth in enumerate(depths):
            out = 4 * 2**i
            self.add_module(
                f"layer{i + 1}", nn.Sequential(*(BasicBlock(into if j == 0 else out, out) for j in range(depth)))
            )
            into = out
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(into, 10)


def test_resnet_stages() -> None:
    plan = find_flows(ResNet((2, 3, 2)))
    stages = [paths("layer1", 2), paths("layer2", 3), paths("layer3", 2)]
    assert plan.flows == (
        Flow("network", "network", stages[0] + stages[1] + stages[2], "layer1.0"),
        *(Flow(f"layer{i + 1}", "stage", stage, stage[0]) for i, stage in enumerate(stages)),
    )


def test_a_stage_of_one_block_is_part_of_the_network_only() -> None:
    assert shape(find_flows(ResNet((1, 3, 2)))) == [
        ("network", "network", 6),
        ("layer2", "stage", 3),
        ("layer3", "stage", 2),
    ]


class ConvNormActivation(nn.Sequential):
    def __init__(self, into: int, out: int) -> None:
        super().__init__(nn.Conv2d(into, out, 3), nn.BatchNorm2d(out), nn.SiLU())


class MBConv(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.block = nn.Sequential(ConvNormActivation(into, 2 * into), nn.Conv2d(2 * into, out, 1), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_efficientnet_and_mobilenet() -> None:
    class Net(nn.Module):
        def __init__(self, features: nn.Sequential) -> None:
            super().__init__()
            self.features, self.classifier = features, nn.Sequential(nn.Dropout(0.2), nn.Linear(20, 10))

    staged = nn.Sequential(
        ConvNormActivation(3, 4),
        nn.Sequential(MBConv(4, 6)),
        nn.Sequential(MBConv(6, 8), MBConv(8, 8)),
        nn.Sequential(MBConv(8, 12), MBConv(12, 12), MBConv(12, 12)),
        ConvNormActivation(12, 20),
    )
    plan = find_flows(Net(staged))
    assert shape(plan) == [("network", "network", 6), ("features.2", "stage", 2), ("features.3", "stage", 3)]
    assert plan[0].outputs[0] == plan[0].entry == "features.1.0"
    flat = nn.Sequential(ConvNormActivation(3, 4), MBConv(4, 6), MBConv(6, 6), MBConv(6, 9), ConvNormActivation(9, 20))
    assert find_flows(Net(flat)).flows == (Flow("features", "blocks", paths("features", 4)[1:], "features.1"),)


class DenseLayer(nn.Module):
    def __init__(self, into: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(into), nn.ReLU(), nn.Conv2d(into, 4 * growth, 1)
        self.norm2, self.relu2 = nn.BatchNorm2d(4 * growth), nn.ReLU()
        self.conv2 = nn.Conv2d(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x


class DenseBlock(nn.ModuleDict):
    def __init__(self, count: int, into: int, growth: int) -> None:
        super().__init__()
        for i in range(count):
            self.add_module(f"denselayer{i + 1}", DenseLayer(into + i * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_densenet_is_concatenation() -> None:
    features = nn.Sequential(OrderedDict(conv0=nn.Conv2d(3, 6, 7), norm0=nn.BatchNorm2d(6), relu0=nn.ReLU()))
    features.add_module("denseblock1", DenseBlock(3, 6, 5))
    features.add_module("transition1", nn.Sequential(nn.BatchNorm2d(21), nn.ReLU(), nn.Conv2d(21, 10, 1)))
    features.add_module("denseblock2", DenseBlock(4, 10, 5))
    features.add_module("norm5", nn.BatchNorm2d(30))
    model = nn.Sequential(OrderedDict(features=features, classifier=nn.Linear(30, 10)))
    one, two = (tuple(f"features.denseblock{b}.denselayer{i + 1}" for i in range(n)) for b, n in ((1, 3), (2, 4)))
    assert find_flows(model).flows == (
        Flow("features.denseblock1", "concat", one, one[0]),
        Flow("features.denseblock2", "concat", two, two[0]),
    )


def test_stages_with_numbered_blocks_and_inception_names() -> None:
    class Stage(nn.Module):
        def __init__(self, into: int, out: int, depth: int) -> None:
            super().__init__()
            for j in range(depth):
                self.add_module(f"b{j + 1}", BasicBlock(into if j == 0 else out, out))

        def forward(self, x: Tensor) -> Tensor:
            return x

    regnet = nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "trunk": nn.Module()})
    regnet["trunk"].s1, regnet["trunk"].s2 = Stage(4, 6, 2), Stage(6, 9, 3)
    blocks = ("trunk.s1.b1", "trunk.s1.b2", "trunk.s2.b1", "trunk.s2.b2", "trunk.s2.b3")
    assert find_flows(regnet).flows == (
        Flow("network", "network", blocks, blocks[0]),
        Flow("trunk.s1", "stage", blocks[:2], blocks[0]),
        Flow("trunk.s2", "stage", blocks[2:], blocks[2]),
    )

    class Inception(nn.Module):
        def __init__(self, into: int) -> None:
            super().__init__()
            self.branch1 = ConvNormActivation(into, 2)
            self.branch2 = nn.Sequential(ConvNormActivation(into, 3), ConvNormActivation(3, 4))
            self.branch3 = nn.Sequential(ConvNormActivation(into, 3), ConvNormActivation(3, 6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x)], 1)

    class GoogLeNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.inception3a, self.inception3b = nn.Conv2d(3, 5, 7), Inception(5), Inception(12)
            self.pool, self.inception4a, self.fc = nn.MaxPool2d(2), Inception(12), nn.Linear(12, 10)

    names = ("inception3a", "inception3b", "inception4a")
    assert find_flows(GoogLeNet()).flows == (Flow("inception", "blocks", names, names[0]),)


def test_unet_has_a_way_down_and_a_way_up() -> None:
    class DoubleConv(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            self.conv = nn.Sequential(nn.Conv2d(into, out, 3), nn.ReLU(), nn.Conv2d(out, out, 3), nn.ReLU())

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inc = DoubleConv(3, 4)
            self.down1, self.down2, self.down3 = DoubleConv(4, 8), DoubleConv(8, 16), DoubleConv(16, 32)
            self.up1, self.up2, self.up3 = DoubleConv(48, 16), DoubleConv(24, 8), DoubleConv(12, 4)
            self.outc = nn.Conv2d(4, 2, 1)

    assert shape(find_flows(UNet())) == [("down", "blocks", 3), ("up", "blocks", 3)]


# ---------------------------------------------------------------- plain chains


def test_sequential_mlp_points_come_after_norm_and_activation() -> None:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(6, 7),  # 1
        nn.BatchNorm1d(7),
        nn.ReLU(),  # 3: the point
        nn.Dropout(0.1),
        nn.Linear(7, 5),  # 5
        nn.Dropout(0.1),
        nn.Tanh(),  # 7: the point
        nn.Linear(5, 4),  # 8: the point
        nn.Softmax(-1),
    )
    assert find_flows(model).flows == (Flow("network", "chain", ("3", "7", "8")),)


def test_nested_sequential_is_flattened() -> None:
    def layer(into: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(into, out), nn.GELU())

    model = nn.Sequential(layer(6, 7), nn.Sequential(layer(7, 5), layer(5, 9)), nn.Linear(9, 2))
    assert find_flows(model).flows == (Flow("network", "chain", ("0.1", "1.0.1", "1.1.1", "2")),)


def test_vgg_is_one_chain() -> None:
    class Vgg(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(True)
            )
            self.avgpool = nn.AdaptiveAvgPool2d(7)
            self.classifier = nn.Sequential(nn.Linear(294, 20), nn.ReLU(True), nn.Dropout(), nn.Linear(20, 10))

    points = ("features.1", "features.5", "classifier.1", "classifier.3")
    assert find_flows(Vgg()).flows == (Flow("network", "chain", points),)


def test_custom_mlp_with_attributes() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.relu, self.fc2, self.fc3 = nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.Linear(5, 2)

    # the one relu may be called anywhere, so it is no part of a point
    assert find_flows(Mlp()).flows == (Flow("network", "chain", ("fc1", "fc2", "fc3")),)

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3), nn.Conv2d(6, 5, 3)
            self.layers = nn.ModuleList([nn.Linear(45, 7), nn.Linear(7, 9)])

    assert find_flows(Conv()).flows == (Flow("network", "chain", ("conv1", "conv2", "conv3", "layers.0", "layers.1")),)


def test_shared_activation_is_no_point() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(6, 7), act, nn.Linear(7, 5), act, nn.Linear(5, 2))
    assert find_flows(model).flows == (Flow("network", "chain", ("0", "2", "4")),)


def test_embedding_at_the_head_of_a_sequence_is_a_point() -> None:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 11))
    assert find_flows(model).flows == (Flow("network", "chain", ("0", "2", "3")),)


def test_widths_separate_actor_and_critic_and_the_two_heads_of_a_vae() -> None:
    def mlp(out: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, out))

    agent = nn.ModuleDict({"actor": mlp(3), "critic": mlp(2)})
    assert find_flows(agent).flows == (
        Flow("actor", "chain", ("actor.1", "actor.3", "actor.4")),
        Flow("critic", "chain", ("critic.1", "critic.3", "critic.4")),
    )

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.mean, self.logvar = nn.Linear(12, 7), nn.Linear(7, 3), nn.Linear(7, 3)
            self.fc3, self.fc4 = nn.Linear(3, 7), nn.Linear(7, 12)

    plan = find_flows(Vae())
    assert plan.flows == (Flow("network", "chain", ("fc1", "mean", "fc3", "fc4")),)
    assert "logvar" in plan.notes[0]


def test_members_of_an_ensemble_are_a_flow_each() -> None:
    class Member(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(5, 7), nn.Linear(7, 5)

    ensemble = nn.ModuleDict({"models": nn.ModuleList(Member() for _ in range(3))})
    expected = [Flow(f"models.{i}", "chain", (f"models.{i}.fc1", f"models.{i}.fc2")) for i in range(3)]
    assert list(find_flows(ensemble)) == expected
    single = nn.ModuleDict({"model": nn.Sequential(*(Block() for _ in range(3)))})
    assert shape(find_flows(single)) == [("model", "blocks", 3)]


def test_query_key_and_value_are_side_by_side() -> None:
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
    assert find_flows(nn.ModuleDict({"attn": attention, "fc": nn.Linear(8, 3)})).flows == (
        Flow("network", "chain", ("attn.q_proj", "attn.out_proj", "fc")),
    )


def test_a_weight_normed_and_a_lazy_layer_are_layers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.LazyLinear(5)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 7)), nn.ReLU(), lazy)
    assert find_flows(model).flows == (Flow("network", "chain", ("1", "2")),)


# ---------------------------------------------------------------- recurrence


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_fused_recurrent_layers(layer: type[nn.RNNBase]) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(11, 6), layer(6, 8, 2), nn.Linear(8, 3)

    plan = find_flows(Tagger())
    assert plan.flows == (Flow("rnn", "time", ("rnn",), None, fused=True),)
    assert "recurrent" in plan.notes[-1]
    assert find_flows(layer(6, 8)).flows == (Flow("network", "time", ("",), None, fused=True),)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells(cell: type[nn.RNNCellBase]) -> None:
    model = nn.ModuleDict({"cell": cell(6, 8), "head": nn.Linear(8, 3)})
    assert find_flows(model).flows == (Flow("cell", "time", ("cell",)),)


def test_recurrence_comes_after_blocks() -> None:
    model = nn.ModuleDict({"rnn": nn.GRU(8, 8), "blocks": nn.ModuleList(Block() for _ in range(3))})
    assert [f.kind for f in find_flows(model)] == ["blocks", "time"]


# ---------------------------------------------------------------- wrappers, overrides, messages


def test_wrapped_models_keep_raw_paths_and_show_plain_names() -> None:
    inner = Transformer(nn.ModuleList(Block() for _ in range(3)))

    class Ddp(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    for model, prefix in (
        (Ddp(inner), "module."),
        (torch.compile(inner, backend="eager"), "_orig_mod."),
        (Ddp(torch.compile(inner, backend="eager")), "module._orig_mod."),
    ):
        plan = find_flows(model)
        assert plan.flows == (Flow("blocks", "blocks", paths(f"{prefix}blocks", 3), f"{prefix}blocks.0"),)
        assert [model.get_submodule(p) for p in plan[0].outputs] == list(inner.blocks)
        assert find_flows(model, flows=["blocks"]).flows == plan.flows
        assert find_flows(model, flows=["blocks.*"])[0].outputs == plan[0].outputs


def test_compiled_blocks() -> None:
    model = Transformer(nn.ModuleList(torch.compile(Block(), backend="eager") for _ in range(3)))
    assert find_flows(model)[0].outputs == paths("blocks", 3)


def test_display_path() -> None:
    assert display_path("module._orig_mod.layers.0") == "layers.0"
    assert display_path("layers.0._orig_mod.mlp._fsdp_wrapped_module") == "layers.0.mlp"
    assert display_path("encoder.module.layers") == "encoder.module.layers"
    assert display_path("") == ""


def test_overrides() -> None:
    model = ResNet((2, 3))
    assert find_flows(model, flows="layer2").flows == (Flow("layer2", "blocks", paths("layer2", 3), "layer2.0"),)
    everything = find_flows(model, flows=["layer*.*"])
    assert everything.flows == (Flow("layer", "blocks", paths("layer1", 2) + paths("layer2", 3), "layer1.0"),)
    chain = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)), "b": nn.Linear(3, 2)})
    assert find_flows(chain, flows=["a"]).flows == (Flow("a", "chain", ("a.1", "a.2")),)
    assert find_flows(nn.ModuleDict({"r": nn.GRU(3, 4)}), flows=["r"])[0].fused
    two = find_flows(model, flows=["layer1", "layer1"])
    assert [f.name for f in two] == ["layer1", "layer1#2"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("layer22", r"'layer22' is no module of ResNet\. Close: .*layer2.*find_flows\(model\)"),
        ("layer9.*", r"matches no module with parameters"),
        ("relu", r"'relu' \(ReLU\) has no children with parameters"),
        (3, r"got 3, expected module paths"),
    ],
)
def test_bad_overrides_say_what_is_wrong(entry: object, message: str) -> None:
    with pytest.raises(FlowscopeError, match=message):
        find_flows(ResNet((2, 3)), flows=[entry])  # type: ignore[list-item]


def test_not_a_module() -> None:
    with pytest.raises(FlowscopeError, match=r"got dict, expected a torch\.nn\.Module"):
        find_flows({})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 4), nn.Sequential(), nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.ReLU()]
)
def test_a_model_with_no_flow_says_so(model: nn.Module) -> None:
    plan = find_flows(model)
    assert list(plan) == []
    assert f"no depth axis found in {type(model).__name__}" in str(plan)
    assert "parameter metrics" in str(plan)


def test_plan_prints_a_table() -> None:
    text = str(find_flows(ResNet((2, 3))))
    lines = [line.split() for line in text.splitlines()]
    assert lines == [
        ["flow", "kind", "modules", "first", "last"],
        ["network", "network", "5", "layer1.0", "layer2.2"],
        ["layer1", "stage", "2", "layer1.0", "layer1.1"],
        ["layer2", "stage", "3", "layer2.0", "layer2.2"],
    ]


def test_a_module_that_holds_its_parent() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.hook = nn.Linear(6, 7), nn.Linear(7, 2), nn.Module()
            self.hook.owner = self

    assert find_flows(Mlp()).flows == (Flow("network", "chain", ("fc1", "fc2")),)


def test_lora_layers_are_layers() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    model = nn.Sequential(Lora(nn.Linear(6, 7)), nn.ReLU(), Lora(nn.Linear(7, 5)))
    assert find_flows(model).flows == (Flow("network", "chain", ("1", "2")),)


def test_nothing_is_changed_or_drawn() -> None:
    model = ResNet((2, 3))
    before = copy.deepcopy(model.state_dict())
    facts = [(n, m.training, dict(m.__dict__["_forward_hooks"]), set(m.__dict__)) for n, m in model.named_modules()]
    state = torch.get_rng_state()
    find_flows(model)
    assert torch.equal(state, torch.get_rng_state())
    assert facts == [
        (n, m.training, dict(m.__dict__["_forward_hooks"]), set(m.__dict__)) for n, m in model.named_modules()
    ]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_deep_models_are_quick_to_read() -> None:
    assert len(find_flows(Transformer(nn.ModuleList(Block(4, 4) for _ in range(1024))))[0].outputs) == 1024


def test_what_wrap_added_is_no_flow() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc1, self.fc2 = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(torch.relu(self.fc1(self.norm(x))))

    class Universal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks, self.head = nn.Linear(4, 6), nn.ModuleList([Block()]), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(x)

    model = Universal()
    plain = find_flows(model)
    assert shape(plain) == [("blocks", "blocks", 1)]
    flowscope.wrap(model, mode="keel", example_inputs=torch.randn(3, 4))
    assert find_flows(model).flows == plain.flows
