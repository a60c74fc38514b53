"""A symptom of a run that learns is a note, of one that does not a warning; among several players it is a note."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from detector_records import PARAMETERS, header, play, record

from flowscope.config import WatchConfig
from flowscope.detectors import DetectorSet
from flowscope.records import Alert, Record

FALLS = 0.2 + 1.8 * np.exp(-np.arange(300) / 60)
STANDS = np.full(300, 2.0)
RISES = 2.0 + 0.005 * np.arange(300)
"""By less than a twentieth while they are few."""


def course(losses: np.ndarray, share: float = 0.8, **facts: list[float]) -> list[Record]:
    """A layer of which this share is saturated: a record of each of the first ten steps, then of every tenth."""
    out = []
    steps = [*range(10), *range(10, len(losses), 10)]
    for before, step in zip([-1, *steps], steps, strict=False):
        seen = losses[before + 1 : step + 1]
        item = record(step, loss=float(losses[step]), saturation=[share], step_losses=seen, **facts)
        item.metric_labels["saturation"] = ("blocks.0.act",)
        out.append(item)
    return out


def raised(alerts: list[Alert]) -> list[tuple[str, int, str]]:
    return [(a.kind, a.step, a.severity) for a in alerts if a.state == "raised"]


@pytest.mark.parametrize(
    ("losses", "severity"),
    [
        (FALLS, "info"),
        (STANDS, "warning"),
        (FALLS[::-1], "warning"),  # rises
        (np.concatenate([np.geomspace(2.0, 0.2, 100), np.full(200, 0.2)]), "info"),  # has learned, and keeps it
        (-STANDS, "warning"),
    ],
)
def test_a_symptom_is_a_note_while_the_loss_falls_or_has_fallen(losses: np.ndarray, severity: str) -> None:
    told = [(kind, how) for kind, _, how in raised(play(course(losses))) if kind == "saturation"]
    assert told[-1] == ("saturation", severity)
    assert severity == "warning" or len(told) == 1


MET = np.concatenate([np.geomspace(2.0, 1e-4, 150), np.full(150, 1e-4)])
"""A loss that was met by step 150; what it does later is added."""


@pytest.mark.parametrize(
    ("late", "rates", "severity"),
    [
        (2e-3, (1.0, 1.0), "info"),  # 1/1,000 of what was learned: a target that was copied
        (0.5, (1.0, 1.0), "warning"),
        (0.5, (0.1, 1.0), "info"),  # the schedule raised the rate again, and the loss with it
    ],
)
def test_a_rise_without_harm_is_none(late: float, rates: tuple[float, float], severity: str) -> None:
    losses = MET + np.where(np.arange(300) >= 270, late, 0.0)
    series = course(losses)
    for item in series:
        item.metrics["param_lr"] = np.full(len(PARAMETERS), rates[item.step >= 260])
    assert {how for kind, _, how in raised(play(series)) if kind == "saturation"} == {"info", severity}


def test_the_note_becomes_the_warning_when_what_was_learned_is_lost() -> None:
    losses = np.concatenate([np.geomspace(2.0, 0.2, 150), np.geomspace(0.2, 2.0, 150)])
    alerts = [a for a in play(course(losses)) if a.kind == "saturation"]
    assert [(a.severity, a.state) for a in alerts] == [("info", "raised"), ("info", "resolved"), ("warning", "raised")]
    assert 150 < alerts[-1].step < 300
    assert alerts[1].step == alerts[-1].step


def test_a_choice_among_classes_above_what_guessing_costs_is_no_progress() -> None:
    """From 8 to 3 while guessing among ten costs 2.3; the same losses of a regression are progress."""
    losses = 3.0 + 5.0 * np.exp(-np.arange(300) / 60)
    assert ("saturation", 30, "warning") in raised(play(course(losses, loss_classes=[10.0])))
    assert {how for _, _, how in raised(play(course(losses, loss_classes=[math.nan])))} == {"info"}


def test_among_several_players_a_signal_is_a_note_whatever_the_loss_does() -> None:
    assert {how for _, _, how in raised(play(course(RISES, other_losses=[1.0])))} <= {"info"}
    assert "warning" in {how for _, _, how in raised(play(course(RISES)))}


def test_a_fall_below_all_of_its_noise_is_progress_over_two_hundred_steps() -> None:
    """By 4 % over a high floor (the entropy of the images themselves): 60 noisy losses in a row may not show it."""
    noise = 0.02 * np.random.default_rng(3).standard_normal(300)
    told = {}
    falling = 2.0 - 3e-4 * np.arange(300) + noise
    for name, losses, classes in (
        ("falls", falling, math.nan),
        ("stands", 2.0 + noise, math.nan),
        ("chooses", falling, 9),
    ):
        series = course(losses, loss_classes=[classes])
        for item in series:
            item.metrics["saturation"] *= item.step >= 150
        told[name] = {(kind, how) for kind, _, how in raised(play(series))}
    assert told.pop("falls") == {("saturation", "info")}
    assert [("saturation", "warning") in alerts for alerts in told.values()] == [True, True]


@pytest.mark.parametrize(
    ("began", "losses", "severity"), [(1e-4, FALLS, "info"), (1e-4, STANDS, "warning"), (0.9, FALLS, "warning")]
)
def test_samples_that_were_never_apart_are_a_note_while_the_loss_falls(
    began: float, losses: np.ndarray, severity: str
) -> None:
    """A codebook of which one code is used at first; what came together under a loss that falls may fall by that."""
    series = course(losses, share=0.0)
    for item in series:
        last = 1 - (began if item.step < 3 else 1e-4)
        item.metrics["sample_cosine"] = np.array([0.2, 0.3, 0.3, 0.4, last, last, last])
    told = {(kind, how) for kind, _, how in raised(play(series))}
    assert told == {("representation_collapse", severity)}


def test_an_error_stays_an_error() -> None:
    """A layer that is dead entirely, however well the rest learns."""
    series = course(FALLS, share=0.0)
    for item in series:
        item.metrics["dead_fraction"] = np.array([1.0])
        item.metric_labels["dead_fraction"] = ("blocks.0.act",)
    assert raised(play(series)) == [("dead_units", 0, "error")]


@pytest.mark.parametrize(("losses", "severity"), [([3.0, 2.0, 1.0, 0.5, 0.4], "info"), ([3.0] * 5, "warning")])
def test_large_first_steps_are_a_note_where_the_loss_falls_at_once(losses: list[float], severity: str) -> None:
    """Weights of norm 1 that change by .5 a step: beyond a third, below all of it."""
    rows = [1.0] * len(PARAMETERS)
    facts = {"param_norm": rows, "param_grad_norm": rows, "update_ratio": [0.5 * row for row in rows]}
    assert raised(play(record(s, loss=loss, **facts) for s, loss in enumerate(losses))) == [
        ("update_too_large", 2, severity)
    ]


def test_what_a_scaler_keeps_from_the_optimizer_is_no_fault() -> None:
    """Nobody gave the scaler to watch: the steps it skipped overflowed, the one it took used finite gradients."""
    rows = [1.0] * len(PARAMETERS)
    bad = {"nonfinite_grad": [0.0] * 6 + [9.0]}
    taken = {"param_norm": rows, "param_grad_norm": rows, "gradient_scale": [65536.0]}
    assert play([record(0, bad, canary=(0, 0, 9, 0), **taken)]) == []
    between = record(1, canary=(0, 0, 9, 0), flags=("unsampled",))
    assert play([record(0, **taken), between]) == []
    unscaled = {"param_norm": rows, "param_grad_norm": rows}
    assert [a.kind for a in play([record(0, bad, canary=(0, 0, 9, 0), **unscaled)])] == ["non_finite"]
    used = taken | {"param_grad_norm": [math.inf] * len(rows)}
    assert [a.kind for a in play([record(0, bad, canary=(0, 0, 9, 0), **used)])] == ["non_finite"]
    assert [a.kind for a in play([record(0, **unscaled), between])] == ["non_finite"]


def test_a_set_that_loads_its_state_goes_on_as_before() -> None:
    series, first = course(FALLS), DetectorSet(WatchConfig())
    for item in series[:20]:
        first.check(item, header())
    second = DetectorSet(WatchConfig())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    flat = course(STANDS)[20:]
    told = [(a.kind, a.step, a.severity, a.state) for item in flat for a in first.check(item, header())]
    assert told == [(a.kind, a.step, a.severity, a.state) for item in flat for a in second.check(item, header())]
    assert ("saturation", "warning") in {(kind, severity) for kind, _, severity, _ in told}
