"""`integrations.accelerate.watch` in loops written with accelerate."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from watch_models import Stack, data, loss_of, norms

import flowscope
from flowscope.integrations import accelerate as integration

STEPS = 4


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state in the process."""
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget()
    yield
    forget()


def forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make() -> tuple[Stack, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    return [data(seed) for seed in range(count)]


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, scope: flowscope.Scope | None, clip: float | None = None
) -> list[dict[str, Tensor]]:
    """The loop of accelerate's documentation; returns what each micro-batch began with."""
    states = []
    for batch in batches():
        states.append(copy.deepcopy(accelerator.unwrap_model(model).state_dict()))
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        if scope is not None:
            scope.step(loss=loss)
            if accelerator.check_trigger():
                break
    return states


def truth(states: list[dict[str, Tensor]], numbers: range) -> tuple[np.ndarray, float]:
    """Norms of dL/dx_l of the mean over the micro-batches, and that mean, by torch.autograd."""
    model = make()[0]
    gradients, total = [], 0.0
    for k in numbers:
        model.load_state_dict(states[k])
        taps: list[Tensor] = []
        loss = loss_of(model, data(k), taps) / len(numbers)
        gradients.append(torch.autograd.grad(loss, taps))
        total += loss.item()
    return norms(*gradients), total


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_numbers_are_those_of_a_bare_loop(accumulation: int, precision: str) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, mixed_precision=precision)
    model, optimizer = accelerator.prepare(*make())
    scope = integration.watch(accelerator, model, optimizer, every=1)
    states = train(accelerator, model, optimizer, scope, clip=0.01)
    scope.close()
    tolerance = 1e-5 if precision == "no" else 2e-2
    assert [r.step for r in scope.records] == list(range(STEPS // accumulation))
    for record in scope.records:
        first = record.step * accumulation
        expected, loss = truth(states, range(first, first + accumulation))
        assert record.loss == pytest.approx(loss, rel=tolerance)
        np.testing.assert_allclose(record["grad_norm"], expected, rtol=tolerance)
        assert record["clip_ratio"].item() < 0.5
        total = np.sqrt(np.square(record["param_grad_norm"]).sum())
        assert total == pytest.approx(0.01, rel=1e-3)
        assert total / np.sqrt(np.square(record["param_grad_norm_raw"]).sum()) == pytest.approx(
            record["clip_ratio"].item(), rel=1e-4
        )
        assert record.labels("grad_norm")[1] == "blocks.0"


def test_training_is_unchanged() -> None:
    weights = []
    for attach in (False, True):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(*make())
        scope = integration.watch(accelerator, model, optimizer, every=1) if attach else None
        train(accelerator, model, optimizer, scope)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        if scope is not None:
            scope.close()
    assert torch.equal(*weights)


@pytest.mark.parametrize("by", ["stop_on", "action"])
def test_an_alert_sets_the_trigger(by: str) -> None:
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*make())
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    options: dict[str, Any] = {"stop_on": "error", "on_alert": lambda alert: None}
    if by == "action":
        options = {"on_alert": flowscope.actions.Stop("error")}
    with integration.watch(accelerator, model, optimizer, every=1, **options) as scope:
        assert len(train(accelerator, model, optimizer, scope)) < STEPS
    assert "non_finite" in [a.kind for a in scope.alerts]


def test_state_travels_in_the_accelerators_checkpoint(tmp_path: Path) -> None:
    for number, first_step in enumerate((0, STEPS)):
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(*make())
        with integration.watch(accelerator, model, optimizer, every=1) as scope:
            accelerator.register_for_checkpointing(scope)
            if number:
                accelerator.load_state(str(tmp_path))
            train(accelerator, model, optimizer, scope)
            if not number:
                accelerator.save_state(str(tmp_path))
        assert [r.step for r in scope.records] == list(range(first_step, first_step + STEPS))


def test_log_dir_is_the_tensorboard_trackers(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("a")
    model, optimizer = accelerator.prepare(*make())
    with integration.watch(accelerator, model, optimizer, every=1) as scope:
        train(accelerator, model, optimizer, scope)
    accelerator.end_training()
    assert len(list(tmp_path.rglob("flowscope.jsonl"))) == 1


def test_compiled_by_accelerate() -> None:
    plain = []
    for backend in ("no", "aot_eager"):
        forget()
        torch._dynamo.utils.counters.clear()
        accelerator = Accelerator(dynamo_backend=backend)
        model, optimizer = accelerator.prepare(*make())
        with integration.watch(accelerator, model, optimizer, every=1) as scope:
            train(accelerator, model, optimizer, scope)
        plain.append(scope.records)
        assert scope.records[0].labels("grad_norm")[1] == "blocks.0"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for eager, compiled in zip(*plain, strict=True):
        np.testing.assert_allclose(compiled["grad_norm"], eager["grad_norm"], rtol=1e-5)
