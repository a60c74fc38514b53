"""Merges that no list of blocks shows: loops that add, two carries, two widths, rearranged carries, nested blocks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from test_wrap_model import PRESERVING
from torch import Tensor, nn

import flowscope
from flowscope.merging.connection import Connection
from flowscope.model.sites import find_sites

B, T, D = 3, 5, 8


class Branch(nn.Module):
    """A norm and two layers."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Loop(nn.Module):
    """The module around the lists adds."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Branch(), Branch()]) for _ in range(depth))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for attention, feed_forward in self.layers:  # type: ignore[misc]
            x = attention(x) + x
            x = feed_forward(x) + x
        return self.norm(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Branch(), Branch()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + x
        return self.b(x) + x


class Blocks(nn.Module):
    """The same as blocks that add for themselves."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Pair() for _ in range(depth)), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Vision(nn.Module):
    """A loop inside of a model."""

    def __init__(self, inner: Any = Loop) -> None:
        super().__init__()
        self.stem, self.transformer, self.head = nn.Linear(4, D), inner(), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transformer(self.stem(x)).mean(1))


def hidden() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, T, D)


def perturb(model: nn.Module) -> None:
    """As if trained."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.mark.parametrize("mode", ["keel", "highway", "keel-postln", "shc", "dhc", "mhc", "mhc-lite"])
def test_a_loop_that_adds_computes_what_blocks_do(mode: str) -> None:
    """With the same weights and connections, trained: values and gradients."""
    torch.manual_seed(0)
    loop, blocks, x = Loop().double(), Blocks().double(), hidden().double()
    for wrapped in (loop, blocks):
        flowscope.wrap(wrapped, mode, example_inputs=x)
    assert [path for path, _ in flowscope.connections(loop)] == ["connection"]
    assert flowscope.connections(loop)[0][1].sites == 8
    perturb(blocks)
    for layer, (a, b) in zip(blocks.layers, loop.layers, strict=True):  # type: ignore[misc]
        a.load_state_dict(layer.a.state_dict())
        b.load_state_dict(layer.b.state_dict())
    loop.norm.load_state_dict(blocks.norm.state_dict())
    theirs = [dict(c.named_parameters()) for _, c in flowscope.connections(blocks)]
    with torch.no_grad():
        for name, parameter in flowscope.connections(loop)[0][1].named_parameters():
            kind, number, *rest = name.split(".")  # gates.5.weight is gates.1.weight of the third block
            parameter.copy_(theirs[int(number) // 2][".".join([kind, str(int(number) % 2), *rest])])
    torch.testing.assert_close(loop(x), blocks(x), rtol=1e-9, atol=1e-9)
    weights = torch.randn(B, T, D, dtype=torch.float64)
    for model in (loop, blocks):
        (model(x) * weights).sum().backward()
    torch.testing.assert_close(loop.layers[2][0].up.weight.grad, blocks.layers[2].a.up.weight.grad)  # type: ignore


@pytest.mark.parametrize(("mode", "options"), PRESERVING)
def test_a_loop_inside_of_a_model(mode: str, options: dict[str, Any]) -> None:
    model, x = Vision(), torch.randn(B, T, 4)
    expected, before = model(x), copy.deepcopy(model.state_dict())
    flowscope.wrap(model, mode, example_inputs=x, **options)
    assert [path for path, _ in flowscope.connections(model)] == ["transformer.connection"]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    model.load_state_dict(before)  # saved before: strictly
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    torch.testing.assert_close(torch.load(stored, weights_only=False)(x), model(x))
    torch.testing.assert_close(flowscope.unwrap(model)(x), expected)
    assert type(model.transformer) is Loop


def test_the_norm_behind_a_loop_is_no_post_norm() -> None:
    assert {s.norm for s in find_sites(Loop(), hidden())} == {"pre"}


def test_where_names_the_loop() -> None:
    model, x = Vision(), torch.randn(B, T, 4)
    flowscope.wrap(model, example_inputs=x, where="trans*")
    assert len(flowscope.connections(model)) == 1
    with pytest.raises(flowscope.FlowscopeError, match="no block's path matches"):
        flowscope.wrap(Vision(), example_inputs=x, where="other*")


class TwoCarries(nn.Module):
    """Text and image: each has its own add, and the image's mean goes into the text's branch."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Branch(), Branch()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        told = image.mean(1, keepdim=True)
        return text + self.text(text + told), image + self.image(image)


class Joint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoCarries() for _ in range(3))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            text, image = block(image, text)
        return text, image


def both() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(B, 7, D), torch.randn(B, T, D)


def test_two_carries_are_both_found_and_named() -> None:
    plan = find_sites(Joint(), both())
    assert [(s.path, s.index, s.shape[1], s.flow) for s in plan] == [
        *((f"blocks.{k}", 0, T, "blocks") for k in range(3)),
        *((f"blocks.{k}", 1, 7, "blocks#2") for k in range(3)),
    ]
    assert [(b.first, b.last) for b in plan.blocks] == [(True, False), (False, False), (False, True)] * 2


def test_a_second_carry_that_nothing_reads_is_left_as_it_is() -> None:
    class TextOnly(Joint):
        def forward(self, image: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(image, text)[0]

    plan = find_sites(TextOnly(), both())
    assert [(s.path, s.flow) for s in plan if s.flow == "blocks#2"] == [(f"blocks.{k}", "blocks#2") for k in range(2)]


def test_two_carries_have_a_gate_each() -> None:
    model, (image, text) = Joint(), both()
    flowscope.wrap(model, "keel", example_inputs=(image, text), init_bias=-1.0)
    t = torch.sigmoid(torch.tensor(-1.0))
    expected_text, expected_image = text, image
    for block in model.blocks:
        told = expected_image.mean(1, keepdim=True)
        expected_text = expected_text + t * block.text(expected_text + told)
        expected_image = expected_image + t * block.image(expected_image)
    got = model(image, text)
    torch.testing.assert_close(got, (expected_text, expected_image))
    assert {path for path, _ in flowscope.connections(model)} == {
        f"blocks.{k}.{name}" for k in range(3) for name in ("connection", "connection2")
    }


@pytest.mark.parametrize(("mode", "options"), PRESERVING)
def test_two_carries_keep_their_outputs_train_and_are_saved(mode: str, options: dict[str, Any]) -> None:
    model, inputs = Joint(), both()
    expected, before = model(*inputs), copy.deepcopy(model.state_dict())
    flowscope.wrap(model, mode, example_inputs=inputs, **options)
    torch.testing.assert_close(model(*inputs), expected, rtol=1e-5, atol=1e-6)
    sum(x.square().sum() for x in model(*inputs)).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None for _, c in flowscope.connections(model) for p in c.parameters())
    perturb(model)
    twin = Joint()
    flowscope.wrap(twin, mode, example_inputs=inputs, **options)
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin(*inputs), model(*inputs))
    torch.testing.assert_close(copy.deepcopy(model)(*inputs), model(*inputs))
    model.load_state_dict(before)
    assert not any(isinstance(m, Connection) for m in flowscope.unwrap(model).modules())


def test_each_site_of_two_carries_is_watched() -> None:
    model, inputs = Joint(), both()
    flowscope.wrap(model, "keel", example_inputs=inputs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flowscope.watch(model, optimizer, every=1, config={"console": "off"}) as scope:
        sum(x.square().mean() for x in model(*inputs)).backward()  # type: ignore[union-attr]
        optimizer.step()
    record = scope.records[0]
    assert sorted(record.labels("gate_mean")) == [f"blocks.{k}#{site}" for k in range(3) for site in range(2)]
    assert torch.isfinite(torch.as_tensor(record["gate_mean"])).all()


class TwoWidths(nn.Module):
    """A convolution adds over positions [B, D, T], a layer over features [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.branch = nn.Conv1d(D, D, 3, padding=1), Branch()

    def forward(self, x: Tensor) -> Tensor:
        f = x.transpose(1, 2)
        x = (self.conv(f) + f).transpose(1, 2)
        return x + self.branch(x)


def test_a_block_of_two_widths_has_a_connection_for_each() -> None:
    model, x = nn.Sequential(*(TwoWidths() for _ in range(3))), hidden()
    flowscope.wrap(model, "keel", example_inputs=x, init_bias=-1.0)
    assert [(c.axis, c.sites) for _, c in flowscope.connections(model)] == [(1, 1), (-1, 1)] * 3
    t, expected = torch.sigmoid(torch.tensor(-1.0)), x
    for block in model:
        f = expected.transpose(1, 2)
        expected = (f + t * block.conv(f)).transpose(1, 2)
        expected = expected + t * block.branch(expected)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(("mode", "options"), PRESERVING)
def test_a_block_of_two_widths_keeps_its_output(mode: str, options: dict[str, Any]) -> None:
    model, x = nn.Sequential(*(TwoWidths() for _ in range(3))), hidden()
    expected = model(x)
    flowscope.wrap(model, mode, example_inputs=x, **options)
    assert len(flowscope.connections(model)) == 6
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


class Rearranged(nn.Module):
    """The carry without its first token gets one branch, then all of it another, as in divided space and time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.all = Branch(), Branch()

    def forward(self, x: Tensor) -> Tensor:
        rest = x[:, 1:, :] + self.time(x[:, 1:, :])
        f = self.all(rest)
        x = torch.cat((x[:, :1], rest), 1) + torch.cat((f.mean(1, keepdim=True), f), 1)
        return x + self.time(x)


@pytest.mark.parametrize(("mode", "options"), PRESERVING)
def test_a_carry_that_is_cut_and_joined_is_still_one(mode: str, options: dict[str, Any]) -> None:
    model, x = nn.Sequential(*(Rearranged() for _ in range(2))), hidden()
    assert [(s.kind, s.shape[1]) for s in find_sites(model, x)] == [("identity", n) for n in (4, 5, 5)] * 2
    expected = model(x)
    flowscope.wrap(model, mode, example_inputs=x, **options)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_what_takes_a_shape_alone_is_no_ancestor() -> None:
    class Positions(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Linear(1, D)

        def forward(self, x: Tensor) -> Tensor:
            where = self.position(torch.arange(float(T)).unsqueeze(-1)).unsqueeze(0).expand_as(x)
            return super().forward(x + where + self.position(torch.ones_like(x[..., :1])))

    assert len(find_sites(Positions(), hidden())) == 8


class Chooses(Branch):
    """Its forward is chosen on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.fast  # type: ignore[method-assign]

    def fast(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def test_a_branch_whose_forward_was_chosen_on_the_instance() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = Chooses()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.branch(x)

    model, x = nn.Sequential(*(Block() for _ in range(3))), hidden()
    expected = model(x)
    flowscope.wrap(model, "dhc", example_inputs=x)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    flowscope.unwrap(model)
    assert model[0].branch.forward.__func__ is Chooses.fast
    assert torch.equal(model(x), expected)


def test_one_skip_beside_the_blocks_is_no_flow() -> None:
    class Refines(Vision):
        def __init__(self) -> None:
            super().__init__(Blocks)
            self.odd = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
            self.refine = SkipOnce()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.refine(self.odd[1](self.odd[0](self.transformer(self.stem(x))))).mean(1))

    class SkipOnce(Branch):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    plan = find_sites(Refines(), torch.randn(B, T, 4))
    assert {s.path for s in plan} == {f"transformer.layers.{k}" for k in range(4)}


def test_lists_of_none_beside_the_blocks() -> None:
    class WithNone(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.adapters = nn.ModuleList([None] * 4)  # type: ignore[list-item]

    assert len(find_sites(WithNone(), hidden())) == 8


class Exchange(nn.Module):
    """Two scales with a block of their own each; then each one's first token reads the other's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Sequential(Pair()) for _ in range(2))
        self.across = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.fuse = nn.ModuleList(FirstToken() for _ in range(2))

    def forward(self, scales: list[Tensor]) -> list[Tensor]:
        own = [block(x) for block, x in zip(self.scales, scales, strict=True)]
        first = [across(x[:, :1]) for across, x in zip(self.across, own, strict=True)]
        both = [fuse(torch.cat((first[k], own[1 - k][:, 1:]), 1)) for k, fuse in enumerate(self.fuse)]
        return [torch.cat((new, x[:, 1:]), 1) for new, x in zip(both, own, strict=True)]


class FirstToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] + self.branch(x).mean(1, keepdim=True)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Exchange() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scales = [x, x.flip(1)]
        for block in self.blocks:
            scales = block(scales)
        return torch.cat(scales, 1)


@pytest.mark.parametrize(("mode", "options"), PRESERVING)
def test_carries_that_are_mixed_in_a_block_are_found_inside_of_it(mode: str, options: dict[str, Any]) -> None:
    model, x = Scales(), hidden()
    expected = model(x)
    assert len(find_sites(model, x)) == 2 * (2 * 2 + 2)
    flowscope.wrap(model, mode, example_inputs=x, **options)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    perturb(model)
    model(x).square().sum().backward()
    assert all(
        p.grad is not None and bool(p.grad.any()) for _, c in flowscope.connections(model) for p in c.parameters()
    )


def test_merges_of_an_inner_block_of_a_branch_stay_its_own() -> None:
    class Outer(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.LayerNorm(D), Pair(), Pair())  # type: ignore[assignment]

    model = nn.Sequential(*(Outer() for _ in range(3)))
    assert [s.module for s in find_sites(model, hidden())] == ["0", "0", "1", "1", "2", "2"]


def test_a_part_that_blocks_share_is_no_block_beside_them() -> None:
    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x)

    class With(Pair):
        def __init__(self, position: Position) -> None:
            super().__init__()
            self.position = position

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.position(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = Position()
            self.blocks = nn.ModuleList(With(self.position) for _ in range(3))
            self.odd = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            for _ in range(3):
                x = self.position(x)
            return self.odd[1](self.odd[0](x))

    model, x = Model(), hidden()
    expected = model(x)
    assert {s.path for s in find_sites(model, x)} == {f"blocks.{k}" for k in range(3)}
    flowscope.wrap(model, "dhc", example_inputs=x)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
