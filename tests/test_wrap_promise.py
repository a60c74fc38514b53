"""What `wrap` promises is checked: a mode that keeps the output keeps it, or says where it does not begin to."""

from __future__ import annotations

import copy
import logging
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import wrap_models as models
from test_wrap_model import PRESERVING, snapshot
from torch import Tensor, nn
from torch.nn import functional
from wrap_models import D, T

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, State
from flowscope.merging.difference import difference, relative
from flowscope.merging.wrapping import connections, is_wrapped, unwrap, wrap


class Convolutions(nn.Module):
    """What the blocks below share; each says by `inplace` whether it changes its carry in place."""

    inplace = True

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.relu = nn.ReLU(inplace=self.inplace)

    def branch(self, x: Tensor) -> Tensor:
        return self.conv2(torch.tanh(self.conv1(x)))


class ReluModule(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.branch(x))


class ReluMethod(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.branch(x)
        return functional.relu_(y) if self.inplace else functional.relu(y)


class ReluArgument(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(x + self.branch(x), inplace=self.inplace)
        return functional.relu(x + self.conv2(x), inplace=self.inplace)


class ScaledThenRelu(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        if self.inplace:
            x *= 0.5
        else:
            x = x * 0.5
        return self.relu(x + self.conv1(x))


class ClampBetween(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        x = x.clamp_(-0.5, 0.7) if self.inplace else x.clamp(-0.5, 0.7)
        return x + self.conv1(x)


class HardtanhStatement(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        if self.inplace:
            functional.hardtanh_(x, -0.4, 0.6)
        else:
            x = functional.hardtanh(x, -0.4, 0.6)
        return x + self.conv1(x)


class SliceBetween(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        if self.inplace:
            x[:, 0] = 0
        else:
            x = torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1)
        return x + self.conv1(x)


class SliceAtTheEnd(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        if self.inplace:
            x[:, :, 1].mul_(0.3)
            return x
        return torch.cat([x[:, :, :1], x[:, :, 1:2] * 0.3, x[:, :, 2:]], 2)


class AtTheEntry(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            x.mul_(0.9)
        else:
            x = x * 0.9
        return x + self.branch(x)


IN_PLACE = [
    ReluModule,
    ReluMethod,
    ReluArgument,
    ScaledThenRelu,
    ClampBetween,
    HardtanhStatement,
    SliceBetween,
    SliceAtTheEnd,
    AtTheEntry,
]


class Images(nn.Module):
    """Blocks on images [B, 6, H, W], behind a convolution of their own."""

    def __init__(self, block: Any, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(6, 6, 1)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def image() -> Tensor:
    """An input [B, C, H, W]."""
    return torch.randn(2, 6, 5, 7)


def out_of_place(block: Any) -> Any:
    """The same block with out-of-place operations."""
    return type(block.__name__, (block,), {"inplace": False})


def perturb(model: nn.Module) -> None:
    """As if trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.mark.parametrize("block", IN_PLACE)
@pytest.mark.parametrize(("mode", "options"), PRESERVING)
def test_carry_changed_in_place_is_kept(block: Any, mode: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Images(block), image()
    expected = model(x)
    wrap(model, mode, example_inputs=x, **options)
    assert len(connections(model)) == 3
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [b for b in IN_PLACE if b is not AtTheEntry])  # which differs out of place: see below
@pytest.mark.parametrize("mode", ["dhc", "mhc"])
def test_trained_streams_follow_what_is_done_in_place(block: Any, mode: str) -> None:
    """Against the out-of-place twin, which needs no copy: values, and gradients of all parameters."""
    torch.manual_seed(0)
    model, x = Images(block).double(), image().double()
    twin = Images(out_of_place(block)).double()
    for wrapped in (model, twin):
        wrap(wrapped, mode, example_inputs=x)
    perturb(model)
    twin.load_state_dict(model.state_dict())
    one, other = model(x), twin(x)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(one)
    grads = [torch.autograd.grad((y * weights).sum(), list(m.parameters())) for y, m in ((one, model), (other, twin))]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)


class RelusInTraining(Convolutions):
    """Changes its carry in place in training only: the trace does not show it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        return self.relu(x) if self.training else x


def test_change_in_place_that_the_trace_had_not_shown_is_an_error() -> None:
    model, x = Images(RelusInTraining), image()
    wrap(model, "dhc", example_inputs=x)
    model.eval()(x)
    with pytest.raises(FlowscopeError, match=r"blocks\.0: its code changes the carry in place after merge 0"):
        model.train()(x)
    wrap(unwrap(model), "keel", example_inputs=x)  # without streams there is nothing to follow
    model(x)


class Leaky(Connection):
    """Promises to keep the output, and does not from the third sub-layer on."""

    mode = "leaky"
    by = 0.1

    def keeps_output(self) -> bool:
        return True

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        return (x + f if self.offset + site < 3 else x + f + self.by * x.abs().max()), state


class Slightly(Leaky):
    mode = "slightly"
    by = 2e-3


@pytest.mark.parametrize("train", [True, False])
def test_promise_that_is_broken_is_an_error_that_says_where(train: bool) -> None:
    model, x = models.Stack(models.PreNormBlock, 3).train(train), models.hidden_states()
    before, expected = snapshot(model), model(x)
    with pytest.raises(FlowscopeError, match=r"promises to keep.*begins at blocks\.1, merge 1: what it makes"):
        wrap(model, Leaky, example_inputs=x)
    assert snapshot(model) == before
    assert torch.equal(model(x), expected)


def test_half_precision_may_move_further() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    with pytest.raises(FlowscopeError, match="promises to keep"):
        wrap(copy.deepcopy(model), Slightly, example_inputs=x)
    wrap(model.bfloat16(), Slightly, example_inputs=x.bfloat16())
    with pytest.raises(FlowscopeError, match="promises to keep"):
        wrap(unwrap(model), Leaky, example_inputs=x.bfloat16())


class Noisy(models.Stack):
    """Adds noise that torch's random state does not decide."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.from_numpy(np.random.default_rng().normal(size=x.shape)).to(x))


class DropsAlways(models.PreNormBlock):
    """Draws in evaluation too, as `functional.dropout` does by default."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x))


@pytest.mark.parametrize("make", [lambda: Noisy(models.PreNormBlock), lambda: models.Stack(DropsAlways)])
def test_random_draws_do_not_fool_the_check(make: Any) -> None:
    model, x = make().train(), models.hidden_states()
    state = torch.get_rng_state()
    wrap(model, "dhc", example_inputs=x)
    assert is_wrapped(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_that_the_model_changes_are_left() -> None:
    class Changes(models.Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2.0))

    x = models.hidden_states()
    before = x.clone()
    wrap(Changes(models.PreNormBlock), "dhc", example_inputs=x)
    assert torch.equal(x, before)


class AddsBetween(models.Stack):
    """Adds positions [T, D] between its blocks: with as many streams as positions, it adds them to the streams."""

    def __init__(self, positions: int = T) -> None:
        super().__init__(models.PreNormBlock)
        self.positions = nn.Parameter(torch.randn(positions, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.stem(x)) + self.positions))


def test_without_example_inputs_the_first_forward_is_compared() -> None:
    model, x = AddsBetween(), models.hidden_states()
    wrap(model, "dhc", streams=T)
    with pytest.raises(FlowscopeError, match=r"promises to keep.*begins at blocks\.1, merge 0: the carry that comes"):
        model(x)
    model = AddsBetween()
    expected = model(x)
    wrap(model, "keel", preserve=True)
    torch.testing.assert_close(model(x), expected)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks_with_kwargs for module in model.modules())


def test_trained_values_are_not_compared_at_the_first_forward() -> None:
    model, x = models.Stack(models.PreNormBlock), models.hidden_states()
    wrap(model, "dhc")
    perturb(model)
    model(x)  # moved, and rightly


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        ("keel", {}, r"output at the start not kept \(it moved by [1-9]\.\de-0[12] relative\)"),
        ("dhc", {}, r"output at the start kept \(it moved by \d\.\de[-+]\d\d relative\)"),
    ],
)
def test_one_line_at_warning_says_what_moved(
    mode: str, options: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrap(models.Stack(models.PreNormBlock), mode, example_inputs=models.hidden_states(), **options)
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "flowscope")
    assert f"wrap(mode={mode!r}): 4 sites in 2 blocks" in record.message
    assert re.search(said, record.message), record.message


def test_line_says_what_is_compared_later(caplog: pytest.LogCaptureFixture) -> None:
    wrap(models.Stack(models.PreNormBlock), "dhc")
    assert "kept (no example inputs: compared at the first forward)" in caplog.text


class FailsWoven(models.PreNormBlock):
    """Counts its children, of which a wrapped block has one more."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(list(self.children())) == 6
        return super().forward(x)


@pytest.mark.parametrize("mode", ["keel", "dhc"])
def test_one_block_that_fails_is_left_out(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = models.Stack(models.PreNormBlock, 4), models.hidden_states()
    model.blocks[1] = FailsWoven()
    expected = model(x)
    wrap(model, mode, example_inputs=x, **({"preserve": True} if mode == "keel" else {}))
    assert [path for path, _ in connections(model)] == [f"blocks.{i}.connection" for i in (0, 2, 3)]
    assert "blocks.1: the wrapped block could not be run (AssertionError" in caplog.text
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_relative_difference_by_hand() -> None:
    a, b = torch.tensor([4.0, -2.0, float("nan")]), torch.tensor([3.0, -2.5, float("nan")])
    assert relative(a, b) == 0.25  # 1 / 4
    assert relative(a, torch.tensor([4.0, float("nan"), float("nan")])) == math.inf
    assert relative(torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 1.0])) == 0.0
    assert difference([a, a], [a]) == math.inf
    assert difference({"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 3, 1)}) == math.inf
