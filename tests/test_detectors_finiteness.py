"""non_finite: the first bad tensor in the order of execution, and silence for everything it explains."""

from __future__ import annotations

import pytest
from detector_records import gradients, header, layout, play, record, slope, told

from flowscope.config import WatchConfig
from flowscope.detectors import DETECTORS

INF, NAN = float("inf"), float("nan")
CLEAN = [0.0] * 7


def finite(nonfinite: list[float] = CLEAN, nonfinite_grad: list[float] = CLEAN) -> dict:
    return {"nonfinite": nonfinite, "nonfinite_grad": nonfinite_grad}


def only(alerts):
    (alert,) = alerts
    assert alert.kind == "non_finite"
    assert alert.severity == "error"
    return alert


def test_a_healthy_run_is_silent():
    assert play(record(s, finite(), param_norm=[1.0] * 5, param_grad_norm=[0.1] * 5) for s in range(5)) == []


def test_an_input_comes_before_all_it_spoils():
    bad = record(7, finite([7] * 7, [7] * 7), canary=(3, 7, 7, 1), loss=NAN, param_grad_norm=[INF] * 5)
    alert = only(play([bad]))
    assert (alert.where, alert.step, alert.value) == ("", 7, 3)
    assert "input" in alert.message


def test_a_bad_weight_comes_before_the_activation_it_spoils():
    bad = record(
        7, finite([0, 0, 4, 4, 4, 4, 4], [7] * 7), loss=NAN, param_norm=[1, 1, 1, INF, 1], param_grad_norm=[INF] * 5
    )
    alert = only(play([bad]))
    assert alert.where == "blocks.1.fc"
    assert "the weight blocks.1.fc.weight" in alert.message


def test_weights_that_went_bad_with_their_gradients_are_no_cause():
    bad = record(7, finite([0, 0, 4, 4, 4, 4, 4]), loss=NAN, param_norm=[INF] * 5, param_grad_norm=[INF] * 5)
    assert only(play([bad])).where == "blocks.1"


def test_the_first_activation_by_depth_is_named_with_its_count():
    alert = only(play([record(0, finite([0, 0, 0, 15, 40, 40, 40], [40] * 7), canary=(0, 40, 9, 1), loss=NAN)]))
    assert (alert.where, alert.value) == ("blocks.2", 15)
    assert "activation of blocks.2" in alert.message
    assert "eps" in alert.advice


def test_what_a_block_returns_beside_the_hidden_state_counts_where_the_loss_is_bad():
    """A log-determinant; a score that is masked with -inf on purpose spoils nothing."""
    beside = {"nonfinite_beside": [0, 0, 3, 3, 0, 0, 0]}
    alert = only(play([record(0, finite() | beside, canary=(0, 0, 9, 1), loss=NAN)]))
    assert (alert.where, alert.value) == ("blocks.1", 3)
    assert "beside the hidden state" in alert.message
    alert = only(play([record(0, finite([0, 0, 0, 9, 9, 9, 9]) | beside, canary=(0, 9, 9, 1), loss=NAN)]))
    assert alert.where == "blocks.2"
    assert play([record(0, finite() | beside, loss=0.5, param_norm=[1.0] * 5, param_grad_norm=[0.1] * 5)]) == []


def test_the_first_flow_that_is_bad_is_named():
    flows = header(layout("encoder"), layout("decoder"))
    bad = record(0, finite(), others={"decoder": finite([0, 5, 5, 5, 5, 5, 5])}, loss=NAN)
    assert only(play([bad], flows)).where == "decoder.0"


@pytest.mark.parametrize(("loss", "canary"), [(NAN, (0, 0, 0, 0)), (None, (0, 0, 0, 2))])
def test_a_loss_comes_after_activations_and_before_gradients(loss, canary):
    alert = only(play([record(0, finite(CLEAN, [9] * 7), loss=loss, canary=canary)]))
    assert alert.where == ""
    assert "loss" in alert.message
    assert "logits" in alert.advice


def test_a_gradient_is_named_from_the_last_point_back():
    # x_4's gradient is clean and x_3's is not: the block between them, blocks.3, made it
    alert = only(play([record(0, finite(CLEAN, [9, 9, 9, 2, 0, 0, 0]), param_grad_norm=[INF, INF, INF, INF, 1])]))
    assert (alert.where, alert.value) == ("blocks.3", 2)
    assert only(play([record(0, finite(CLEAN, [9] * 7))])).where == "blocks.5"


def test_a_parameter_gradient_is_named_last():
    alert = only(play([record(0, finite(), param_grad_norm=[0.1, 0.1, 0.1, INF, INF])]))
    assert alert.where == "blocks.1.fc"
    assert "blocks.1.fc.weight" in alert.message


@pytest.mark.parametrize(
    ("canary", "word"),
    [((2, 9, 9, 1), "input"), ((0, 9, 9, 1), "forward"), ((0, 0, 9, 1), "loss"), ((0, 0, 9, 0), "backward")],
)
def test_an_unsampled_step_names_the_part_the_steps_and_what_pinpoints_it(canary, word):
    alert = only(play([record(20, finite()), record(27, flags=("unsampled",), canary=canary, loss=None)]))
    assert word in alert.message
    assert "steps 21 to 27" in alert.message
    assert "every=1" in alert.advice


def test_infinities_in_an_input_alone_are_a_mask():
    masked = [record(s, finite(), canary=(50, 0, 0, 0)) for s in range(5)]
    assert play(masked) == []
    bad = record(5, finite([0, 3, 3, 3, 3, 3, 3]), canary=(50, 3, 3, 1), loss=NAN)
    assert only(play([*masked, bad])).where == "blocks.0"  # and they are no cause later


def test_a_mask_kept_as_a_frozen_parameter_is_no_cause():
    masked = record(
        0, finite(), param_norm=[1, INF, 1, 1, 1], param_trainable=[1, 0, 1, 1, 1], param_grad_norm=[0.1] * 5
    )
    assert [alert for alert in play([masked]) if alert.kind == "non_finite"] == []


@pytest.mark.parametrize("flag", ["skipped", "possibly_skipped"])
def test_a_step_that_the_scaler_skipped_says_nothing(flag):
    bad = finite(CLEAN, [9] * 7) | {"gradient_product": [1e-9] * 6 + [1.0]}
    assert play(record(s, bad, flags=(flag,), canary=(0, 0, 9, 0), param_grad_norm=[INF] * 5) for s in range(5)) == []


def test_it_silences_all_other_kinds_at_its_record_and_while_it_stands():
    ruin = gradients([1e-3] * 6) | finite([0, 0, 1, 1, 1, 1, 1])
    ruin |= {"token_cosine": [0.0] + [1.0] * 6, "tracked_calls": [1] * 7, "backward_calls": [0, 0, 1, 1, 1, 1, 1]}
    left_out = {"param_trainable": [1] * 5, "param_grad_norm": [NAN, 1, 1, 1, 1], "param_optimized": [0] * 4 + [1]}
    alone = play(record(s, ruin | finite(), **left_out) for s in range(3))
    assert {a.kind for a in alone} == {"no_gradient", "token_collapse", "parameters_not_optimized"}
    alerts = play(record(s, ruin if s % 2 else ruin | finite(), **left_out) for s in range(1, 12))
    assert told(alerts) == [("non_finite", "blocks.1", 1, "raised")]


def test_after_it_resolves_the_others_speak_again():
    healthy, bad = finite() | slope(1.0), finite([0, 0, 1, 1, 1, 1, 1])
    series = [healthy, bad, healthy, healthy, healthy, healthy, *[finite() | slope(1e-6)] * 2]
    assert [(a.kind, a.step, a.state) for a in play(record(s, m) for s, m in enumerate(series))] == [
        ("non_finite", 1, "raised"),
        ("non_finite", 4, "resolved"),
        ("vanishing_gradient", 6, "raised"),
    ]


def test_detectors_are_kept_apart_by_name_and_finiteness_comes_first():
    kinds, names = [d.kind for d in DETECTORS], [d(WatchConfig()).name for d in DETECTORS]
    assert len(names) == len(set(names))
    assert set(kinds) - set(names) == set()  # a second detector of a kind has a name of its own beside it
    assert kinds[0] == "non_finite"
