"""The shape of hidden states and the rms of updates, against plain numpy on whole tensors.

Axis letters: B batch, T tokens, D features.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from two_ranks import torchrun
from watch_models import Checkpointed, Stack, close_to, data, loss_of, sgd, watched

import flowscope

NAMES = ("act_absmax", "act_kurtosis", "top_channel_share", "top_channel", "act_headroom")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    torch.manual_seed(0)


def states_of(model: nn.Module, seeds: tuple[int, ...], batch: int = 3) -> list[list[np.ndarray]]:
    """[points][micro-batches] of [B*T, D] fp64, from a twin that computes nothing again."""
    twin = Stack(len(model.blocks))
    twin.load_state_dict(model.state_dict())
    taken: list[list[Tensor]] = []
    for seed in seeds:
        taps: list[Tensor] = []
        twin(data(seed, batch)[0], taps)
        taken.append(taps)
    return [[x.detach().double().reshape(-1, x.shape[-1]).numpy() for x in point] for point in zip(*taken, strict=True)]


def naive(calls: list[np.ndarray], end: float) -> dict[str, float]:
    x = np.concatenate(calls)
    top = [(call**2).sum(0) for call in calls]
    largest = float(np.max([np.abs(call).max() for call in calls]))
    numbers = {int(channels.argmax()) for channels in top}
    return {
        "act_absmax": largest,
        "act_kurtosis": float((x**4).mean() / (x**2).mean() ** 2),
        "top_channel_share": sum(channels.max() for channels in top) / float((x**2).sum()),
        "top_channel": numbers.pop() if len(numbers) == 1 else np.nan,
        "act_headroom": end / largest,
    }


def agree(record: flowscope.Record, states: list[list[np.ndarray]]) -> None:
    truth = [naive(calls, torch.finfo(torch.float32).max) for calls in states]
    for name in NAMES:
        close_to(record[name], [point[name] for point in truth], rtol=1e-5)


def step(model: nn.Module, seeds: tuple[int, ...], forward: Any = None) -> flowscope.Record:
    optimizer = sgd(model, 0.0)
    with watched(model, optimizer) as scope:
        for seed in seeds:
            (forward or loss_of)(model, data(seed)).backward()
        optimizer.step()
    assert scope.records[0].labels("act_kurtosis") == scope.records[0].labels("act_rms")
    return scope.records[0]


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_shape_is_the_naive_one(reentrant: bool | None, seeds: tuple[int, ...]) -> None:
    model = Stack() if reentrant is None else Checkpointed()
    if reentrant is not None:
        model.reentrant = reentrant
    agree(step(model, seeds), states_of(model, seeds))


def test_the_headroom_of_fp64_is_a_number_whatever_adds_up() -> None:
    model = Stack().double()
    with torch.no_grad():
        model.embed.weight.mul_(9)  # else the largest number over an entry below 1 has no room either

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, (batch[0].double(), batch[1].double()))

    once, twice = step(model, (0,), forward), step(model, (0, 0), forward)
    assert np.isfinite(once["act_headroom"]).all()
    np.testing.assert_allclose(twice["act_headroom"], once["act_headroom"], rtol=1e-12)


def test_the_shape_of_a_compiled_model() -> None:
    torch.compiler.reset()
    model = Stack()
    states = states_of(model, (0, 1))
    call = torch.compile(model, backend="aot_eager")
    record = step(model, (0, 1), lambda _, batch: nn.functional.mse_loss(call(batch[0]), batch[1]))
    agree(record, states)
    torch.compiler.reset()


def test_a_compiled_model_is_looked_at_in_every_sample() -> None:
    torch.compiler.reset()
    model = Stack()
    optimizer = sgd(model, 0.0)
    with watched(model, optimizer, config={"seldom_every": 3}) as scope:
        call = torch.compile(model, backend="aot_eager")
        for _ in range(13):
            nn.functional.mse_loss(call(data(0)[0]), data(0)[1]).backward()
            optimizer.step()
    assert all("act_kurtosis" in record.metrics for record in scope.records)
    torch.compiler.reset()


class Massive(nn.Module):
    """Adds much to one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.size = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc(x)
        return out + self.size * nn.functional.one_hot(torch.tensor(5), 8).to(x.dtype)


def half(size: float) -> flowscope.Scope:
    """Six steps of an fp16 model whose block 2 adds `size` to channel 5."""
    model = nn.Sequential(*(Massive() for _ in range(4))).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer) as scope:
        for seed in range(6):
            model[2].size = size
            model(torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(seed)).half()).float().mean().backward()
            optimizer.step()
    return scope


def test_half_precision_close_to_its_end_is_an_alert_that_names_the_channel() -> None:
    scope = half(20000.0)
    (alert,) = [alert for alert in scope.alerts if alert.kind == "activation_headroom"]
    assert alert.where in ("2", "3")
    assert "channel 5 holds" in alert.message
    assert scope.records[0]["top_channel"][-1] == 5


def test_half_precision_far_from_its_end_is_none() -> None:
    assert not [alert for alert in half(200.0).alerts if alert.kind == "activation_headroom"]


# -- updates


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_the_rms_of_updates_is_that_of_the_change(make: Any) -> None:
    model = Stack()
    optimizer = make(model.parameters(), lr=0.01)
    with watched(model, optimizer) as scope:
        for seed in range(3):
            before = copy.deepcopy(model)
            optimizer.zero_grad()
            loss_of(model, data(seed)).backward()
            optimizer.step()
            pairs = zip(model.parameters(), before.parameters(), strict=True)
            truth = [float((new - old).detach().double().square().mean().sqrt()) for new, old in pairs]
            close_to(scope.records[-1]["update_rms"], truth, rtol=1e-4)
    record = scope.records[0]
    assert record.labels("update_rms") == [name for name, _ in model.named_parameters()]
    if make is torch.optim.AdamW:
        close_to(record["update_rms"] / 0.01, np.ones(len(truth)), rtol=0.05)


def test_large_parameters_are_sampled() -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with watched(model, optimizer) as scope:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 200)).square().mean().backward()
            before = model[0].weight.detach().clone()
            optimizer.step()
    change = float((model[0].weight.detach() - before).square().mean().sqrt())
    close_to(scope.records[-1]["update_rms"][:1], [change], rtol=0.1)


def test_two_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    torchrun("activation_ranks.py", str(tmp_path), limit=120)
    torch.manual_seed(0)
    model = Stack()
    states = states_of(model, (0, 1))
    before = copy.deepcopy(model)
    optimizer = sgd(model)
    (sum(loss_of(model, data(seed)) for seed in range(2)) / 2).backward()
    optimizer.step()
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    truth = [float((new - old).detach().double().square().mean().sqrt()) for new, old in pairs]
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        points = [naive(calls, torch.finfo(torch.float32).max) for calls in states]
        for name in NAMES:
            close_to(np.array(said[name], dtype=float), [point[name] for point in points], rtol=1e-5)
        close_to(np.array(said["update_rms"]), truth, rtol=1e-4)
