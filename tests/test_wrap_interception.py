"""Interception against the same blocks written by hand with the connection's formula in place of each add."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import wrap_models as models
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from wrap_models import D, T

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, State
from flowscope.merging.weaving import WovenBlock
from flowscope.merging.wrapping import connections, unwrap, wrap

CARRY, BRANCH = (0.5, 0.75), (3.0, 1.25)


class Weighted(Connection):
    """`c_k x + b_k f`: tells carry from branch and one site from the other."""

    mode = "weighted"

    def merge(self, site: int, state: State, x: Tensor, f: Tensor) -> tuple[Tensor, State]:
        return weighted(site, x, f), state


def weighted(site: int, x: Tensor, f: Tensor) -> Tensor:
    return CARRY[site] * x + BRANCH[site] * f


def pre_norm(block: Any, x: Tensor) -> Tensor:
    x = weighted(0, x, block.branches(x, 0))
    return weighted(1, x, block.branches(x, 1))


def post_norm(block: Any, x: Tensor) -> Tensor:
    x = block.norm1(weighted(0, x, block.mix(x)))
    return block.norm2(weighted(1, x, torch.tanh(block.mlp(x))))


def parallel(block: Any, x: Tensor) -> Tensor:
    h = block.norm(x)
    return weighted(0, x, block.a(h) + block.b(h))


def chained(block: Any, x: Tensor) -> Tensor:
    h = block.norm(x)
    return weighted(1, weighted(0, x, block.a(h)), block.b(h))


def statement(block: Any, x: Tensor) -> Tensor:
    h = weighted(0, x, block.a(x + block.position))
    return weighted(1, h, 0.5 * block.b(h))


def functional_dropout(block: Any, x: Tensor) -> Tensor:
    x = functional.dropout(weighted(0, x, block.a(x)), 0.5, block.training)
    return weighted(1, x, block.b(x))


def flattening(block: Any, x: Tensor) -> Tensor:
    x = weighted(0, x, block.a(x))
    return weighted(1, x, block.b(block.norm(x)))


def tuple_norm(block: Any, x: Tensor) -> Tensor:
    x, _ = block.norm(weighted(0, x, block.a(x)))
    return weighted(1, x, block.b(x))


def sequential(block: Any, x: Tensor) -> Tensor:
    return weighted(0, x, block[2](block[1](block[0](x))))


CASES = [
    (models.PreNormBlock, pre_norm, True),
    (models.PostNormBlock, post_norm, True),
    (models.ParallelBlock, parallel, True),
    (models.ChainedBlock, chained, True),
    (models.StatementBlock, statement, False),
    (models.FunctionalDropoutBlock, functional_dropout, False),
    (models.FlatteningBlock, flattening, True),
    (models.FlatteningPostNormBlock, post_norm, True),
    (models.TupleNormBlock, tuple_norm, True),
    (models.sequential_block, sequential, True),
]


def loss_and_gradients(model: nn.Module, call: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss, and the gradient of the input and of every parameter that is no connection's."""
    parameters = [p for name, p in model.named_parameters() if "connection" not in name]
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    loss = call(x).square().sum()
    return loss, list(torch.autograd.grad(loss, [x, *parameters]))


@pytest.mark.parametrize("way", ["tag", "mode"])
@pytest.mark.parametrize(("block", "truth", "taggable"), CASES)
def test_equal_to_the_formula_written_by_hand(block: Any, truth: Any, taggable: bool, way: str) -> None:
    torch.manual_seed(0)
    model, x = models.Stack(block).double().train(), models.hidden_states().double()

    def by_hand(x: Tensor) -> Tensor:
        x = model.stem(x)
        for block in model.blocks:
            x = truth(block, x)
        return model.head(x)

    expected, expected_gradients = loss_and_gradients(model, by_hand, x)
    wrap(model, Weighted, example_inputs=x)
    woven = [module for module in model.modules() if isinstance(module, WovenBlock)]
    assert [module.flowscope_rule.taggable for module in woven] == [taggable] * 2
    if way == "mode":
        for module in woven:
            module.flowscope_rule = module.flowscope_rule._replace(taggable=False)
    loss, gradients = loss_and_gradients(model, model, x)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block", [case[0] for case in CASES])
def test_residual_is_bitwise_the_original(block: Any) -> None:
    model, x = models.Stack(block).train(), models.hidden_states()
    loss, gradients = loss_and_gradients(model, model, x)
    wrap(model, "residual", example_inputs=x)
    wrapped_loss, wrapped_gradients = loss_and_gradients(model, model, x)
    assert torch.equal(loss, wrapped_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wrapped_gradients, strict=True))


def test_residual_convnet_is_bitwise_the_original_in_training() -> None:
    model, x = models.ConvNet().train(), torch.randn(2, 3, 8, 12)
    plain = copy.deepcopy(model)
    wrap(model, "residual", example_inputs=x)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))
    loss, gradients = loss_and_gradients(plain, plain, x)
    wrapped_loss, wrapped_gradients = loss_and_gradients(model, model, x)
    assert torch.equal(loss, wrapped_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wrapped_gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))


def test_alpha_weighs_the_branch_only() -> None:
    model, x = models.Stack(models.StatementBlock, 1), models.hidden_states()
    block = model.blocks[0]
    h = block.a(x + block.position) * BRANCH[0] + CARRY[0] * x
    expected = CARRY[1] * h + BRANCH[1] * 0.5 * block.b(h)
    model.stem = nn.Identity()
    model.head = nn.Identity()
    wrap(model, Weighted, example_inputs=x, where="blocks.*")
    torch.testing.assert_close(model(x), expected)


class TakesAnotherPath(models.PreNormBlock):
    """Adds in evaluation only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, self.scale, self.mix(x)) if self.training else x + self.mix(x)


def test_site_that_does_not_fire_is_an_error() -> None:
    model, x = models.Stack(TakesAnotherPath), models.hidden_states()
    wrap(model, "residual", example_inputs=x)
    model.eval()(x)
    with pytest.raises(FlowscopeError, match=r"blocks\.0: 0 of 1 merge sites fired in this forward"):
        model.train()(x)


class ChecksPointsInside(models.PreNormBlock):
    """Checkpoints its second branch with the merge inside."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branches(x, 0)
        if self.training:
            return checkpoint(self.second, x, use_reentrant=self.reentrant)
        return self.second(x)

    def second(self, x: Tensor) -> Tensor:
        return x + self.branches(x, 1)


def test_checkpoint_inside_a_block() -> None:
    model, x = models.Stack(ChecksPointsInside), models.hidden_states()
    loss, gradients = loss_and_gradients(model.train(), model, x)
    wrap(model, "residual", example_inputs=x)
    wrapped_loss, wrapped_gradients = loss_and_gradients(model, model, x)
    assert torch.equal(loss, wrapped_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wrapped_gradients, strict=True))


def test_reentrant_checkpoint_inside_a_block_is_refused() -> None:
    model, x = models.Stack(ChecksPointsInside).train(), models.hidden_states()
    wrap(model, "residual", example_inputs=x)
    for block in model.blocks:
        block.reentrant = True
    with pytest.raises(FlowscopeError, match=r"blocks\.0: reentrant checkpointing"):
        model(x)


class ChecksPointsBranch(models.PreNormBlock):
    """Checkpoints its branches, reentrant, with the merge outside."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.branches, x, 0, use_reentrant=True)
        return x + checkpoint(self.branches, x, 1, use_reentrant=True)


def test_reentrant_checkpoint_of_a_branch_is_right() -> None:
    model, x = models.Stack(ChecksPointsBranch).train(), models.hidden_states()
    loss, gradients = backward_gradients(model, x)
    wrap(model, "residual", example_inputs=x)
    wrapped_loss, wrapped_gradients = backward_gradients(model, x)
    assert torch.equal(loss, wrapped_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wrapped_gradients, strict=True))


def backward_gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """As `loss_and_gradients` for what only knows `backward`."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = model(x).square().sum()
    loss.backward()
    return loss, [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]


def test_nested_tensor_is_refused() -> None:
    model = models.Stack(models.PreNormBlock)
    wrap(model, "residual", example_inputs=models.hidden_states())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once a process that nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.randn(2, D), torch.randn(T, D)])
    with pytest.raises(FlowscopeError, match="got a nested tensor; build the encoder with enable_nested_tensor=False"):
        model.blocks[0](nested)


def test_carry_given_by_keyword() -> None:
    class ByKeyword(models.Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks[1](x=self.blocks[0](x=self.stem(x))))

    model, x = ByKeyword(models.PreNormBlock), models.hidden_states()
    expected = model(x)
    wrap(model, "residual", example_inputs=x)
    assert torch.equal(model(x), expected)
    model.blocks[0](model.stem(x))  # traced by keyword, called by position


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_blocks_that_return_containers(kind: Any) -> None:
    class Contains(models.PreNormBlock):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"other": None, "y": y} if kind is dict else kind((None, y))

    class Unpacks(models.Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)["y" if kind is dict else 1]
            return self.head(x)

    model, x = Unpacks(Contains), models.hidden_states()
    expected = model(x)
    wrap(model, "dhc", example_inputs=x)
    assert [c.first for _, c in connections(model)] == [True, False]
    torch.testing.assert_close(model(x), expected)
    assert type(model.blocks[0](x)) is kind
    assert torch.equal(unwrap(model)(x), expected)
