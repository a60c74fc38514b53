"""update_too_small, update_too_large, over_clipped, stale_parameters, gradient_accumulates on records made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from detector_records import PARAMETERS, header, play, record, told

from flowscope.config import WatchConfig
from flowscope.detectors.updates import OverClipped, UpdateTooLarge, UpdateTooSmall
from flowscope.records import Record

NAN = float("nan")
NORMS = [10.0, 5.0, 2.0, 8.0, 3.0]


def updates(
    step: int,
    ratio: float | Sequence[float],
    *,
    rate: float | Sequence[float] = 0.1,
    norms: Sequence[float] = NORMS,
    gradients: Sequence[float] = (0.5, 0.4, 0.3, 0.2, 0.1),
    **more: Iterable[float],
) -> Record:
    """A record in which five parameters change by `ratio` of their norms."""
    ratios, rates = (list(v) if isinstance(v, Sequence) else [v] * 5 for v in (ratio, rate))
    known = {"param_trainable": [1] * 5, "param_optimized": [1] * 5, "param_lr": rates, "update_ratio": ratios}
    return record(step, param_norm=norms, param_grad_norm=gradients, **{**known, **more})


# -- update_too_small -------------------------------------------------------------------------------------------------


def test_updates_that_never_move_are_told_at_the_tenth_record_and_name_the_least():
    alerts = play(updates(s, [5e-7, 4e-7, 6e-7, 2e-7, 5e-7]) for s in range(30))
    assert told(alerts) == [("update_too_small", PARAMETERS[3], 9, "raised")]
    # sqrt(sum (w u)^2 / sum w^2) = sqrt((25 + 4 + 1.44 + 2.56 + 2.25)e-12 / 202)
    assert alerts[0].value == pytest.approx(np.sqrt(35.25e-12 / 202), rel=1e-6)
    assert "raise the learning rate" in alerts[0].advice


@pytest.mark.parametrize(
    "series",
    [
        [updates(s, 1e-7 * (s + 1), rate=1e-5 * (s + 1)) for s in range(60)],  # warm-up from zero
        [updates(s, 1e-3 * 0.5**s, rate=0.1 * 0.5**s) for s in range(60)],  # decay to zero
        [updates(s, 1e-3 * 0.5**s) for s in range(60)],  # converged
        [updates(s, 1e-7, rate=0.0) for s in range(60)],  # a group at rate 0
        [updates(s, 1e-7, gradients=[0.0] * 5) for s in range(60)],  # no gradient: another fault
        [updates(s, 1e-7, gradients=[NAN] * 5, param_trainable=[0] * 5) for s in range(60)],  # frozen
        [updates(s, 1e-7, norms=[0.0] * 5 if s == 0 else [1e-6] * 5) for s in range(60)],  # began at zero
        [updates(s, [1e-9, 3e-3, 3e-3, 3e-3, 3e-3], norms=[1e5, 5, 2, 8, 3]) for s in range(60)],  # a huge embedding
        [record(s) for s in range(60)],
    ],
)
def test_small_updates_that_have_a_reason_are_silent(series):
    assert [a for a in play(series) if a.kind == "update_too_small"] == []


def test_updates_that_begin_to_move_resolve_it():
    series = [updates(s, 1e-7) for s in range(12)] + [updates(s, 1e-3) for s in range(12, 20)]
    assert [(a.step, a.state) for a in play(series)] == [(9, "raised"), (14, "resolved")]


def test_updates_near_the_limit_keep_the_alert_and_raise_none():
    series = [updates(s, 1e-7) for s in range(12)] + [updates(s, 5e-6) for s in range(12, 60)]
    assert [(a.step, a.state) for a in play(series)] == [(9, "raised")]
    assert play(updates(s, 5e-6) for s in range(60)) == []


def lost(step: int, same: float, epsilon: float = 2**-7, **more: Iterable[float]) -> Record:
    return updates(step, 1e-4, param_unchanged=[same] * 5, param_epsilon=[epsilon] * 5, **more)


def test_weights_that_never_move_for_rounding_are_one_alert():
    series = [updates(s, 1e-7, param_unchanged=[0.97] * 5, param_epsilon=[2**-7] * 5) for s in range(12)]
    (alert,) = play(series)
    assert alert.message.startswith("the step leaves 97 %")


def test_sixteen_bit_weights_that_swallow_their_updates_are_told():
    (alert,) = play(lost(s, 0.97) for s in range(30))
    assert (alert.kind, alert.step, alert.value) == ("update_too_small", 9, 0.97)
    assert "autocast" in alert.advice


@pytest.mark.parametrize(
    "series",
    [
        [lost(s, 0.97, 2**-23) for s in range(30)],  # float32: rows without gradient stay as they are
        [lost(s, 0.6) for s in range(30)],
        [lost(s, 0.97, param_is_norm=[1] * 5) for s in range(30)],
        [updates(s, 0.1, param_unchanged=[0.97] * 5, param_epsilon=[2**-7] * 5) for s in range(30)],  # sparse rows
    ],
)
def test_entries_that_stay_for_another_reason_are_silent(series):
    assert play(series) == []


# -- update_too_large -------------------------------------------------------------------------------------------------


def test_a_step_that_replaces_the_weights_is_an_error_at_once():
    (alert,) = play(updates(s, [2.0, 1.0, 1.0, 1.0, 1.0]) for s in range(5))
    assert (alert.kind, alert.step, alert.severity, alert.where) == ("update_too_large", 0, "error", PARAMETERS[0])
    assert "0.1" in alert.message  # the learning rate


def test_an_optimizer_that_looks_where_it_steps_may_overshoot_once():
    """LBFGS evaluates the model itself: one step is no verdict, three are."""
    once = [updates(s, 1.5 if s == 4 else 0.01, step_evaluations=[4.0]) for s in range(9)]
    assert play(once) == []
    assert told(play(updates(s, 1.5 if s >= 4 else 0.01, step_evaluations=[4.0]) for s in range(9))) == [
        ("update_too_large", PARAMETERS[0], 6, "raised")
    ]


def test_one_tensor_that_keeps_doubling_is_told_at_the_third_record():
    alerts = play(updates(s, [0.01, 0.01, 1.5, 0.01, 0.01]) for s in range(8))
    assert told(alerts) == [("update_too_large", PARAMETERS[2], 2, "raised")]
    assert (alerts[0].severity, alerts[0].value) == ("warning", 1.5)


@pytest.mark.parametrize(
    "series",
    [
        # a bias that begins at zero: its change is 1, 1/2, 1/3 of it
        [updates(s, [0.01] * 4 + [1 / max(s, 1)], norms=[*NORMS[:4], 0.01 * s]) for s in range(20)],
        # a layer scale that begins at 1e-6
        [updates(s, [0.01] * 4 + [1e3 if s == 0 else 1 / s], norms=[*NORMS[:4], 1e-6 + 1e-3 * s]) for s in range(20)],
        # a gate that crosses zero: small norms, changes like before
        [updates(s, [0.01] * 4 + [0.1 / abs(1 - 0.1 * s + 1e-3)], norms=[*NORMS[:4], abs(1 - 0.1 * s + 1e-3)])
         for s in range(20)],
        [updates(s, 0.3 / (1 + s)) for s in range(20)],  # first steps of Adam
    ],
)  # fmt: skip
def test_growth_out_of_nothing_and_first_steps_are_silent(series):
    assert [a for a in play(series) if a.kind == "update_too_large"] == []


def test_between_a_third_of_the_limit_and_the_limit_it_stands():
    def one(s: int, value: float) -> Record:
        return updates(s, [0.01, 0.01, value, 0.01, 0.01])

    series = (
        [one(s, 1.5) for s in range(4)] + [one(s, 0.5) for s in range(4, 30)] + [one(s, 0.1) for s in range(30, 40)]
    )
    assert [(a.step, a.state) for a in play(series)] == [(2, "raised"), (32, "resolved")]


# -- over_clipped -----------------------------------------------------------------------------------------------------


def clipped(step: int, ratio: float, moved: float, rate: float = 0.1) -> Record:
    return updates(step, moved, rate=rate, clip_ratio=[ratio])


def test_clipping_that_leaves_nothing_is_told_and_explains_small_updates():
    (alert,) = play(clipped(s, 1e-4, 1e-7) for s in range(40))
    assert (alert.kind, alert.where, alert.step, alert.value) == ("over_clipped", "", 9, 1e-4)
    # the total gradient norm is sqrt(.25 + .16 + .09 + .04 + .01) = .742, before clipping .742 / 1e-4
    assert "7.4e+03" in alert.advice


@pytest.mark.parametrize(
    "series",
    [
        [clipped(s, min(1.0, 0.02 * 1.2**s), 1e-3) for s in range(40)],  # a healthy run clipped at 1 in its first steps
        [clipped(s, 0.002, 1e-3) for s in range(40)],  # a summed loss, clipped for good, that learns
        [clipped(s, 0.002, 1e-3 * 0.7**s, rate=0.1 * 0.7**s) for s in range(40)],  # and decays to zero
        [clipped(s, NAN, 1e-3) for s in range(40)],
    ],
)
def test_clipping_that_leaves_enough_is_silent(series):
    assert play(series) == []


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [UpdateTooSmall, UpdateTooLarge, OverClipped])
def test_a_detector_that_loads_the_state_goes_on_alike(kind):
    rng = np.random.default_rng(3)
    series = [
        updates(s, 10 ** rng.uniform(-7, 1), rate=10 ** rng.uniform(-3, -2), clip_ratio=[10 ** rng.uniform(-4, 0)],
                norms=[10 ** rng.uniform(-1, 1), *NORMS[1:]])
        for s in range(60)
    ]  # fmt: skip
    first, second = kind(WatchConfig()), kind(WatchConfig())
    for item in series[:30]:
        [*first.findings(item, header())]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for item in series[30:]:
        assert [*first.findings(item, header())] == [*second.findings(item, header())]


# -- stale_parameters, gradient_accumulates ---------------------------------------------------------------------------


def test_an_optimizer_of_other_tensors_is_an_error_at_once_and_the_only_alert():
    (alert,) = play(updates(s, 0.0, param_optimized=[0] * 5) for s in range(20))
    assert told([alert]) == [("stale_parameters", "embed", 0, "raised")]
    assert alert.severity == "error"
    assert "model.parameters()" in alert.advice


def test_weights_that_stay_exactly_as_they_are_are_told_at_the_third_record():
    (alert,) = play(updates(s, 0.0, param_unchanged=[1] * 5) for s in range(20))
    assert told([alert]) == [("stale_parameters", "embed", 2, "raised")]


@pytest.mark.parametrize(
    "series",
    [
        [updates(s, [0.0, 0.0, 0.0, 0.0, 1e-3], param_unchanged=[1, 1, 1, 1, 0.5]) for s in range(9)],
        [updates(s, 0.0, rate=0.0, param_unchanged=[1] * 5) for s in range(9)],  # the rate is zero
        [updates(s, 0.0, rate=1e-9, param_unchanged=[1] * 5) for s in range(9)],  # rounding may hide it
        [updates(s, 0.0, gradients=[0.0] * 5, param_unchanged=[1] * 5) for s in range(9)],
        [updates(s, 1e-3, param_optimized=[NAN] * 5) for s in range(9)],
    ],
)
def test_weights_that_stay_for_a_reason_are_no_stale_ones(series):
    assert [a for a in play(series) if a.kind == "stale_parameters"] == []


@pytest.mark.parametrize(("gradient", "alerts"), [(0.009, 0), (0.5, 1)])
def test_weights_that_moved_and_stand_still_have_converged_where_the_gradient_is_gone(gradient, alerts):
    moving = [updates(s, 1e-3, gradients=[1.0] * 5, param_unchanged=[0.0] * 5) for s in range(4)]
    still = [updates(s, 0.0, gradients=[gradient] * 5, param_unchanged=[1.0] * 5) for s in range(4, 12)]
    assert len([a for a in play(moving + still) if a.kind == "stale_parameters"]) == alerts


def test_gradients_of_earlier_steps_are_told_on_two_records():
    (alert,) = play(updates(s, 1e-3, grad_carried=[0.0 if s == 0 else 0.7]) for s in range(9))
    assert told([alert]) == [("gradient_accumulates", "", 2, "raised")]
    assert "zero_grad" in alert.advice


@pytest.mark.parametrize("carried", [0.0, NAN, 0.05])
def test_a_step_that_begins_with_nothing_is_silent(carried):
    assert play(updates(s, 1e-3, grad_carried=[carried]) for s in range(9)) == []
