"""update_growth: a layer's updates outgrow their past, before gradient and loss do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from detector_records import PARAMETERS, header, played_with_a_break, record, told
from torch import nn

import flowscope
from flowscope.detectors import outgrown as module
from flowscope.detectors.outgrown import Layers, UpdateGrowth, chance_of, outgrown
from flowscope.records import Alert

# -- the statistic ----------------------------------------------------------------------------------------------------


def test_the_last_are_compared_with_the_window_before_the_gap():
    steady = [1.0, 2.0] * 20  # median 1.5, largest 2
    gap = [2.5] * 20
    grown = [*steady, *gap, *[3.0] * 7, 9.0]
    mixed = [*steady, *gap, *[3.0] * 7, 2.0]  # one is not above all of the window
    short = [math.nan, *steady[1:], *gap, *[3.0] * 8]
    assert outgrown(np.array([grown, mixed, short]).T) == pytest.approx([2.0, 0.0, 0.0])


def test_the_chance_is_one_over_the_ways_to_choose_the_largest(monkeypatch):
    monkeypatch.setattr(module, "LAST", 2)
    monkeypatch.setattr(module, "WINDOW", 5)
    monkeypatch.setattr(module, "GAP", 3)
    # of 5 + 2 numbers the last two are the two largest in 2! 5! / 7! = 1/21 of all orders, whatever the distribution
    draws = np.abs(np.random.default_rng(0).standard_cauchy((10, 20_000)))
    assert np.mean(outgrown(draws) > 0) == pytest.approx(1 / 21, abs=4 * math.sqrt(1 / 21 / 20_000))
    # 13 records have four places for ten in a row; three rows
    assert chance_of(3, 13) == pytest.approx(3 * 4 / 21)


def test_the_stated_chance_of_a_long_run_is_small():
    assert chance_of(24, 10_000) == pytest.approx(24 * 9_933 / 377_348_994)
    assert chance_of(24, 67) == 0.0


def test_layers_are_blocks_and_what_lies_beside_them():
    names, rows = Layers().of(PARAMETERS, header())
    assert names == ["embed", "blocks.0", "blocks.1", "head"]
    assert rows.tolist() == [0, 1, 1, 2, 3]


def course(grown: float, gradient: float = 0.4, start: int = 70, steps: int = 130, rate: float = 0.1, losses=None):
    """Records whose second block's updates grow within ten records, beside a gradient that may grow too."""
    random = np.random.default_rng(1)
    for step in range(steps):
        done = min(max(step - start, 0) / 10, 1.0)
        noise = np.exp(0.1 * random.standard_normal(5))
        ratio, norms = 1e-3 * noise, np.array([0.5, 0.4, 0.3, 0.2, 0.1])
        ratio[3] *= grown**done
        norms[3] *= (gradient / 0.4) ** done
        known = {"param_trainable": [1] * 5, "param_optimized": [1] * 5, "param_lr": [rate] * 5}
        told = {} if losses is None else {"loss": losses(step)}
        yield record(
            step, **told, param_norm=[10.0] * 5, param_grad_norm=norms, update_ratio=ratio * rate / 0.1, **known
        )


def alerts_of(records) -> list[Alert]:
    detector, head = UpdateGrowth(), header()
    return [f for one in records for f in detector.findings(one, head) if f.level == "beyond"]


def test_growth_names_the_layer_and_its_factor():
    found = alerts_of(course(4.0))
    assert {f.where for f in found} == {"blocks.1"}
    assert found[-1].value == pytest.approx(4.0, rel=0.15)
    assert "1 of 4 layers" in found[-1].message


@pytest.mark.parametrize(
    "records",
    [
        course(1.7),  # less than twofold
        course(4.0, gradient=1.6),  # the gradient grows as much: others tell
        course(4.0, start=40, steps=60),  # too short to know
        course(4.0, losses=lambda step: 1.0 if step < 70 else 1.5),  # a new task
        (one for rate in (0.1,) for one in [*course(1.0, steps=70), *course(1.0, steps=60, rate=1.0)]),  # the rate rose
    ],
)
def test_growth_that_has_a_reason_is_silent(records):
    assert alerts_of(records) == []


def test_its_state_can_be_taken_over():
    whole, broken = played_with_a_break(list(course(4.0)), 85)
    assert told(whole) == told(broken)
    assert "update_growth" in {alert.kind for alert in whole}


# -- programs ---------------------------------------------------------------------------------------------------------

STEPS, LOST = 420, 210


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.relu(self.fc(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rate_at(kind: str, k: int) -> float:
    return {
        "warm-up": min(1.0, (k + 1) / 200),
        "cosine": 0.5 * (1 + math.cos(math.pi * k / STEPS)),
        "rate step": 0.1 if k > 250 else 1.0,
    }.get(kind, 1.0)


def lose_second_moments(optimizer: torch.optim.Optimizer, layers: list[nn.Module]) -> None:
    """What squares of gradients come in is lost, and what was there fades: a state of too few bits."""
    for parameter in (p for layer in layers for p in layer.parameters()):
        state = optimizer.state[parameter]
        kept = state.setdefault("kept", state["exp_avg_sq"].clone())
        state["exp_avg_sq"].copy_(kept.mul_(0.95))


def train(kind: str) -> list[Alert]:
    torch.manual_seed(0)
    model, generator = Net(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: rate_at(kind, k))
    truth = torch.randn(8, 3, generator=torch.Generator().manual_seed(7))
    early = nn.ModuleList([model.embed, model.blocks[0]])
    early.requires_grad_(kind != "unfreezing")
    alerts: list[Alert] = []
    with flowscope.watch(model, optimizer, every=3, on_alert=alerts.append) as scope:
        for k in range(STEPS):
            if kind == "unfreezing" and k == 240:
                early.requires_grad_(True)
            x = torch.randn(32, 8, generator=generator)
            y = (x @ truth + 0.3 * torch.randn(32, 3, generator=generator)).argmax(1)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if kind == "lost moments" and k >= LOST:
                lose_second_moments(optimizer, [model.blocks[0], model.blocks[1]])
            scope.step(loss)
    return [alert for alert in alerts if alert.state == "raised"]


def test_lost_second_moments_are_told_before_gradient_and_loss():
    alerts = train("lost moments")
    (first, *_) = [alert for alert in alerts if alert.kind == "update_growth"]
    others = [alert for alert in alerts if alert.kind in ("loss_spike", "exploding_gradient", "update_too_large")]
    assert first.where in ("blocks.0", "blocks.1")  # both are spoilt
    assert LOST < first.step < min(alert.step for alert in others) - 30
    assert "warning" in {alert.severity for alert in alerts if alert.kind == "update_growth"}


@pytest.mark.parametrize("kind", ["plain", "warm-up", "cosine", "rate step", "unfreezing"])
def test_schedules_and_unfreezing_are_silent(kind):
    assert [alert for alert in train(kind) if alert.kind == "update_growth"] == []
