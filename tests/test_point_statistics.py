"""A stranger's number per depth: equal to a naive computation however the model is trained, and alone in its faults."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from point_statistics_program import NAMES, GradientMoment, Kurtosis, kurtosis_of, two_halves
from torch import Tensor, nn
from two_ranks import RANKS, without_launcher
from watch_models import Block, Checkpointed, Stack, data, loss_of, sgd, truth, watched

import flowscope
from flowscope.instruments import PointStatistic


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The instruments that the next scopes get beside their own."""
    instruments: list[Any] = [Kurtosis, GradientMoment]
    monkeypatch.setattr(sys.modules[__name__], "watched", partial(watched, instruments=instruments))
    return instruments


def step(model: nn.Module, batches: list[tuple[Tensor, Tensor]], runs: Any = None, **options: Any) -> flowscope.Record:
    optimizer = sgd(model)
    with watched(model, optimizer, **options) as scope:
        for batch in batches:
            loss_of(model if runs is None else runs, batch).backward()
        optimizer.step()
    return scope.records[0]


def points_of(model: Stack, batches: list[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
    """x_0 ... x_L of each batch."""
    out: list[list[Tensor]] = []
    for batch in batches:
        taps: list[Tensor] = []
        model(batch[0], taps)
        out.append([x.detach() for x in taps])
    return out


@pytest.mark.usefixtures("given", "strict")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_it_is_the_naive_number_over_all_micro_batches(micro_batches: int) -> None:
    model, batches = Stack(), [data(seed) for seed in range(micro_batches)]
    seen = points_of(model, batches)
    gradients = [truth(model, batch) for batch in batches]
    record = step(model, batches)
    np.testing.assert_allclose(record["my_kurtosis"], [kurtosis_of(*xs) for xs in zip(*seen, strict=True)], rtol=1e-9)
    moments = [torch.cat(list(gs)).abs().double().mean() for gs in zip(*gradients, strict=True)]
    np.testing.assert_allclose(record["grad_abs_mean"], moments, rtol=1e-5)
    assert record.labels("my_kurtosis") == record.labels("act_rms")
    spec = record.spec("my_kurtosis")
    assert (spec.scale, spec.words[:6], spec.rows, spec.view) == ("log", "Fourth", "points", "Depth")
    assert not spec.of_gradient
    assert record.spec("grad_abs_mean").of_gradient


@pytest.mark.usefixtures("given", "strict")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_count_once(reentrant: bool) -> None:
    model = Checkpointed()
    model.reentrant = reentrant
    plain = Stack()
    plain.load_state_dict(model.state_dict())
    expected, record = step(plain, [data()]), step(model, [data()])
    for name in ("my_kurtosis", "grad_abs_mean"):
        np.testing.assert_allclose(record[name], expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.usefixtures("given", "strict")
def test_half_precision_is_measured() -> None:
    model, (x, y) = Stack().bfloat16(), data()
    batch = x.bfloat16(), y.bfloat16()
    expected = [kurtosis_of(point) for point in points_of(model, [batch])[0]]
    record = step(model, [batch])
    np.testing.assert_allclose(record["my_kurtosis"], expected, rtol=1e-9)
    assert np.isfinite(record["grad_abs_mean"]).all()


class Loop(Stack):
    """The first block three times."""

    def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.head(x)


@pytest.mark.usefixtures("given", "strict")
def test_each_call_of_a_loop_has_its_own() -> None:
    model = Loop(1)
    expected = [model.embed(data()[0]).detach()]
    for _ in range(3):
        expected.append(model.blocks[0](expected[-1]).detach())
    record = step(model, [data()], flows=["blocks"])
    assert record.labels("my_kurtosis")[1:] == [f"blocks.0#{call}" for call in range(3)]
    np.testing.assert_allclose(record["my_kurtosis"], [kurtosis_of(x) for x in expected], rtol=1e-6)


def test_a_name_that_a_metric_bears_is_refused(given: list[Any]) -> None:
    class Taken(Kurtosis):
        name = "act_rms"

    given[:] = [Taken]
    with pytest.raises(flowscope.FlowscopeError, match="'act_rms' says something else of act_rms than flowscope does"):
        watched(Stack())


@pytest.mark.usefixtures("given", "strict")
def test_passes_without_gradient_do_not_count() -> None:
    model, batch = Stack(), data()
    expected = kurtosis_of(*points_of(model, [batch])[0][:1])
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        with torch.no_grad():
            model(100.0 * data(1)[0])
        loss_of(model, batch).backward()
        model.eval()
        with torch.no_grad():
            model(100.0 * data(2)[0])
        optimizer.step()
    np.testing.assert_allclose(scope.records[0]["my_kurtosis"][0], expected, rtol=1e-9)


@pytest.mark.usefixtures("given", "strict")
def test_compiled_numbers_are_the_eager_ones() -> None:
    torch._dynamo.reset()
    model = Stack(2)
    twin = Stack(2)
    twin.load_state_dict(model.state_dict())
    expected = step(twin, [data(), data(1)])
    record = step(model, [data(), data(1)], runs=torch.compile(model, backend="aot_eager"))
    for name in ("my_kurtosis", "grad_abs_mean", "act_rms"):
        np.testing.assert_allclose(record[name], expected[name], rtol=1e-5, err_msg=name)
    torch._dynamo.reset()


def test_a_fault_of_it_switches_off_it_alone(
    given: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FLOWSCOPE_STRICT", raising=False)
    whole = step(Stack(), [data()])

    class Wrong(Kurtosis):
        name = "wrong_shape"

        def sums(self, x: Tensor) -> Tensor:
            return x.sum((0, 1))

    class Raises(GradientMoment):
        name = "raises"

        def gradient_sums(self, gradient: Tensor) -> Tensor:
            raise ValueError("no")

    class Values(Kurtosis):
        name = "two_values"

        def values(self, rows: np.ndarray) -> np.ndarray:
            return rows[:2, 0]

    given[:] = [Wrong, Raises, Values, Kurtosis]
    torch.manual_seed(0)
    with caplog.at_level(logging.ERROR, logger="flowscope"):
        record = step(Stack(), [data()])
    assert set(whole.metrics) - set(record.metrics) == {"grad_abs_mean"}
    assert not {"wrong_shape", "raises", "two_values"} & set(record.metrics)
    messages = [line.getMessage() for line in caplog.records]
    assert "Wrong.look: got sums of shape (8,), expected (3,), one a column." in messages[0]
    assert any("raises failed and is switched off" in message for message in messages)
    assert any("Values.values: got shape (2,), expected (5,)" in message for message in messages)


def test_points_that_were_not_seen_are_nan(given: list[Any]) -> None:
    class Count(Kurtosis):
        name = "zeros"

        def values(self, rows: np.ndarray) -> np.ndarray:
            return np.zeros(len(rows))

    given[:] = [Count]

    class EarlyExit(Stack):
        def forward(self, x: Tensor, taps: list[Tensor] | None = None) -> Tensor:
            return self.head(self.blocks[1](self.blocks[0](self.embed(x))))

    record = step(EarlyExit(4), [data()], flows=["blocks"])
    np.testing.assert_array_equal(record["zeros"], [0.0, 0.0, 0.0, np.nan, np.nan])


def test_training_is_bitwise_the_same(given: list[Any]) -> None:
    def weights(*, watch: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = Stack(3, lambda: Block(p=0.5))
        optimizer = sgd(model)
        scope = watched(model, optimizer) if watch else None
        for k in range(3):
            optimizer.zero_grad()
            loss_of(model, data(k)).backward()
            optimizer.step()
        if scope is not None:
            scope.close()
        return [p.detach().clone() for p in model.parameters()]

    given[:] = [Kurtosis, GradientMoment]
    assert all(torch.equal(a, b) for a, b in zip(weights(watch=True), weights(watch=False), strict=True))


def test_what_is_no_statistic_is_refused() -> None:
    with pytest.raises(flowscope.FlowscopeError, match=r"Empty\.columns: got 0, expected how many sums"):

        class Empty(PointStatistic):
            name = "empty"


def test_two_ranks_add_up(tmp_path: Path) -> None:
    ended = without_launcher("point_statistics_program.py", str(tmp_path), limit=170)
    assert [code for code, _ in ended] == [0, 0], ended
    ranks = [np.load(tmp_path / f"{rank}.npz") for rank in RANKS]
    alone = two_halves()
    for name in NAMES:
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
        np.testing.assert_allclose(ranks[0][name], alone[name], rtol=1e-5, err_msg=name)
