"""Lower precision and loss scales: the numbers are those of the true gradients.

Axis letters: B batch, T tokens, D features.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import Stack, close_to, data, loss_of, norms, scaled_step, truth, watched

pytestmark = pytest.mark.usefixtures("strict")


def autocast_loss(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        out = model(batch[0])
    return nn.functional.mse_loss(out.float(), batch[1])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_seen_within_two_percent_of_full_precision(dtype: torch.dtype, scaled: bool) -> None:
    model = Stack(4)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0) if scaled else None
    with watched(model, optimizer, scaler=scaler) as scope:
        loss = autocast_loss(model, data(), dtype)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    record, expected = scope.records[0], norms(truth(twin, data()))
    np.testing.assert_allclose(record["grad_norm"], expected, rtol=0.02)
    np.testing.assert_allclose(record["gradient_product"], expected / expected[-1], rtol=0.02)
    loss_of(twin, data()).backward()
    np.testing.assert_allclose(record["param_grad_norm"], [p.grad.norm() for p in twin.parameters()], rtol=0.03)
    if scaled:
        assert record["loss_scale"].tolist() == [4096.0]
    assert ("loss_scale" in record) == scaled


def test_bf16_parameters_and_what_rounding_leaves_of_their_updates() -> None:
    model = Stack(3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    batch = tuple(t.bfloat16() for t in data())
    before = [p.detach().double() for p in model.parameters()]
    with watched(model, optimizer) as scope:
        loss_of(model, batch).backward()
        optimizer.step()
    record = scope.records[0]
    now = [p.detach().double() for p in model.parameters()]
    moved = np.array([float((a - b).norm()) for a, b in zip(now, before, strict=True)])
    length = np.array([float(b.norm()) for b in before])  # a norm's bias starts at zero: no ratio
    np.testing.assert_allclose(
        record["update_ratio"][length > 0], (moved / np.maximum(length, 1e-30))[length > 0], 1e-5
    )
    assert np.isnan(record["update_ratio"][length == 0]).all()
    unchanged = [float((a == b).double().mean()) for a, b in zip(now, before, strict=True)]
    close_to(record["param_unchanged"], unchanged)
    assert max(unchanged) > 0.5  # most of a norm's weights, near 1, do not move in bf16
    close_to(record["param_norm"], length)


def test_fp64_keeps_its_digits() -> None:
    model = Stack(3).double()
    batch = tuple(t.double() for t in data())
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    expected = norms(truth(model, batch))
    before = [p.detach().clone() for p in model.parameters()]
    with watched(model, optimizer) as scope:
        loss_of(model, batch).backward()
        optimizer.step()
    record = scope.records[0]
    np.testing.assert_allclose(record["grad_norm"], expected, rtol=1e-12)
    change = [float((p.detach() - b).norm() / b.norm()) for p, b in zip(model.parameters(), before, strict=True)]
    seen = np.array([float(b.norm()) > 0 for b in before])
    np.testing.assert_allclose(record["update_ratio"][seen], np.array(change)[seen], rtol=1e-5)


# -- one scaler, several optimizers


def two_optimizers(model: nn.Module, fused: bool) -> list[torch.optim.Optimizer]:
    def make(*modules: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for m in modules for p in m.parameters()], 1e-2, fused=fused)

    return [make(model.embed, model.head), make(model.blocks)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", ["embed", "blocks.0.fc1"])
def test_one_scaler_and_two_optimizers_of_one_model(bad: str, fused: bool) -> None:
    """In step 1 one of the two finds inf: the first or the last, and the other one steps."""
    model, alerts = Stack(3), []
    optimizers = two_optimizers(model, fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watched(model, optimizers, scaler=scaler, on_alert=alerts.append) as scope:
        for step in range(3):
            twin = copy.deepcopy(model)
            loss_of(twin, data(step)).backward()
            expected = norms(truth(model, data(step)))
            scaled_step(model, data(step), scaler, *optimizers, overflow=bad if step == 1 else None)
            record = scope.records[-1]
            assert (record.step, record.flags) == (step, ("skipped",) if step == 1 else ())
            if step != 1:
                close_to(record["grad_norm"], expected)
                close_to(record["param_grad_norm"], [p.grad.norm() for p in twin.parameters()])
            else:
                assert not {"grad_norm", "param_grad_norm", "update_ratio"} & set(record.metrics)
    assert [r.step for r in scope.records] == [0, 1, 2]
    assert not alerts


def test_another_models_updates_of_a_shared_scaler_skip_no_step_of_ours() -> None:
    ours, theirs = Stack(2), Stack(2)
    own, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with watched(ours, own, scaler=scaler) as scope:
        for step in range(3):
            for model, optimizer in ((theirs, other), (ours, own)):
                expected = norms(truth(model, data(step)))
                scaled_step(model, data(step), scaler, optimizer)
            record = scope.records[-1]
            assert (record.step, record.flags) == (step, ())
            close_to(record["grad_norm"], expected)
    assert len(scope.records) == 3


@pytest.mark.parametrize("fused", [False, True])
def test_only_a_collapsing_scale_is_an_alert(fused: bool) -> None:
    model = Stack(2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen: list[Any] = []
    with watched(model, optimizer, scaler=scaler) as scope:
        for step in range(6):
            scaled_step(model, data(step), scaler, optimizer, overflow="head")
            seen.append([(a.kind, a.severity, a.value) for a in scope.alerts])
    assert [float(r["loss_scale"][0]) for r in scope.records] == [8.0, 4.0, 2.0, 1.0, 0.5, 0.25]
    assert all(r.flags == ("skipped",) for r in scope.records)
    assert seen[:4] == [[], [], [], []]
    assert seen[4] == seen[5] == [("non_finite", "error", 0.5)]
