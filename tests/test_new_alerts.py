"""Labelled runs for the alerts of attention and of Adam's second moment: a faulty one each, and its healthy twin."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch_models import Stack, data, loss_of, watched

import flowscope
from flowscope.detectors.attention import AttentionLogits
from flowscope.detectors.moments import StaleMoment
from flowscope.records import Record, RunHeader

D, H = 16, 2
HEADER = RunHeader("0", (), {})


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    torch.manual_seed(0)


class Attention(nn.Module):
    """Causal attention, with queries and keys of length 1 times a gain where `norm`."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), norm

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, D // H).permute(2, 0, 3, 1, 4)
        if self.norm:
            q, k = 3 * F.normalize(q, dim=-1), 3 * F.normalize(k, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def growing(*, norm: bool) -> flowscope.Scope:
    """The query and key weights of the second layer grow by a fifth a step, as without QK-norm at a high rate."""
    model = nn.Sequential(*(Attention(norm=norm) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watched(model, optimizer) as scope:
        for seed in range(25):
            optimizer.zero_grad()
            x = torch.randn(4, 9, D, generator=torch.Generator().manual_seed(seed))
            F.mse_loss(model(x), x.roll(1, 1)).backward()
            optimizer.step()
            with torch.no_grad():
                model[1].qkv.weight[: 2 * D] *= 1.2
    return scope


def raised(scope: flowscope.Scope, kind: str) -> list[flowscope.Alert]:
    return [alert for alert in scope.alerts if alert.kind == kind]


def test_growing_attention_logits_are_an_alert_that_names_layer_head_and_cure() -> None:
    scope = growing(norm=False)
    (alert,) = raised(scope, "attention_logits")
    assert alert.where == "1"
    assert "in head" in alert.message
    assert "QK-norm" in alert.advice
    seen = [record for record in scope.records if "attention_logit_max" in record.metrics]
    above = [record.step for record in seen if record["attention_logit_max"][1] > 100]
    assert alert.step == above[1]  # the second in a row


def test_with_norms_on_queries_and_keys_the_same_run_is_silent() -> None:
    assert not raised(growing(norm=True), "attention_logits")


def test_logits_that_were_large_from_the_start_are_no_fault() -> None:
    detector = AttentionLogits()
    records = [Record(step, metrics={"attention_logit_max": np.array([300.0, 2.0])}) for step in range(5)]
    assert not [f for record in records for f in detector.findings(record, HEADER) if f.level == "beyond"]


def test_what_the_detectors_learned_survives_json() -> None:
    for detector in (AttentionLogits(), StaleMoment()):
        record = Record(0, metrics={"attention_logit_max": np.array([3.0, np.nan])})
        list(detector.findings(record, HEADER))
        other = type(detector)()
        other.load_state_dict(json.loads(json.dumps(detector.state_dict())))
        np.testing.assert_equal(other.state, detector.state)


def outgrown(make: Any, **options: Any) -> flowscope.Scope:
    """The same batch again and again; from step 100 on the loss, and with it the gradient, is twenty times larger."""
    model = Stack()
    optimizer = make(model.parameters(), lr=1e-5, **options)
    with watched(model, optimizer) as scope:
        for step in range(120):
            optimizer.zero_grad()
            (loss_of(model, data()) * (20.0 if step >= 100 else 1.0)).backward()
            optimizer.step()
    return scope


def test_gradients_that_outgrow_adams_second_moment_are_an_alert() -> None:
    (alert,) = raised(outgrown(torch.optim.Adam), "stale_moment")
    assert 100 <= alert.step <= 106
    assert "beta2" in alert.advice


@pytest.mark.parametrize(("usual", "jump", "told"), [(0.3, 1.6, True), (1.2, 1.7, False), (1.2, 1.9, True)])
def test_what_is_large_is_measured_by_the_runs_own_steps(usual: float, jump: float, told: bool) -> None:
    """Without a first moment steps of the whole rate are usual: 1.5 times 1.2 is 1.8."""
    detector, found = StaleMoment(), []
    for step, ratio in enumerate([1.0, *[usual] * 20, jump]):
        record = Record(step, metrics={"update_rms": np.full(3, 0.1 * ratio), "param_lr": np.full(3, 0.1)})
        found += [step for f in detector.findings(record, HEADER) if f.level == "beyond"]
    assert found == ([21] if told else [])


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_a_short_memory_or_another_optimizer_is_silent(make: Any) -> None:
    options = {"betas": (0.9, 0.95)} if make is torch.optim.Adam else {"momentum": 0.9}
    assert not raised(outgrown(make, **options), "stale_moment")
