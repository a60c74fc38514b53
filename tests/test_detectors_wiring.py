"""no_gradient and parameters_not_optimized: cuts, unused and frozen parameters, parameters no optimizer holds."""

from __future__ import annotations

import numpy as np
import pytest
from detector_records import PARAMETERS, gradients, header, layout, play, record, slope, told

from flowscope.records import FlowLayout

NAN = float("nan")
CNN = ("0.weight", "1.weight", "1.bias", "4.weight", "5.weight", "5.bias", "9.weight", "9.bias")
CNN_NORM = [0, 1, 1, 0, 1, 1, 0, 0]


def calls(tracked: list[float], backward: list[float]) -> dict[str, list[float]]:
    return {"tracked_calls": tracked, "backward_calls": backward}


def parameters(trainable: list[float], norms: list[float], optimized: list[float] | None = None) -> dict:
    return {
        "param_trainable": trainable,
        "param_grad_norm": norms,
        "param_optimized": [1.0] * len(norms) if optimized is None else optimized,
    }


def test_a_detach_is_told_at_once_and_names_the_last_module_without_gradient():
    cut = calls([0, 2, 2, 2, 2, 2, 2], [0, 0, 0, 2, 2, 2, 2])
    lost = parameters([1] * 5, [NAN, NAN, NAN, 0.3, 0.2])
    (alert,) = play(record(s, cut, **lost) for s in range(5))
    assert told([alert]) == [("no_gradient", "blocks.1", 0, "raised")]
    assert alert.severity == "error"
    assert "2 of 7 points" in alert.message
    assert "detach" in alert.advice


def test_a_block_that_returns_a_tensor_without_graph_is_itself_the_last_without_gradient():
    cut = {**calls([2, 2, 2, 0, 2, 2, 2], [0, 0, 0, 0, 2, 2, 2]), "forward_calls": [2] * 7}
    assert told(play(record(s, cut) for s in range(3))) == [("no_gradient", "blocks.2", 0, "raised")]
    not_run = {**cut, "forward_calls": [2, 2, 2, 0, 2, 2, 2]}  # skipped, or run where no graph is kept
    assert told(play(record(s, not_run) for s in range(3))) == [("no_gradient", "blocks.1", 0, "raised")]


@pytest.mark.parametrize(
    ("tracked", "backward"),
    [
        ([0, 0, 0, 2, 2, 2, 2], [0, 0, 0, 2, 2, 2, 2]),  # a frozen body records no graph
        ([2] * 7, [2] * 7),
        ([2] * 7, [2, 2, 2, 2, 2, 0, 0]),  # an early exit: the end gets none
        ([2] * 7, [0] * 7),  # no backward at all (a teacher, an evaluation)
        ([4] * 7, [2] * 7),  # half of the calls without backward
    ],
)
def test_other_patterns_of_calls_are_no_cut(tracked, backward):
    assert play(record(s, calls(tracked, backward)) for s in range(5)) == []


@pytest.mark.parametrize(
    ("tracked", "norms", "optimized", "raised"),
    [
        ([2] * 7, [0.1, NAN, NAN, NAN, 0.2], [1] * 5, True),  # a detach behind its end
        ([0] * 7, [0.1, NAN, NAN, NAN, 0.2], [1] * 5, False),  # it had no turn
        ([2] * 7, [0.1, NAN, NAN, NAN, 0.2], [1, 0, 0, 0, 1], False),  # a teacher that follows by averages
        ([2] * 7, [0.1, NAN, NAN, NAN, 0.2], [NAN] * 5, False),  # no optimizer known
        ([2] * 7, [NAN] * 5, [1] * 5, False),  # no backward at all
    ],
)
def test_a_whole_flow_without_gradient_is_told_where_the_optimizer_holds_it(tracked, norms, optimized, raised):
    lost = parameters([1] * 5, norms, optimized)
    alerts = [a for a in play(record(s, calls(tracked, [0] * 7), **lost) for s in range(9)) if a.severity != "info"]
    assert told(alerts) == ([("no_gradient", "blocks.5", 2, "raised")] if raised else [])


def test_a_flow_that_waits_for_its_turn_is_no_detached_one():
    lost, seen = parameters([1] * 5, [0.1, NAN, NAN, NAN, 0.2]), parameters([1] * 5, [0.1] * 5)
    series = [(calls([2] * 7, [0] * 7), lost), (calls([2] * 7, [2] * 7), seen)] * 6
    alerts = play(record(s, flow, **params) for s, (flow, params) in enumerate(series))
    assert [a for a in alerts if a.severity != "info"] == []


def test_a_cut_explains_the_vanished_gradient_of_its_flow():
    cut = calls([2] * 7, [0, 0, 2, 2, 2, 2, 2]) | gradients([NAN, NAN, 1e-6, 1, 1, 1])
    (alert,) = play(record(s, cut) for s in range(5))
    assert alert.kind == "no_gradient"


def test_detaching_between_chunks_of_time_is_deliberate():
    time = header(layout("rnn", 6, "time"))
    assert play((record(s, calls([1] * 7, [0, 0, 0, 1, 1, 1, 1])) for s in range(5)), time) == []


def test_an_unused_branch_is_information():
    unused = parameters([1] * 5, [0.1, NAN, NAN, 0.3, 0.2])
    (alert,) = play(record(s, slope(1.0), **unused) for s in range(5))
    assert (alert.kind, alert.severity, alert.where, alert.value) == ("no_gradient", "info", "blocks.0.fc", 2)
    assert "2 trainable parameters" in alert.message


def test_experts_that_miss_a_step_in_turn_do_not_spam():
    rng = np.random.default_rng(0)
    alerts = []
    for _ in range(5):
        missing = rng.integers(1, 4, size=300)
        series = [[NAN if i == m and s % 2 else 0.1 for i in range(5)] for s, m in enumerate(missing)]
        alerts += play(record(s, **parameters([1] * 5, norms)) for s, norms in enumerate(series))
    assert alerts == []


def test_gradients_cleared_before_they_were_read_say_nothing():
    assert play(record(s, slope(1.0), **parameters([1] * 5, [NAN] * 5)) for s in range(5)) == []


def test_a_frozen_body_is_information():
    (alert,) = play(record(s, **parameters([0, 0, 0, 0, 1], [NAN, NAN, NAN, NAN, 0.2])) for s in range(5))
    assert (alert.kind, alert.severity) == ("no_gradient", "info")
    assert "4 of 5" in alert.message


@pytest.mark.parametrize(("labelled", "severity"), [(True, "warning"), (False, "info")])
def test_training_only_the_norms_under_a_frozen_head_is_a_warning(labelled, severity):
    """A convnet in a Sequential: its names say nothing, only `param_is_norm` can."""
    norms = {"param_is_norm": CNN_NORM} if labelled else {}
    frozen = parameters(CNN_NORM, [0.1 if n else NAN for n in CNN_NORM])
    series = [record(s, **frozen, **norms) for s in range(5)]
    for item in series:
        item.metric_labels = {"param_norm": CNN}
    (alert,) = play(series, header(parameters=CNN))
    assert alert.severity == severity


def test_names_tell_norms_where_nothing_else_does():
    (alert,) = play(record(s, **parameters([0, 0, 1, 0, 0], [NAN, NAN, 0.1, NAN, NAN])) for s in range(5))
    assert (alert.severity, alert.where) == ("warning", "embed")
    assert "head.weight" in alert.message


def test_training_norms_with_the_head_is_information():
    (alert,) = play(record(s, **parameters([0, 0, 1, 0, 1], [NAN, NAN, 0.1, NAN, 0.1])) for s in range(5))
    assert alert.severity == "info"


def test_parameters_that_no_optimizer_holds_are_told_on_two_records():
    (alert,) = play(record(s, **parameters([1] * 5, [0.1] * 5, [1, 0, 0, 1, 1])) for s in range(5))
    assert told([alert]) == [("parameters_not_optimized", "blocks.0.fc", 1, "raised")]
    assert alert.severity == "warning"
    assert PARAMETERS[1] in alert.message
    assert "add_param_group" in alert.advice


@pytest.mark.parametrize("optimized", [[1.0] * 5, [NAN] * 5])
def test_held_or_unknown_parameters_are_silent(optimized):
    assert play(record(s, **parameters([1] * 5, [0.1] * 5, optimized)) for s in range(5)) == []


def test_a_parameter_without_gradient_may_be_in_no_optimizer():
    unused = parameters([1, 1, 1, 1, 0], [0.1, NAN, 0.1, 0.1, NAN], [1, 0, 1, 1, 0])
    alerts = play(record(s, **unused) for s in range(5))
    assert {alert.severity for alert in alerts} == {"info"}


def test_stages_that_are_detached_behind_their_end_are_one_alert_of_the_network():
    flows = [layout("layer1", 2, "stage"), layout("layer2", 2, "stage"), layout("network", 4, "network")]
    names = ("layer1.0.weight", "layer2.0.weight", "network.0.weight", "head.weight")
    calls = {"tracked_calls": [1] * 3, "backward_calls": [0] * 3}
    whole = {"tracked_calls": [1] * 5, "backward_calls": [0] * 5}
    series = [
        record(s, calls, others={"layer2": calls, "network": whole}, param_trainable=[1] * 4, param_optimized=[1] * 4,
               param_grad_norm=[np.nan, np.nan, np.nan, 0.5])
        for s in range(5)
    ]  # fmt: skip
    for item in series:
        item.metric_labels = {"param_norm": names}
    alerts = play(series, header(*flows, parameters=names))
    assert [(a.kind, a.flow, a.step) for a in alerts if a.severity != "info"] == [("no_gradient", "network", 2)]


@pytest.mark.parametrize(
    ("tracked", "optimized", "raised"),
    [
        ([0, 0, 0, 2, 2, 2], [1] * 5, True),  # the encoder under no_grad
        ([0, 0, 0, 2, 2, 2], [0, 0, 0, 1, 1], False),  # and in no optimizer: meant
        ([2] * 6, [1] * 5, False),  # it ran: its parameters are unused for another reason
        ([0, 2, 2, 2, 2, 2], [1] * 5, False),  # its first layer was dropped
    ],
)
def test_a_part_that_runs_without_a_graph_and_is_in_the_optimizer_is_a_warning(tracked, optimized, raised):
    points = ("encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1", "decoder.2")
    names = ("encoder.0.weight", "encoder.1.weight", "encoder.2.weight", "decoder.0.weight", "decoder.2.weight")
    head = header(FlowLayout("network", "chain", points, points[1:]), parameters=names)
    unused = parameters([1] * 5, [NAN, NAN, NAN, 0.3, 0.2], optimized)
    series = [record(s, calls(tracked, tracked), **unused) for s in range(9)]
    for item in series:
        item.metric_labels = {"param_norm": names}
    serious = [a for a in play(series, head) if a.severity != "info"]
    assert told(serious) == ([("no_gradient", "encoder.0", 4, "raised")] if raised else [])
