"""`integrations.ignite.attach` in real runs of Ignite's engines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from torch import Tensor, nn
from watch_models import Stack, data, norms

import flowscope
from flowscope.integrations.ignite import attach

STEPS = 4


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")


def make(**options: Any) -> tuple[Engine, Stack, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return create_supervised_trainer(model, optimizer, nn.functional.mse_loss, **options), model, optimizer


def batches() -> list[tuple[Tensor, Tensor]]:
    return [data(seed) for seed in range(STEPS)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_numbers_are_those_of_a_bare_loop(accumulation: int) -> None:
    trainer, model, optimizer = make(gradient_accumulation_steps=accumulation)
    states: list[dict[str, Tensor]] = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: states.append(copy.deepcopy(model.state_dict())))
    with attach(trainer, model, optimizer, every=1) as scope:
        trainer.run(batches(), max_epochs=1)
    assert [r.step for r in scope.records] == list(range(STEPS // accumulation))
    bare = make()[1]
    for record in scope.records:
        gradients, total = [], 0.0
        for k in range(record.step * accumulation, (record.step + 1) * accumulation):
            bare.load_state_dict(states[k])
            taps: list[Tensor] = []
            loss = nn.functional.mse_loss(bare(data(k)[0], taps), data(k)[1]) / accumulation
            gradients.append(torch.autograd.grad(loss, taps))
            total += loss.item()
        assert record.loss == pytest.approx(total, rel=1e-5)
        np.testing.assert_allclose(record["grad_norm"], norms(*gradients), rtol=1e-5)


def test_training_is_unchanged_and_the_scope_closes_itself() -> None:
    weights = []
    for watched in (False, True):
        trainer, model, optimizer = make()
        scope = attach(trainer, model, optimizer, every=1) if watched else None
        trainer.run(batches(), max_epochs=2)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(*weights)
    assert scope is not None
    assert scope.closed
    assert len(scope.records) == 2 * STEPS
    trainer.run(batches(), max_epochs=3)  # further runs go on without it
    assert len(scope.records) == 2 * STEPS


@pytest.mark.parametrize("by", ["stop_on", "action"])
def test_an_alert_terminates_the_run(by: str) -> None:
    trainer, model, optimizer = make()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    seen: list[flowscope.Alert] = []
    options: dict[str, Any] = {"stop_on": "non_finite", "on_alert": seen.append}
    if by == "action":
        options = {"on_alert": [flowscope.actions.Stop("non_finite"), seen.append]}
    attach(trainer, model, optimizer, every=1, **options)
    trainer.run(batches(), max_epochs=5)
    assert "non_finite" in [a.kind for a in seen]
    assert trainer.state.iteration < 5 * STEPS


def test_exceptions_still_leave_the_run() -> None:
    trainer, model, optimizer = make()

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def fail() -> None:
        raise RuntimeError("a broken batch")

    with pytest.raises(RuntimeError, match="a broken batch"), attach(trainer, model, optimizer, every=1) as scope:
        trainer.run(batches(), max_epochs=1)
    assert scope.closed
    assert [r.step for r in scope.records] == [0, 1]


def test_output_transform_finds_the_loss() -> None:
    trainer, model, optimizer = make(output_transform=lambda x, y, y_pred, loss: {"loss": loss, "y": y})
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output["loss"].item()))
    with attach(trainer, model, optimizer, every=1, output_transform=lambda output: output["loss"]) as scope:
        trainer.run(batches(), max_epochs=1)
    assert [r.loss for r in scope.records] == pytest.approx(losses, rel=1e-6)


def test_the_engines_own_scaler_is_used() -> None:
    trainer, model, optimizer = make()
    trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        engine.state.scaler.scale(loss).backward()
        engine.state.scaler.step(optimizer)
        engine.state.scaler.update()
        return loss.detach()

    scaled, plain = Engine(step), attach(trainer, model, optimizer, every=1)
    plain.close()
    scaled.state.scaler = trainer.state.scaler
    with attach(scaled, model, optimizer, every=1) as scope:
        scaled.run(batches(), max_epochs=1)
    bare = make()[1]
    taps: list[Tensor] = []
    loss = nn.functional.mse_loss(bare(data(0)[0], taps), data(0)[1])
    np.testing.assert_allclose(scope.records[0]["grad_norm"], norms(torch.autograd.grad(loss, taps)), rtol=1e-5)


def test_a_checkpoint_carries_the_scopes_state(tmp_path: Path) -> None:
    trainer, model, optimizer = make()
    with attach(trainer, model, optimizer, every=1) as scope:
        saver = Checkpoint({"scope": scope}, DiskSaver(str(tmp_path)))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
        trainer.run(batches(), max_epochs=1)
    again, model, optimizer = make()
    with attach(again, model, optimizer, every=1) as scope:
        Checkpoint.load_objects({"scope": scope}, next(tmp_path.iterdir()))
        again.run(batches(), max_epochs=1)
    assert [r.step for r in scope.records] == list(range(STEPS, 2 * STEPS))
