"""The losses of all steps reach the next record, against the list that the loop keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from watch_models import Stack, close_to, data, loss_of, train, watched

from flowscope.sinks import read_run
from flowscope.sinks.memory import MemorySink
from flowscope.steps.losses import MOST, LateLoss, LossesSinceRecord, StepLoss
from flowscope.views.report import report_payload


def test_every_record_has_the_losses_since_the_one_before() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer, every=lambda step: step in (2, 3, 9))
    losses = train(scope, model, optimizer, 11)
    found = [record["step_losses"] for record in scope.records]
    for got, (first, last) in zip(found, [(0, 3), (3, 4), (4, 10)], strict=True):
        close_to(got, losses[first:last], rtol=1e-7)
    assert [record.loss for record in scope.records] == [got[-1] for got in found]
    assert scope.records[0].labels("step_losses") == []


def test_losses_of_micro_batches_are_one_mean() -> None:
    torch.manual_seed(1)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer, every=lambda step: step in (0, 3))
    for given in ([2.0, 7.0], [3.0, 5.0], [1.0], [7.0, 2.0, 6.0]):
        for loss in given:
            loss_of(model, data()).backward()
            scope.step(loss=loss)
        optimizer.step()
    np.testing.assert_array_equal(scope.records[0]["step_losses"], [4.5])
    np.testing.assert_array_equal(scope.records[1]["step_losses"], [4.0, 1.0, 5.0])


def test_without_losses_there_is_no_such_metric() -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer)
    loss_of(model, data()).backward()
    optimizer.step()
    assert "step_losses" not in scope.records[0]


def test_a_record_read_before_its_loss_came() -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watched(model, optimizer, every=lambda step: step == 1)
    loss_of(model, data()).backward()
    optimizer.step()
    scope.step(loss=2.5)
    optimizer.step()
    np.testing.assert_array_equal(scope.records[0]["step_losses"], [2.5, np.nan])
    scope.step(loss=torch.tensor(1.25))
    np.testing.assert_array_equal(scope.records[0]["step_losses"], [2.5, 1.25])


def test_a_loop_that_reads_records_and_gives_each_loss_before_the_step() -> None:
    torch.manual_seed(4)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope, given = watched(model, optimizer), []
    for step in range(3):
        loss = loss_of(model, data(step))
        loss.backward()
        scope.step(loss=loss)
        given.append(loss.item())
        optimizer.step()
        close_to([record.loss for record in scope.records], given, rtol=1e-7)


def step_loss(*values: float) -> StepLoss:
    loss = StepLoss()
    for value in values:
        loss.give(value)
    return loss


def test_memory_is_bounded() -> None:
    since = LossesSinceRecord()
    for k in range(MOST + 7):
        since.add(step_loss(float(k), k + 2.0))
    assert since.take().tolist() == [k + 1.0 for k in range(7, MOST + 7)]
    assert since.take() is None
    since.add(step_loss())
    since.add(step_loss(np.inf))
    np.testing.assert_array_equal(since.take(), [np.nan, np.inf])


class Copy:
    """Stands for a copy from a device: not there until `arrive` is called."""

    arrived = False

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def ready(self) -> bool:
        return self.arrived

    def read(self) -> list[np.ndarray]:
        return [tensor.double().numpy() for tensor in self.tensors]


def test_a_loss_on_its_way_holds_its_record_back_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowscope.steps.losses.HostCopy", Copy)
    monkeypatch.setattr("flowscope.arguments.loss_value", lambda loss: LateLoss(loss.detach()))
    torch.manual_seed(2)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = MemorySink()
    scope = watched(model, optimizer, sinks=[seen])
    losses = train(scope, model, optimizer, 3)
    assert not seen.records
    monkeypatch.setattr(Copy, "arrived", True)
    losses += train(scope, model, optimizer, 2)
    assert len(seen.records) >= 3
    close_to([record.loss for record in scope.records], losses, rtol=1e-7)


def test_files_keep_them_and_panels_do_not_draw_them(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, every=3, log_dir=tmp_path) as scope:
        train(scope, model, optimizer, 14)
    run = read_run(tmp_path)
    assert [len(record["step_losses"]) for record in run.records] == [1] * 10 + [3]
    keys = {metric["key"] for metric in report_payload({"run": run}, "title")["runs"][0]["metrics"]}
    assert "grad_norm" in keys
    assert "step_losses" not in keys
