"""When findings become alerts: raised once, resolved once, again for a second fault; state, cost, faults of ours."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict

import numpy as np
import pytest
from detector_records import gradients, header, layout, play, record, slope, told

from flowscope.config import WatchConfig
from flowscope.detectors import Detector, DetectorSet, Finding

FAULT, HEALTHY = slope(1e-4), slope(0.9)


def test_raised_once_resolved_once_and_a_second_fault_raises_again():
    series = [*[HEALTHY] * 3, *[FAULT] * 20, *[HEALTHY] * 6, *[FAULT] * 4, *[HEALTHY] * 4]
    alerts = play(record(s, m) for s, m in enumerate(series))
    assert [(a.step, a.state) for a in alerts] == [(3, "raised"), (25, "resolved"), (29, "raised"), (35, "resolved")]
    assert alerts[0].since == 3
    assert alerts[1].where == alerts[0].where


def test_a_place_that_moves_is_no_new_alert():
    def at(block: int) -> dict:
        return gradients([1e-4 if i == block else 1.0 for i in range(6)])

    alerts = play(record(s, at(s % 6)) for s in range(30))
    assert told(alerts) == [("vanishing_gradient", "blocks.1", 1, "raised")]


def test_between_the_limit_and_its_release_an_alert_stands():
    near = slope(2e-3)  # above the limit of 1e-3, below its release at 3e-3
    alerts = play(record(s, m) for s, m in enumerate([FAULT, FAULT, *[near] * 50, *[slope(2e-2)] * 3]))
    assert [(a.step, a.state) for a in alerts] == [(1, "raised"), (54, "resolved")]
    assert play(record(s, near) for s in range(50)) == []


def test_a_record_that_cannot_tell_counts_for_nothing():
    series = [FAULT, {}, {}, FAULT, {}, {}, {}, {}, HEALTHY, {}, HEALTHY, {}, HEALTHY]
    alerts = play(record(s, m) for s, m in enumerate(series))
    assert [(a.step, a.since, a.state) for a in alerts] == [(3, 0, "raised"), (12, 0, "resolved")]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("centre", [0.8, 1.0, 1.3])
def test_noise_around_the_limit_does_not_flap(seed, centre):
    """1,000 records of 20 % noise around the limit: at most one raised; the release at 3e-3 is never reached."""
    rng = np.random.default_rng(seed)
    detectors, head = DetectorSet(WatchConfig()), header(layout(depth=3))
    flips = 0
    for step, noise in enumerate(np.exp(0.2 * rng.standard_normal(1000))):
        product = 1e-3 * centre * noise
        flips += len(detectors.check(record(step, slope(product, 3)), head))
    assert flips <= 1


def test_noise_around_the_limit_over_10000_records_raises_once():
    rng = np.random.default_rng(0)
    detectors, head = DetectorSet(WatchConfig()), header(layout("a", depth=3), layout("b", depth=3))
    alerts = []
    for step, noise in enumerate(np.exp(0.2 * rng.standard_normal(10_000))):
        tokens = {"token_cosine": [0.1, 0.5, 1 - 1e-3 * noise, 1 - 1e-3 * noise]}
        alerts += detectors.check(record(step, slope(1e-3 * noise, 3), others={"b": tokens}), head)
    assert sorted((a.kind, a.state) for a in alerts) == [("token_collapse", "raised"), ("vanishing_gradient", "raised")]


def mixed(step: int, rng: np.random.Generator) -> dict:
    """A run with every kind of trouble coming and going."""
    product = 10 ** rng.uniform(-5, 0.5) if (step // 15) % 2 else 0.9
    flow = dict(slope(product, last=10 ** rng.uniform(3, 5) if step // 40 == 1 else 1.0))
    flow["token_cosine"] = [0.1] * 4 + [0.99995 if (step // 20) % 2 else 0.7] * 3
    flow["nonfinite"] = [0, 0, 1, 1, 1, 1, 1] if step in (70, 71) else [0] * 7
    flow["cosine"], flow["cosine_to_input"] = [0.99] * 6, [1.0] + [0.5] * 6
    flow["effective_rank"] = [30, 20, 20, 20, 20, 20, 1.0 if step // 30 == 2 else 9.0]
    return flow


@pytest.mark.parametrize("cut", [3, 17, 46, 71, 90])
def test_a_set_that_loads_the_state_goes_on_exactly_alike(cut):
    rng = np.random.default_rng(1)
    series = [
        record(s, mixed(s, rng), canary=(0, 0, 0, 0), param_trainable=[1] * 5, param_grad_norm=[0.1] * 5,
               param_optimized=[1, 1, 1, 1, 1 if s % 50 < 25 else 0])
        for s in range(130)
    ]  # fmt: skip
    head, (whole, first, second) = header(), (DetectorSet(WatchConfig()) for _ in range(3))
    expected = [asdict(a) for item in series for a in whole.check(item, head)]
    assert len({(a["kind"], a["state"]) for a in expected}) >= 8
    told_first = [asdict(a) for item in series[:cut] for a in first.check(item, head)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert [asdict(a) for a in second.standing] == [asdict(a) for a in first.standing]
    assert told_first + [asdict(a) for item in series[cut:] for a in second.check(item, head)] == expected


def test_standing_lists_what_is_raised_and_not_resolved():
    detectors = DetectorSet(WatchConfig())
    for step, metrics in enumerate([FAULT, FAULT, HEALTHY]):
        detectors.check(record(step, metrics), header())
    assert [a.kind for a in detectors.standing] == ["vanishing_gradient"]
    for step in range(3, 8):
        detectors.check(record(step, HEALTHY), header())
    assert detectors.standing == []


def test_the_state_is_bounded_by_the_layout():
    rng = np.random.default_rng(2)
    detectors, sizes = DetectorSet(WatchConfig()), []
    for step in range(600):
        detectors.check(record(step, mixed(step % 120, rng)), header())
        sizes.append(len(json.dumps(detectors.state_dict())))
    assert max(sizes[300:]) <= 1.2 * max(sizes[100:300])


class Broken(Detector):
    kind = "broken"

    def findings(self, record, header):
        raise ZeroDivisionError("ours")


class Always(Detector):
    kind = "always"

    def findings(self, record, header):
        return [Finding(self.kind, "head", message="m", advice="a", records=3)]


def test_a_new_detector_is_one_class_and_a_broken_one_is_switched_off_alone(monkeypatch):
    monkeypatch.delenv("FLOWSCOPE_STRICT", raising=False)
    config = WatchConfig()
    detectors = DetectorSet(config, [Broken(config), Always(config)])
    alerts = [a for s in range(5) for a in detectors.check(record(s), header())]
    assert told(alerts) == [("always", "head", 2, "raised")]
    assert "ours" in detectors.faults.failed["detector broken"]


def test_strict_mode_raises_a_fault_of_ours(monkeypatch):
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    config = WatchConfig()
    with pytest.raises(ZeroDivisionError):
        DetectorSet(config, [Broken(config)]).check(record(0), header())


def test_records_without_any_metric_are_silent():
    assert play(record(s) for s in range(5)) == []


def test_cost_at_1024_blocks_is_printed(capsys):
    depth, rng = 1024, np.random.default_rng(0)
    head, detectors = header(layout(depth=depth)), DetectorSet(WatchConfig())
    n = 12 * depth
    flow = gradients(np.exp(0.01 * rng.standard_normal(depth))) | {
        name: np.zeros(depth + 1) for name in ("nonfinite", "nonfinite_grad")
    }
    flow |= {name: np.ones(depth + 1) for name in ("tracked_calls", "backward_calls")}
    flow |= {"cosine": rng.uniform(0.8, 0.9, depth), "cosine_to_input": np.linspace(1, 0.2, depth + 1)}
    flow |= {"token_cosine": rng.uniform(0.1, 0.5, depth + 1), "effective_rank": rng.uniform(20, 30, depth + 1)}
    ones = np.ones(n)
    item = record(0, flow, param_trainable=ones, param_grad_norm=ones, param_optimized=ones, param_norm=ones)
    times = []
    for step in range(60):
        item.step = step
        start = time.perf_counter()
        assert detectors.check(item, head) == []
        times.append(time.perf_counter() - start)
    with capsys.disabled():
        print(f"\ndetectors, {depth} blocks, {n} parameters: {1e3 * statistics.median(times):.2f} ms a record")
