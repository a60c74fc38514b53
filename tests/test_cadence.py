"""How often is sampled where the cost decides: the interval, what it is made of, and where it is told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from watch_models import Stack, sgd, train

import flowscope
from flowscope import meter
from flowscope.errors import FlowscopeError
from flowscope.integrations.trainer import BareWatch
from flowscope.meter import Cost, Meter, Pace
from flowscope.schedule import Cadence, make_schedule

pytestmark = pytest.mark.usefixtures("strict")


def steps_with(cadence: Cadence, cost: Cost, steps: int) -> list[int]:
    """The steps that are sampled where a sample costs that."""
    sampled = []
    for step in range(steps):
        if cadence(step):
            sampled.append(step)
            cadence.follow(cost, step)
    return sampled


def gaps(steps: list[int]) -> list[int]:
    return [key for key, _ in itertools.groupby(after - before for before, after in itertools.pairwise(steps))]


@pytest.mark.parametrize(
    ("sample", "light", "intervals"),
    [
        (0.0, 0.0, [1, 10]),
        (0.05, 0.0, [1, 10]),  # 5 ms of 100 in each tenth step: .5 %
        (0.15, 0.0, [1, 10, 20]),
        (0.3, 0.0, [1, 10, 20, 40]),
        (0.7, 0.0, [1, 10, 20, 40, 80]),
        (50.0, 0.0, [1, 10, 20, 40, 80]),
        (0.15, 0.0035, [1, 10, 20, 40]),
    ],
)
def test_the_interval_is_the_shortest_within_the_budget_and_80_at_most(
    sample: float, light: float, intervals: list[int]
) -> None:
    cost = Cost(sample * 0.1, light * 0.1, 0.1)
    cadence = Cadence()
    sampled = steps_with(cadence, cost, 10_000)
    assert sampled[:10] == [*range(10)]
    assert gaps(sampled) == intervals
    assert {*sampled} <= {*range(10), *range(0, 10_000, 10)}
    assert (
        intervals[-1] == 80 or cost.share(intervals[-1]) <= 0.01 < cost.share(intervals[-1] / 2) or intervals == [1, 10]
    )


def test_the_first_1000_steps_are_those_of_every_10_whatever_it_costs() -> None:
    sampled = steps_with(Cadence(), Cost(1.0, 1.0, 1e-3), 1001)
    assert sampled == [step for step in range(1001) if step < 10 or step % 10 == 0]


def test_a_longer_interval_is_taken_where_it_is_asked_for_and_given_back_where_it_got_cheaper() -> None:
    cadence = make_schedule(None, 0.001)
    assert isinstance(cadence, Cadence)
    assert gaps(steps_with(cadence, Cost(0.3, 0.0, 1.0), 40_000)) == [1, 10, 20, 40, 80, 160, 320]
    assert gaps(steps_with(cadence, Cost(0.05, 0.0, 1.0), 200_000)[10:]) == [320, 160, 80]


def test_both_of_them_and_no_share_are_refused() -> None:
    model = Stack()
    with pytest.raises(FlowscopeError, match="got both, expected one"):
        flowscope.watch(model, every=10, budget=0.01)
    for wrong in (0, 1.5, -0.1, True, "1%"):
        with pytest.raises(FlowscopeError, match=r"budget=\.\.\.\): got .*expected a share"):
            flowscope.watch(model, budget=wrong)


class Clock:
    """Time that goes by only as it is told to."""

    def __init__(self) -> None:
        self.now = 1

    def __call__(self) -> int:
        return self.now

    def work(self, milliseconds: float) -> None:
        self.now += round(1e6 * milliseconds)


@pytest.mark.parametrize("interval", [10, 20])
def test_what_a_sample_costs_is_told_from_what_every_step_costs(interval: int) -> None:
    clock, timed = Clock(), Meter()
    timed.clock, pace = clock, Pace(timed)
    for step in range(20 * interval):
        sampled = step % interval == 0
        clock.work(7)
        timed.time(timed.time, clock.work, 5 if sampled else 0.5)
        pace.step_ended(sampled=sampled)
        # the record of a sampled step is made in the step after it
        timed.time(clock.work, 3 if sampled else 0)
    cost = pace.cost()
    assert cost is not None
    dispatch = 2 * meter.DISPATCH / 1e9
    assert cost.bare == pytest.approx(7e-3, abs=1e-5)
    assert cost.light == pytest.approx(5e-4 + dispatch, rel=0.01)
    assert cost.sample == pytest.approx(8e-3 + dispatch, rel=0.01)
    assert cost.share(10) == pytest.approx((0.8 + 0.5) / 7, rel=0.02)


def test_a_scope_follows_the_cost_and_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # each look at the clock takes 10 us: a sampled step has more of them, and a step has no other time
    ticks = itertools.count(1, 10_000)
    monkeypatch.setattr(meter, "thread_time_ns", lambda: next(ticks))
    model = Stack(1)
    optimizer = sgd(model)
    with flowscope.watch(model, optimizer, log_dir=tmp_path, config={"console": "off"}) as scope:
        train(scope, model, optimizer, 1085)
        assert gaps([record.step for record in scope.records]) == [1, 10, 20]
        summary = scope.summary()
    assert "after the first steps each 20th is sampled, and the budget of 1.00% is missed" in summary
    lines = [json.loads(line) for line in (tmp_path / "flowscope.jsonl").read_text().splitlines()]
    told = [line["cost"] for line in lines if line["type"] == "run"]
    assert told[0] == {}
    assert [cost["interval"] for cost in told if "interval" in cost][-2:] == [20, 20]
    last = flowscope.read_run(tmp_path).header.cost
    assert last == told[-1]
    assert last["share"] == pytest.approx((last["sample"] / 20 + last["light_step"]) / last["bare_step"], rel=0.02)
    assert 0 < last["first_steps"] < 1


def test_a_fixed_cadence_tells_its_cost_too_and_keeps_to_itself() -> None:
    model = Stack(1)
    optimizer = sgd(model)
    with flowscope.watch(model, optimizer, every=4, config={"console": "off"}) as scope:
        train(scope, model, optimizer, 60)
        cost = scope.run.header.cost
        assert f"  cost: {cost['share']:.2%} of a step of " in scope.summary()
    assert gaps([record.step for record in scope.records])[1:] in ([2, 4], [4], [3, 4])
    assert cost.keys() == {"first_steps", "sample", "light_step", "bare_step", "share"}
    assert all(value > 0 for value in cost.values())


def test_callbacks_follow_the_cost_too() -> None:
    class Watch(BareWatch):
        """Of a trainer of its own."""

    for given, follows in (({}, True), ({"budget": 0.02}, True), ({"every": 5}, False)):
        watch = Watch(**given, config={"console": "off"})
        watch._begin(model := Stack(1), sgd(model))
        assert watch.scope is not None
        assert isinstance(watch.scope._driver.count._schedule, Cadence) == follows
        watch._end()
