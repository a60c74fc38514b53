"""Gradient norms before clipping, against norms that the loop itself takes after its last backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import Checkpointed, Stack, close_to, data, loss_of, watched

from flowscope.instruments.raw_gradients import FIRST_READS
from flowscope.records import Record


def by_loop(model: nn.Module) -> list[float]:
    return [float(p.grad.double().norm()) if p.grad is not None else np.nan for p in model.parameters()]


def ratio_of(used: Any, raw: Any) -> float:
    return float(np.sqrt(np.nansum(np.square(used))) / np.sqrt(np.nansum(np.square(raw))))


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.003)


def clip_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-0.003, 0.003)  # leaves the version counter as it was


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.25


def nothing(model: nn.Module) -> None:
    del model


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "norm": clip_norm,
    "value": clip_value,
    "in .data": clip_data,
    "replaced": replace,
    "nothing": nothing,
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_raw_and_used_norms_and_their_ratio(change: str, every: int) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scope = watched(model, optimizer, every=lambda step: step % every == 0, config={"slow_every": 0})
    raw, used = [], []
    for k in range(8):
        optimizer.zero_grad()
        for half in (0, 1):  # two micro-batches
            loss_of(model, data(2 * k + half, batch=3 - half)).backward()
        raw.append(by_loop(model))
        CHANGES[change](model)
        used.append(by_loop(model))
        optimizer.step()
    assert [record.step for record in scope.records] == list(range(0, 8, every))
    for record in scope.records:
        close_to(record["param_grad_norm_raw"], raw[record.step])
        close_to(record["param_grad_norm"], used[record.step])
        close_to(record["clip_ratio"], [ratio_of(used[record.step], raw[record.step])])
        assert (record["clip_ratio"] < 0.9) == (change != "nothing")


def test_clipping_that_begins_late_is_unknown_once_and_then_read() -> None:
    torch.manual_seed(1)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scope = watched(model, optimizer, config={"slow_every": 0})
    begins, raw = FIRST_READS + 3, []
    for k in range(begins + 3):
        optimizer.zero_grad()
        loss_of(model, data(k)).backward()
        raw.append(by_loop(model))
        if k >= begins:
            clip_norm(model)
        optimizer.step()
        _ = scope.records  # a loop that lets records become ready
    records = scope.records
    for record in (*records[:begins], *records[begins + 1 :]):
        close_to(record["param_grad_norm_raw"], raw[record.step])
    late = records[begins]
    assert np.isnan(late["param_grad_norm_raw"]).all()
    assert np.isnan(late["clip_ratio"]).all()
    assert float(records[begins + 1]["clip_ratio"][0]) < 0.9


def scaled_step(scaler: Any, optimizer: Any, model: nn.Module, loss: Tensor, clip: bool) -> list[float]:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    raw = [value / scaler.get_scale() for value in by_loop(model)]
    if clip:
        scaler.unscale_(optimizer)
        clip_norm(model)
    scaler.step(optimizer)
    scaler.update()
    return raw


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_is_divided_out(fused: bool, given: bool, clip: bool) -> None:
    torch.manual_seed(2)
    model = Stack(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scope = watched(model, optimizer, scaler=scaler if given else None)
    raw = [scaled_step(scaler, optimizer, model, loss_of(model, data(k)), clip) for k in range(5)]
    assert scaler.get_scale() == 2048
    for record in scope.records:
        close_to(record["param_grad_norm_raw"], raw[record.step])
        assert (record["clip_ratio"] < 0.9) == clip
        assert clip or abs(float(record["clip_ratio"][0]) - 1) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_read_at_the_end_of_the_whole_backward(reentrant: bool) -> None:
    torch.manual_seed(3)
    model = Checkpointed(4)
    model.reentrant = reentrant
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    for k in range(4):
        optimizer.zero_grad()
        loss_of(model, data(k)).backward()
        expected = by_loop(model)
        optimizer.step()
        close_to(scope.records[k]["param_grad_norm_raw"], expected)
        close_to(scope.records[k]["clip_ratio"], [1.0])


def test_each_of_two_optimizers_and_a_closure() -> None:
    torch.manual_seed(4)
    model = Stack(2)
    halves = [list(model.embed.parameters()), [p for n, p in model.named_parameters() if not n.startswith("embed")]]
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves]
    scope = watched(model, optimizers)
    loss_of(model, data()).backward()
    expected = by_loop(model)
    nn.utils.clip_grad_norm_(halves[0], 1e-3)
    for optimizer in optimizers:
        optimizer.step()
    close_to(scope.records[0]["param_grad_norm_raw"], expected)
    scope.close()

    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    scope = watched(model, lbfgs)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = loss_of(model, data())
        loss.backward()
        expected[:] = by_loop(model)
        return loss

    lbfgs.step(closure)
    close_to(scope.records[0]["param_grad_norm_raw"], expected)
    close_to(scope.records[0]["clip_ratio"], [1.0])


def test_gradients_that_no_backward_left_are_not_known() -> None:
    torch.manual_seed(5)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    for k in range(2):
        gradients = torch.autograd.grad(loss_of(model, data(k)), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = 0.01 * gradient
        optimizer.step()
    for record in scope.records:
        assert np.isfinite(record["param_grad_norm"]).all()
        assert np.isnan(record["param_grad_norm_raw"]).all()
        assert np.isnan(record["clip_ratio"]).all()


def test_triggers_follow_parameters_that_are_frozen_or_replaced() -> None:
    torch.manual_seed(6)
    model = Stack(3)
    scope = None
    for step in range(3):
        if step == 1:
            model.embed.requires_grad_(False)
        if step == 2:
            model.head = nn.Linear(8, 7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope = scope or watched(model, optimizer)
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        expected = by_loop(model)
        clip_norm(model)
        optimizer.step()
        close_to(scope.records[step]["param_grad_norm_raw"], expected)


def hooks_of(model: nn.Module) -> Iterator[int]:
    for parameter in model.parameters():
        yield len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def test_hooks_go_with_the_scope_and_are_not_in_copies() -> None:
    model = Stack(3)
    scope = watched(model)
    assert 0 < sum(hooks_of(model)) <= 4 + 2 * 3  # four triggers, and two hooks on three small parameters
    assert not sum(hooks_of(copy.deepcopy(model)))
    scope.close()
    assert not sum(hooks_of(model))


def test_a_fault_in_reading_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWSCOPE_STRICT", raising=False)
    monkeypatch.setattr("flowscope.instruments.raw_gradients.norms", lambda tensors: 1 / 0)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    loss_of(model, data()).backward()
    optimizer.step()
    record: Record = scope.records[0]
    assert np.isfinite(record["param_grad_norm"]).all()
    assert "raw gradients" in scope.summary()
