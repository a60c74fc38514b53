"""DeepSpeed's ZeRO: what an engine does with parameters, gradients and its inner optimizer, and what is said of it.

A stand-in does what DeepSpeed 0.19.8 was seen to do on one rank; where deepspeed is installed, the same is asked of it.

Stage 1: the last backward of a step leaves `.grad` empty, as gradients are kept elsewhere; parameters have
`_hp_mapping`. At the end of the micro-batches the inner optimizer steps a flat fp32 copy of one group at a time, with
`param_groups` cut down to it; then the copies are written back. Stage 3: each backward leaves `.grad` empty; parameters
have `ds_id` and `ds_shape`, are empty between uses, and the other groups' lists are empty while one steps.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import flowscope

B, D, K, MICRO, STEPS = 4, 6, 3, 2, 3
LR = 1e-2


def make() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(D, K))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """With weight decay and without, as nearly everybody has them."""
    wide, rest = ([p for p in model.parameters() if (p.dim() > 1) is is_wide] for is_wide in (True, False))
    return [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(B, D, generator=generator), torch.randint(0, K, (B,), generator=generator)


class FlatOptimizer:
    """In place of DeepSpeedZeroOptimizer; `optimizer` is the inner one."""

    def __init__(self, given: list[dict[str, Any]], stage: int) -> None:
        self.stage, self.held = stage, [group["params"] for group in given]
        self.whole = [[p.detach() for p in held] for held in self.held]
        self.flat = [nn.Parameter(torch.cat([p.reshape(-1) for p in whole])) for whole in self.whole]
        inner = [{**group, "params": [flat]} for group, flat in zip(given, self.flat, strict=True)]
        self.optimizer = torch.optim.AdamW(inner, LR)
        self.sums = [torch.zeros_like(flat) for flat in self.flat]
        for number, p in enumerate(p for held in self.held for p in held):
            if stage == 3:
                p.ds_id, p.ds_shape = number, p.shape
            else:
                p._hp_mapping = object()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def gather(self, *, away: bool) -> None:
        for held, whole in zip(self.held, self.whole, strict=True):
            for p, kept in zip(held, whole, strict=True):
                p.data = torch.empty(0) if away else kept

    def take_gradients(self) -> None:
        for held, total in zip(self.held, self.sums, strict=True):
            total += torch.cat([p.grad.reshape(-1) for p in held])
            for p in held:
                p.grad = None

    def step(self) -> None:
        whole = self.optimizer.param_groups
        for flat, total, group in zip(self.flat, self.sums, whole, strict=True):
            flat.grad = total.clone()
            total.zero_()
            if self.stage == 3:
                for other in whole:
                    other["params"] = [flat] if other is group else []
            else:
                self.optimizer.param_groups = [group]
            self.optimizer.step()
            self.optimizer.param_groups = whole
        for held, flat in zip(self.whole, self.flat, strict=True):
            for p, part in zip(held, flat.detach().split([p.numel() for p in held]), strict=True):
                p.copy_(part.view_as(p))


class Engine(nn.Module):
    """In place of DeepSpeedEngine."""

    def __init__(self, model: nn.Module, stage: int) -> None:
        super().__init__()
        self.module, self.micro, self.stage = model, 0, stage
        self.optimizer = FlatOptimizer(groups(model), stage)
        self.keep(away=True)

    def keep(self, *, away: bool) -> None:
        if self.stage == 3:
            self.optimizer.gather(away=away)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(away=False)
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        (loss / MICRO).backward()
        if self.stage == 3 or self.micro % MICRO == MICRO - 1:
            self.optimizer.take_gradients()
        self.keep(away=True)

    def step(self) -> None:
        self.micro += 1
        if self.micro % MICRO == 0:
            self.optimizer.step()


def stand_in(model: nn.Module, stage: int) -> tuple[Any, Any]:
    engine = Engine(model, stage)
    return engine, engine.optimizer


def real(model: nn.Module, stage: int) -> tuple[Any, Any]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": B,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=groups(model), config=settings)[:2]


@pytest.fixture(
    params=[
        stand_in,
        pytest.param(real, marks=pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="no deepspeed")),
    ]
)
def prepare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in {**place, "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    return request.param


def train(engine: Any, after: Callable[[Tensor], object]) -> None:
    for number in range(MICRO * STEPS):
        x, y = batch(number)
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        after(loss.detach())


def truth() -> list[list[float]]:
    """The norm of the gradient at the blocks' outputs in each step, by hooks on a bare model with AdamW itself."""
    model, seen = make(), []
    optimizer = torch.optim.AdamW(groups(model), LR)
    squares: list[float] = []

    def add(place: int, gradient: Tensor) -> None:
        squares[place] += float(gradient.double().square().sum())

    for step in range(STEPS):
        squares[:] = [0.0] * 4
        optimizer.zero_grad()
        for number in range(MICRO * step, MICRO * (step + 1)):
            x, y = batch(number)
            for i, block in enumerate(model):
                x = block(x)
                x.register_hook(functools.partial(add, i))
            (nn.functional.cross_entropy(x, y) / MICRO).backward()
        optimizer.step()
        seen.append([math.sqrt(square) for square in squares])
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_engine_does(prepare: Callable[..., tuple[Any, Any]], stage: int) -> None:
    model = make()
    shapes = [p.shape for p in model.parameters()]
    engine, optimizer = prepare(model, stage)
    now = list(model.parameters())
    assert all(hasattr(p, "ds_id" if stage == 3 else "_hp_mapping") for p in now)
    assert engine.optimizer is optimizer
    if stage == 3:
        assert [p.ds_shape for p in now] == shapes
        assert all(p.numel() == 0 for p in now)
    stepped: list[int] = []

    def steps(inner: Any, args: Any, kwargs: Any) -> None:
        assert inner is optimizer.optimizer
        held = [p for group in inner.param_groups for p in group["params"]]
        assert len(held) == 1
        assert held[0].dim() == 1
        stepped.append(id(held[0]))

    handle = register_optimizer_step_pre_hook(steps)
    gradients: list[bool] = []
    train(engine, lambda loss: gradients.append(any(p.grad is not None for p in model.parameters())))
    handle.remove()
    assert len(stepped) == 2 * STEPS
    assert len(set(stepped)) == 2
    assert gradients == [stage == 1, False] * STEPS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_one_record_a_step_and_what_cannot_be_seen_is_said(
    prepare: Callable[..., tuple[Any, Any]], stage: int, given: bool
) -> None:
    losses: list[float] = []
    engine, optimizer = prepare(make(), stage)
    with flowscope.watch(engine, optimizer if given else None, every=1) as scope:

        def after(loss: Tensor) -> None:
            losses.append(float(loss))
            scope.step(loss=loss)

        train(engine, after)
    records = scope.records
    assert [record.step for record in records] == list(range(STEPS))
    means = np.array(losses).reshape(STEPS, MICRO).mean(1)
    np.testing.assert_allclose([record.loss for record in records], means, rtol=1e-6)
    for record, expected in zip(records, truth(), strict=True):
        np.testing.assert_allclose(record["grad_norm"], expected, rtol=1e-4)
        for unseen in ("update_ratio", "param_grad_norm", "param_unchanged", "param_optimized"):
            assert np.isnan(record[unseen]).all(), unseen
        assert np.isnan(record["param_norm"]).all() == (stage == 3)
        assert any("DeepSpeed" in note for note in record.notes)
    assert not scope.alerts
    assert "DeepSpeed's ZeRO steps flat copies" in scope.summary().splitlines()[-1]
