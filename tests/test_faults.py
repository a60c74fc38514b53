"""The labelled runs (`benchmarks/faults`): scoring, the peers' rules on hand-made numbers, some runs, the trace."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.faults import catalogue, rules, trace
from benchmarks.faults.case import Draw
from benchmarks.faults.numbers_seen import Layer, Probe, Weight
from benchmarks.faults.runner import plain, replay, run_case
from benchmarks.faults.scoring import add_up, judge


def run(alarms, *, score="faulty", kinds=("a",), place=None, first=0, wrong=None):
    return {
        "case": "Q", "family": "q", "score": score, "kinds": list(kinds), "place": place, "first": first, "seed": 0,
        "variation": None, "wrong": wrong, "alarms": {"flowscope": alarms},
    }  # fmt: skip


FAULTY = [
    run([[7, "a", "blocks.2", "error"]], place=r"blocks\.2"),  # all right, delay 7
    run([[40, "a", "blocks.1", "warning"]], place=r"blocks\.2", first=30),  # wrong place, delay 10
    run([[12, "b", "blocks.2", "warning"], [20, "a", "", "warning"]]),  # accepted kind second: delay 20
    run([[3, "b", "", "error"]], place=r".*"),  # wrong kind, so no place
    run([[5, "a", "", "info"]]),  # info is silence
    run([[5, "a", "", "error"]], first=10),  # before the fault: early, not found
]
HEALTHY = [
    run([], score="healthy", kinds=()),
    run([[1, "x", "", "info"]], score="healthy", kinds=()),
    run([[1, "x", "", "warning"]], score="healthy", kinds=()),
]


def test_scoring_of_hand_made_runs():
    left_out = [run([], score="apart"), run([[1, "a", "", "error"]], wrong="it learned")]
    score = add_up(FAULTY + HEALTHY + left_out)
    assert (score.faulty, score.alerted, score.kind, score.early) == (6, 4, 3, 1)
    assert (score.placeable, score.placed) == (3, 1)
    assert (score.healthy, score.false) == (3, 1)
    assert score.delays == (7, 10, 20, 3)
    assert score.median_delay == 8.5
    assert score.recall == pytest.approx(4 / 6)
    assert score.right_kind == pytest.approx(3 / 6)
    assert score.right_place == pytest.approx(1 / 3)
    assert score.precision == pytest.approx(4 / 5)


def test_a_place_is_matched_whole_and_without_call_numbers():
    timed = run([[0, "a", "rnn#20", "error"]], place="rnn")
    assert judge(timed).placed
    assert not judge({**timed, "place": "rn"}).placed


def weight(name, grad, **others):
    numbers = {"norm": 1.0, "largest": 0.5, "variance": 0.01, "finite": True, "tiny": 0.0, "update": 1e-3}
    grads = {"grad_norm": grad, "grad_mean": grad / 10, "grad_zero": 0.0, "grad_spread": grad}
    return Weight(name, True, **{**numbers, **grads, **others})


def layer(name, **others):
    numbers = {"dead": 0.0, "inactive": 0.0, "nonpositive": 0.5, "saturated": 0.0, "saturated5": 0.0}
    return Layer(name, "ReLU", **{**numbers, "mean": 0.4, "magnitude": 0.4, "std": 0.6, "finite": True, **others})


def probes(make, losses=None, accuracy=0.3):
    losses = losses or [2.0 * 0.8**k for k in range(12)]
    return [Probe(10 * k, loss, accuracy, *make(k)) for k, loss in enumerate(losses)]


def healthy(k):
    return [weight("0", 0.3), weight("2", 0.4)], [layer("1")]


def told(name, seen):
    return {(kind, where): step for step, kind, where in rules.apply(name, seen, 120, 22)}


def test_the_rules_are_silent_on_healthy_numbers():
    seen = probes(healthy)
    for k, probe in enumerate(seen):
        probe.accuracy = min(0.95, 0.2 + 0.1 * k)
    assert {name: told(name, seen) for name in rules.RULES} == {name: {} for name in rules.RULES}


def test_each_rule_finds_what_its_source_says():
    vanished = probes(lambda k: ([weight("0", 1e-8), weight("2", 0.4)], [layer("1")]))
    assert told("SageMaker Debugger without LossNotDecreasing", vanished) == {("vanishing_gradient", "0"): 0}
    assert told("AUTOTRAINER", vanished)[("vanishing_gradient", "0")] == 40  # after 30 % of 120 steps
    dead = probes(lambda k: (healthy(k)[0], [layer("1", dead=0.9, inactive=0.9, nonpositive=1.0)]))
    for name in ("SageMaker Debugger", "DeepDiagnosis", "TheDeepChecker"):
        assert told(name, dead)[("dead_units", "1")] == 0
    flat = probes(healthy, losses=[2.0] * 12)
    assert told("SageMaker Debugger", flat) == {("loss_plateau", ""): 10}
    assert told("TheDeepChecker", flat) == {("loss_plateau", ""): 50}
    jump = probes(lambda k: ([weight("0", 40.0 if k == 7 else 0.3)], []))
    assert told("NaN or 10 x gradient norm", jump) == {("exploding_gradient", ""): 70}
    nan = probes(healthy, losses=[2.0, 1.9, math.nan])
    assert all(("non_finite", "") in told(name, nan) for name in rules.RULES)


def test_draws_are_listed_values_or_repeatable_ones():
    def taken(draw):
        return draw.pick("depth", 6, 4, 8), draw.factor("lr", 1e-3, 2), draw.step("at", 50, 20, 70)

    assert taken(Draw(3)) == (6, 1e-3, 50)
    varied = [taken(Draw(0, number, case="T01")) for number in range(1, 60)]
    assert varied == [taken(Draw(0, number, case="T01")) for number in range(1, 60)]
    assert {depth for depth, _, _ in varied} == {4, 6, 8}
    assert all(5e-4 <= rate <= 2e-3 for _, rate, _ in varied)
    assert all(step % 10 and 20 <= step <= 71 for _, _, step in varied)


def test_the_catalogue_has_a_name_each_and_twenty_variations_a_family():
    names = [case.id for case in catalogue.CASES]
    assert len(names) == len(set(names))
    assert all(bool(case.kinds) == (case.score != "healthy") for case in catalogue.CASES)
    drawn = catalogue.variations(catalogue.CASES, catalogue.VARIATIONS)
    families = {case.family for case in catalogue.CASES if case.ranks == 1}
    assert {family: sum(case.family == family for case, _ in drawn) for family in families} == dict.fromkeys(
        families, 20
    )


HANDFUL = {
    "F04": 30,  # vanishing
    "F19": 30,  # dead units
    "F14": 160,  # a NaN at step 150
    "F42": 40,  # over-clipped
    "F33": 20,  # detached
    "W04": 8,  # gates in no optimizer
    "T10": 8,  # amplifying hyper-connections
}


@pytest.mark.parametrize("name", HANDFUL)
def test_a_faulty_run_is_told_with_its_kind_and_place(name, monkeypatch, tmp_path):
    case = next(case for case in catalogue.CASES if case.id == name)
    shorten(monkeypatch, HANDFUL[name])
    result = run_case(case, Draw(0), root=tmp_path)
    verdict = judge(result)
    assert verdict.kind, result["alarms"]["flowscope"]
    assert verdict.placed is not False, (result["place"], result["alarms"]["flowscope"])
    assert not verdict.early


@pytest.mark.parametrize("name", ["H01", "H18", "T94"])
def test_a_healthy_run_is_silent(name, monkeypatch, tmp_path):
    case = next(case for case in catalogue.CASES if case.id == name)
    shorten(monkeypatch, 40)
    result = run_case(case, Draw(0), root=tmp_path)
    assert not judge(result).alerted, result["alarms"]["flowscope"]


def shorten(monkeypatch, steps):
    """Trains for fewer steps: where a fault is there from the start, its alert is too."""
    from benchmarks.faults import runner

    train = runner.train

    def shortened(program, folder):
        program.steps = min(program.steps, steps)
        return train(program, folder)

    monkeypatch.setattr(runner, "train", shortened)


def test_kept_records_raise_the_alarms_of_the_run_itself(monkeypatch, tmp_path):
    shorten(monkeypatch, 30)
    case = next(case for case in catalogue.CASES if case.id == "F04")
    result = run_case(case, Draw(0), root=tmp_path)
    assert result["alarms"]["flowscope"]
    again = replay(result, tmp_path / "F04" / "seed0")
    assert again["alarms"]["flowscope"] == result["alarms"]["flowscope"]
    assert run_case(case, Draw(0), root=tmp_path) == result  # read, not trained again


def test_the_published_trace_is_told_before_its_loss_jumps():
    alerts = [alarm for alarm in plain(trace.replay()) if alarm[3] in ("warning", "error")]
    first = alerts[0]
    assert trace.MOVES <= first[0] <= 31217 < trace.LOSS_JUMPS
    assert first[1] in ("exploding_gradient", "loss_spike", "update_too_large")
    header, records = trace.records()
    assert len(records) > 100
    assert np.isclose(records[-1].loss, 2.236)
    assert header.flows
