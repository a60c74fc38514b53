"""Checkpointed and repeated calls: each call has its own number, compared with torch.autograd on an unwatched copy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watch_models import (
    IN,
    B,
    Block,
    Checkpointed,
    D,
    Stack,
    T,
    close_to,
    data,
    keep,
    loss_of,
    norms,
    one_step,
    truth,
    watched,
)

pytestmark = pytest.mark.usefixtures("strict")


# -- checkpointing


def plain_twin(model: Stack) -> Stack:
    """The same weights without checkpoints."""
    twin = Stack(len(model.blocks))
    twin.load_state_dict(model.state_dict())
    return twin


class InnerCheckpoint(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.fc2(self.act(self.fc1(self.norm(y)))), x, use_reentrant=self.reentrant)


class Segments(Stack):
    """Two segments of two blocks."""

    reentrant = False

    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = keep(taps, self.embed(x))
        for i in (0, 2):
            if taps is None:
                x = checkpoint(lambda y, i=i: self.blocks[i + 1](self.blocks[i](y)), x, use_reentrant=self.reentrant)
            else:
                x = keep(taps, self.blocks[i + 1](keep(taps, self.blocks[i](x))))
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["block", "inside", "segments"])
def test_checkpointing_gives_every_number_of_the_plain_run(kind: str, reentrant: bool) -> None:
    model: Stack
    if kind == "inside":
        model = Stack(4, InnerCheckpoint)
        for block in model.blocks:
            block.reentrant = reentrant
    else:
        model = Checkpointed(4) if kind == "block" else Segments(4)
        model.reentrant = reentrant
    reference, expected = one_step(plain_twin(model))
    record, _ = one_step(model, twin=plain_twin(model))
    close_to(record["grad_norm"], norms(expected))
    exact = ("grad_rms", "act_rms", "backward_calls", "tracked_calls", "nonfinite", "update_ratio", "param_grad_norm")
    for name in exact:
        close_to(record[name], reference[name])
    for name in ("cosine", "cosine_to_input", "token_cosine", "branch_share", "effective_rank", "cosine_matrix"):
        np.testing.assert_allclose(record[name], reference[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_gradient_checkpointing(reentrant: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=3, n_embd=D, n_head=2, vocab_size=11, n_positions=T)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config).train()
    ids = torch.arange(B * T).reshape(B, T) % 11
    twin = copy.deepcopy(model)
    out = twin(ids, labels=ids, output_hidden_states=True, use_cache=False)
    expected = list(torch.autograd.grad(out.loss, out.hidden_states[:3]))
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    # hidden_states[3] is after the final norm, so the last point has no counterpart there
    close_to(scope.records[0]["grad_norm"][:3], norms(expected))
    assert (scope.records[0]["backward_calls"] == 1).all()


class SharedInAndOut(nn.Module):
    """One block, called inside a checkpoint and outside; `order` says which comes first."""

    def __init__(self, order: str, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(IN, D), Block(), nn.Linear(D, 7)
        self.order, self.reentrant = order, reentrant

    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = keep(taps, self.embed(x))
        for letter in self.order:
            inside = letter == "c" and taps is None
            x = keep(taps, checkpoint(self.block, x, use_reentrant=self.reentrant) if inside else self.block(x))
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["co", "oc", "ccc", "coc", "ooo"])
def test_a_shared_block_in_and_out_of_checkpoints_has_a_point_per_call(order: str, reentrant: bool) -> None:
    record, expected = one_step(SharedInAndOut(order, reentrant), flows=["block*"])
    assert record.labels("grad_norm")[1:] == [f"block#{i}" for i in range(len(order))]
    close_to(record["grad_norm"], norms(expected))


def test_two_calls_of_a_shared_block_inside_one_reentrant_checkpoint_keep_their_order() -> None:
    class Model(SharedInAndOut):
        def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
            x = keep(taps, self.embed(x))
            for _ in range(2):
                if taps is None:
                    x = checkpoint(lambda y: self.block(self.block(y)), x, use_reentrant=True)
                else:
                    x = keep(taps, self.block(keep(taps, self.block(x))))
            return self.head(x)

    record, expected = one_step(Model("", True), flows=["block*"])
    close_to(record["grad_norm"], norms(expected))


# -- modules called several times


class Repeated(nn.Module):
    """One block three times; `between` is what happens to its output before the next call."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.embed, self.block, self.head, self.between = nn.Linear(IN, D), Block(), nn.Linear(D, 7), between

    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = keep(taps, self.embed(x))
        for _ in range(3):
            x = keep(taps, self.block(x))
            if self.between == "affine":
                x = x * 2.0 + 1.0
            elif self.between == "long":
                for _ in range(100):
                    x = x * 1.001 + 0.001
        return self.head(x)


@pytest.mark.parametrize("between", ["none", "affine", "long"])
def test_a_module_called_three_times_has_exact_numbers_per_call(between: str) -> None:
    record, expected = one_step(Repeated(between), flows=["block*"])
    close_to(record["grad_norm"], norms(expected))
    assert (record["backward_calls"] == 1).all()


class ReluTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.relu = nn.Linear(D, D), nn.Linear(D, D), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.fc2(self.relu(self.fc1(x))))


def test_a_relu_used_twice_in_a_block_counts_both_uses() -> None:
    model = Stack(2, ReluTwice)
    with torch.no_grad():
        model.blocks[0].fc1.bias[2] = model.blocks[0].fc2.bias[2] = -1e3  # unit 2 is off in both uses
        model.blocks[0].fc1.bias[5] = -1e3  # unit 5 in the first only
    record, expected = one_step(model)
    close_to(record["grad_norm"], norms(expected))
    twin, used = copy.deepcopy(model.blocks[0]), []
    twin.relu.register_forward_hook(lambda m, i, o: used.append(o.flatten(0, -2)))
    twin(model.embed(data()[0]))
    dead = float(torch.stack([(output == 0).all(0) for output in used]).double().mean())  # each use has its units
    assert dead >= 3 / (2 * D)
    assert record["dead_fraction"][record.labels("dead_fraction").index("blocks.0.relu")] == pytest.approx(dead)


class Siamese(nn.Module):
    """The whole encoder twice in one forward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.encoder = Stack(3)
        self.reentrant = reentrant

    def forward(self, x: Tensor, taps: list[list[Tensor]] | None = None) -> Tensor:
        if taps is not None:
            return self.encoder(x, taps[0]) - self.encoder(x.flip(0), taps[1])
        if self.reentrant is not None:
            self.encoder.call = lambda b, y: checkpoint(b, y, use_reentrant=self.reentrant)  # type: ignore[method-assign]
        return self.encoder(x) - self.encoder(x.flip(0))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_siamese_encoder_adds_both_passes_to_the_same_points(reentrant: bool | None) -> None:
    model, batch = Siamese(reentrant), data()
    twin, taps = copy.deepcopy(model), [[], []]
    loss = nn.functional.mse_loss(twin(batch[0], taps), batch[1])
    first, second = (torch.autograd.grad(loss, t, retain_graph=True) for t in taps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, batch).backward()
        optimizer.step()
    close_to(scope.records[0]["grad_norm"], norms(first, second))
    assert (scope.records[0]["backward_calls"] == 2).all()
    states = [torch.cat([a, b]).detach().double().square().mean().sqrt() for a, b in zip(*taps, strict=True)]
    close_to(scope.records[0]["act_rms"], states)


def test_cells_in_a_loop_of_varying_length() -> None:
    class Net(nn.Module):
        def __init__(self, cell: type[nn.Module]) -> None:
            super().__init__()
            self.cell, self.head = cell(IN, D), nn.Linear(D, 7)

        def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
            state: Any = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
                keep(taps, state[0] if isinstance(state, tuple) else state)
            return self.head(state[0] if isinstance(state, tuple) else state)

    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        model = Net(cell)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with watched(model, optimizer) as scope:
            for step, length in enumerate((5, 3, 6)):
                batch = torch.randn(B, length, IN), torch.randn(B, 7)
                expected = norms(truth(model, batch))
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                record = scope.records[step]
                # a layout that has grown stays: steps that were not reached are not seen
                longest = max((5, 3, 6)[: step + 1])
                assert record.labels("grad_norm") == [f"cell#{t}" for t in range(longest)]
                close_to(record["grad_norm"][:length], expected)
                assert np.isnan(record["grad_norm"][length:]).all()


class Skipping(Stack):
    skip: tuple[int, ...] = ()

    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = keep(taps, self.embed(x))
        for i, block in enumerate(self.blocks):
            if i not in self.skip:
                x = keep(taps, block(x))
        return self.head(x)


def test_skipped_blocks_are_not_seen_and_not_zero() -> None:
    model = Skipping(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        for step, skip in enumerate([(1, 2), (), (3,)]):
            model.skip = skip
            expected = norms(truth(model, data(step)))
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            optimizer.step()
            record = scope.records[step]
            ran = [0] + [i + 1 for i in range(4) if i not in skip]
            close_to(record["grad_norm"][ran], expected)
            assert np.isnan(record["grad_norm"][[i + 1 for i in skip]]).all()
            close_to(record["gradient_product"][ran], expected / expected[-1])
            assert record.labels("grad_norm") == ["blocks.0:input", *(f"blocks.{i}" for i in range(4))]
