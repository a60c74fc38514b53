"""Modules and passes that break other monitors: every number is compared with torch.autograd on an unwatched copy."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import (
    IN,
    AddsToItsInput,
    B,
    Block,
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


# -- outputs and arguments


class Inplace(nn.Module):
    """The next operation overwrites the block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y += x
        return y


class InplaceStack(Stack):
    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = keep(taps, self.embed(x))
        for block in self.blocks:
            y = keep(taps, block(x))
            x = nn.functional.leaky_relu_(y if taps is None else y.clone(), 0.3)
        return self.head(x)


def test_an_inplace_operation_after_a_point_changes_neither_gradient_nor_statistics() -> None:
    torch.manual_seed(1)
    model = InplaceStack(block=Inplace)
    twin, taps, batch = copy.deepcopy(model), [], data()
    twin(batch[0], taps)
    record, expected = one_step(model, batch, flows=["blocks"])
    close_to(record["grad_norm"], norms(expected))
    close_to(record["act_rms"], [t.detach().double().square().mean().sqrt() for t in taps])


class AddsStack(Stack):
    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = keep(taps, self.embed(x))
        for block in self.blocks:
            x = keep(taps, block(x) if taps is None else x + block.fc(block.norm(x)))
        return self.head(x)


def test_blocks_that_change_their_input_in_place() -> None:
    model, batch, states = AddsStack(3, AddsToItsInput), data(), []
    copy.deepcopy(model)(batch[0], states)
    record, expected = one_step(model, batch)
    close_to(record["grad_norm"], norms(expected))
    states = [s.detach().double().flatten(0, 1) for s in states]
    cosines = [nn.functional.cosine_similarity(a, b, dim=-1).median() for a, b in pairwise(states)]
    np.testing.assert_allclose(1 - record["cosine"], 1 - np.array(cosines), rtol=0.1, atol=1e-6)
    shares = [(b - a).norm() / ((b - a).norm() + a.norm()) for a, b in pairwise(states)]
    close_to(record["branch_share"], shares)


def test_inplace_relu_modules_in_a_plain_chain() -> None:
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(IN, D), relu, nn.Linear(D, D), copy.deepcopy(relu), nn.Linear(D, 7))
    twin, batch, taps = copy.deepcopy(model), data(), []
    x = batch[0]
    for module in twin:
        x = torch.relu(x) if isinstance(module, nn.ReLU) else module(x)
        taps.append(x)
    expected = torch.autograd.grad(nn.functional.mse_loss(x, batch[1]), taps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, batch).backward()
        optimizer.step()
    record = scope.records[0]
    assert record.labels("grad_norm") == ["1", "3", "4"]
    close_to(record["grad_norm"], norms([expected[1], expected[3], expected[4]]))


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(D, D)
        self.also = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_module_that_returns_its_input() -> None:
    model = Stack(3)
    model.blocks[1] = Same()
    record, expected = one_step(model, flows=["blocks"])
    close_to(record["grad_norm"], norms(expected))
    assert record["gain"][1] == 1.0
    close_to(record["cosine"][1], 1.0)


@dataclass
class Output:
    note: str
    hidden: Tensor
    extra: Tensor


class Wrapped(nn.Module):
    """A block that packs its output in a dict, list, dataclass or transformers ModelOutput."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, Block()

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        extra = y.mean(-1)
        if self.kind == "model_output":
            from transformers.modeling_outputs import BaseModelOutput

            return BaseModelOutput(last_hidden_state=y, attentions=(extra,))
        return {"dict": {"aux": extra, "y": y}, "list": [extra, [y]], "dataclass": Output("n", y, extra)}[self.kind]


class WrappedStack(Stack):
    def call(self, block: Any, x: Tensor) -> Tensor:
        out = block(x)
        kind = block.kind
        if kind == "model_output":
            return out.last_hidden_state
        return {"dict": lambda: out["y"], "list": lambda: out[1][0], "dataclass": lambda: out.hidden}[kind]()


@pytest.mark.parametrize("kind", ["dict", "list", "dataclass", "model_output"])
def test_structured_outputs(kind: str) -> None:
    record, expected = one_step(WrappedStack(3, lambda: Wrapped(kind)))
    close_to(record["grad_norm"], norms(expected))


class KeywordBlock(Block):
    def forward(self, *, mask: Tensor, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states * mask)


class KeywordStack(Stack):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(mask=torch.ones(B, T, 1), hidden_states=x)


def test_keyword_only_calls() -> None:
    record, expected = one_step(KeywordStack(3, KeywordBlock))
    close_to(record["grad_norm"], norms(expected))
    assert np.isfinite(record["cosine"]).all()


# -- evaluation


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
def test_evaluation_between_steps_counts_nowhere(mode: str) -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}[mode]
    with watched(model, optimizer) as scope:
        for step in range(3):
            expected = truth(model, data(step))
            with guard():
                model.eval()
                loss_of(model, data(10 + step))
                model.train()
            optimizer.zero_grad()
            loss = loss_of(model, data(step))
            with guard():
                loss_of(model, data(20 + step))
            loss.backward()
            with guard():
                loss_of(model, data(30 + step))
            optimizer.step()
            close_to(scope.records[-1]["grad_norm"], norms(expected))
            assert (scope.records[-1]["backward_calls"] == 1).all()
    assert [r.step for r in scope.records] == [0, 1, 2]


# -- backward


def test_create_graph_counts_both_backwards_and_leaks_nothing() -> None:
    model, batch = Stack(3), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def penalty(net: nn.Module, taps: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        loss = loss_of(net, batch, taps)
        return loss, sum(g.square().sum() for g in torch.autograd.grad(loss, list(net.parameters()), create_graph=True))

    twin, taps = copy.deepcopy(model), []
    loss, extra = penalty(twin, taps)
    first = torch.autograd.grad(loss, taps, retain_graph=True)
    second = torch.autograd.grad(loss + extra, taps)
    with watched(model, optimizer) as scope:
        loss, extra = penalty(model, None)
        (loss + extra).backward()
        optimizer.step()
        close_to(scope.records[0]["grad_norm"], norms(first, second))
        assert (scope.records[0]["backward_calls"] == 2).all()
        alive = []
        for _ in range(4):
            optimizer.zero_grad()
            loss, extra = penalty(model, None)
            (loss + extra).backward()
            optimizer.step()
            alive.append(weakref.ref(loss))
            del loss, extra
        for p in model.parameters():  # the cycle between a gradient and its graph is torch's own
            p.grad = None
        gc.collect()
        assert [ref() for ref in alive] == [None] * 4


def test_retain_graph_twice_counts_two_backwards() -> None:
    model, batch = Stack(3), data()
    expected = truth(model, batch)
    with watched(model, torch.optim.SGD(model.parameters(), 0.1)) as scope:
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        scope.optimizers[0].step()
    close_to(scope.records[0]["grad_norm"], norms(expected, [2 * g for g in expected]))
    assert (scope.records[0]["backward_calls"] == 2).all()


def test_several_forwards_in_flight_before_their_backwards() -> None:
    model = Stack(3)
    expected = norms(*(truth(model, data(i)) for i in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        losses = [loss_of(model, data(i)) for i in range(3)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    close_to(scope.records[0]["grad_norm"], expected)


def test_nonfinite_gradients_are_counted_and_training_goes_on() -> None:
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with watched(model, optimizer) as scope:
        for value in (float("inf"), float("nan"), 1.0):
            optimizer.zero_grad()
            (loss_of(model, data()) * value).backward()
            for p in model.parameters():
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
    bad, worse, good = scope.records
    assert (bad["nonfinite_grad"] > 0).all()
    assert (worse["nonfinite_grad"] == B * T * D).all()
    assert (good["nonfinite_grad"] == 0).all()
    assert not np.isfinite(worse["grad_norm"]).any()
    assert np.isfinite(good["grad_norm"]).all()
    assert worse["canary"][2] == B * T * D


# -- parameters of every kind


class Kinds(nn.Module):
    """bf16 block, frozen int8 weights, a one-element parameter, tied weights, a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, D, sparse=True)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.low = nn.Linear(D, D).bfloat16()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.packed = nn.Parameter(torch.ones(D, D, dtype=torch.int8), requires_grad=False)
        self.head = nn.Linear(D, 11, bias=False)
        self.tied = self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.tied((x + self.low(x.bfloat16()).float()) * self.scale)


def test_parameters_of_every_kind_have_their_true_gradient_and_update() -> None:
    model, ids = Kinds(), torch.arange(B * T).reshape(B, T) % 11
    dense = [p for n, p in model.named_parameters() if n not in ("table.weight", "packed")]
    twin = copy.deepcopy(model)
    nn.functional.cross_entropy(twin(ids).flatten(0, 1), ids.flatten()).backward()
    grads = {n: p.grad.to_dense() for n, p in twin.named_parameters() if p.grad is not None}
    before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD([*dense, model.table.weight], 0.1)
    with watched(model, optimizer) as scope:
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    record = scope.records[0]
    labels = record.labels("param_grad_norm")
    assert labels == [n for n, _ in model.named_parameters() if n != "packed"]
    for i, name in enumerate(labels):
        close_to(record["param_grad_norm"][i], grads[name].double().norm())
        close_to(record["param_norm"][i], before[name].norm())
        change = dict(model.named_parameters())[name].detach().double() - before[name]
        norm = before[name].norm()
        close_to(record["update_ratio"][i], change.norm() / norm if norm > 0 else np.nan, rtol=2e-5)


def test_complex_hidden_states() -> None:
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, D, dtype=torch.complex64) * 0.3)
            self.other = nn.Parameter(torch.randn(D, D, dtype=torch.complex64) * 0.3)

        def forward(self, z: Tensor) -> Tensor:
            return z + (z @ self.weight) @ self.other

    class Net(Stack):
        def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
            z = keep(taps, torch.complex(self.embed(x), self.embed(-x)))
            for block in self.blocks:
                z = keep(taps, block(z))
            return self.head(z.abs())

    record, expected = one_step(Net(3, Turn))
    close_to(record["grad_norm"], norms(expected))
    assert np.isfinite(record["param_grad_norm"]).all()
    states: list[Tensor] = []
    torch.manual_seed(0)
    net = Net(3, Turn)
    net(data()[0], states)
    record, _ = one_step(net)
    flat = [torch.view_as_real(s.detach()).flatten(-2).flatten(0, 1).double() for s in states]
    cosines = [nn.functional.cosine_similarity(a, b, dim=-1).median() for a, b in pairwise(flat)]
    np.testing.assert_allclose(1 - record["cosine"], 1 - np.array(cosines), rtol=0.1, atol=1e-6)


def test_complex_hidden_states_that_are_conjugated_only_when_they_are_read() -> None:
    class Mirror(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, D, dtype=torch.complex64) * 0.3)

        def forward(self, z: Tensor) -> Tensor:
            return (z + z @ self.weight).conj()

    class Net(Stack):
        def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
            z = keep(taps, torch.complex(self.embed(x), self.embed(-x)))
            for block in self.blocks:
                z = keep(taps, block(z))
            assert z.is_conj()
            return self.head(z.abs())

    states: list[Tensor] = []
    torch.manual_seed(0)
    net = Net(3, Mirror)
    net(data()[0], states)
    record, expected = one_step(net)
    close_to(record["grad_norm"], norms(expected))
    close_to(record["act_rms"], [s.detach().abs().square().double().mean().sqrt() for s in states])
    assert np.isfinite(record["param_grad_norm"]).all()


def test_a_bf16_model_is_seen_within_two_percent_of_its_fp32_twin() -> None:
    model = Stack(3)
    expected = norms(truth(model, data()))
    low = copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.SGD(low.parameters(), 0.1)
    with watched(low, optimizer) as scope:
        nn.functional.mse_loss(low(data()[0].bfloat16()).float(), data()[1]).backward()
        optimizer.step()
    close_to(scope.records[0]["grad_norm"], expected, rtol=2e-2)


def test_a_frozen_backbone_is_not_seen_and_does_not_fail() -> None:
    model = Stack(4)
    for module in (model.embed, *model.blocks[:2]):
        module.requires_grad_(False)
    twin, taps = copy.deepcopy(model), []
    loss = loss_of(twin, data(), taps)
    expected = torch.autograd.grad(loss, taps[3:])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, data()).backward()
        optimizer.step()
    record = scope.records[0]
    assert np.isnan(record["grad_norm"][:3]).all()
    close_to(record["grad_norm"][3:], norms(expected))
    assert record["param_trainable"].sum() == sum(p.requires_grad for p in model.parameters())
    close_to(record["act_rms"][0], taps[0].detach().double().square().mean().sqrt())


def test_torch_attention_modules_in_training_and_on_the_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(IN, D), encoder, nn.Linear(D, 7))
    twin, batch = copy.deepcopy(model), data()
    x, taps = twin[0](batch[0]), []
    taps.append(x)
    for block in twin[1].layers:
        x = keep(taps, block(x))
    expected = torch.autograd.grad(nn.functional.mse_loss(twin[2](x), batch[1]), taps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bare = copy.deepcopy(model).eval()
    with watched(model, optimizer) as scope:
        loss_of(model, batch).backward()
        optimizer.step()
        model.load_state_dict(bare.state_dict())
        model.eval()
        with torch.inference_mode():
            torch.testing.assert_close(model(batch[0]), bare(batch[0]), rtol=1e-5, atol=1e-6)
    assert len(scope.records) == 1
    close_to(scope.records[0]["grad_norm"], norms(expected))


def test_a_parameter_that_is_itself_the_first_hidden_state() -> None:
    class Queries(Stack):
        def __init__(self) -> None:
            super().__init__(3)
            self.query = nn.Parameter(torch.randn(B, T, D))

        def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
            y = keep(taps, self.query)
            for block in self.blocks:
                y = keep(taps, block(y))
            return self.head(y) + self.embed(x).mean()

    model = Queries()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer, every=lambda step: step != 1) as scope:
        for step in range(4):
            expected = norms(truth(model, data(step)))
            optimizer.zero_grad()
            loss_of(model, data(step + 10))  # in flight, never used
            loss_of(model, data(step)).backward()
            optimizer.step()
            if step != 1:
                close_to(scope.records[-1]["grad_norm"], expected)
                assert scope.records[-1]["backward_calls"][0] == 1
    assert not model.query._backward_hooks


# -- copies and files


def test_saving_copying_and_loading_while_attached(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(IN, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 7))
    x = torch.randn(B, IN)
    with watched(model):
        torch.save(model, tmp_path / "model.pt")
        (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
        twin = copy.deepcopy(model)
        expected = model(x).detach()
    torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
    torch.save((x, expected), tmp_path / "data.pt")
    program = f"""
import pickle, sys
sys.modules["flowscope"] = None
import torch
x, expected = torch.load({str(tmp_path / "data.pt")!r})
saved = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
with open({str(tmp_path / "model.pkl")!r}, "rb") as file:
    pickled = pickle.load(file)
for model in (saved, pickled):
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
try:
    import flowscope
except ImportError:
    print("absent")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "absent"


def test_a_copy_made_while_attached_deposits_nothing() -> None:
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        ema = copy.deepcopy(model)
        loss_of(ema, data(5)).backward()
        expected = truth(model, data())
        loss_of(model, data()).backward()
        optimizer.step()
    close_to(scope.records[0]["grad_norm"], norms(expected))
