"""dead_units, saturation and symmetry on records made by hand, and on one real run each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detector_records import header, layout, play, played_with_a_break, record, slope, told
from torch import nn
from torch.nn import functional

import flowscope
from flowscope.instruments.units import UnitProbe
from flowscope.records import Record, RunHeader

FLOWS = (layout("encoder", 3), layout("decoder", 2))
HEAD = header(*FLOWS)
RELU = ("encoder.0.relu", "encoder.1.relu", "encoder.2.relu", "decoder.0.relu", "stem.relu")


def labelled(step: int, metric: str, values, labels, flow=None) -> Record:
    item = record(step, flow, **{metric: values})
    item.metric_labels = {**item.metric_labels, metric: tuple(labels)}
    return item


def dead(step: int, *values: float, metric: str = "dead_lasting") -> Record:
    return labelled(step, metric, values, RELU[: len(values)])


def test_a_layer_that_is_dead_entirely_is_an_error_at_once_and_the_first_such_is_named():
    (alert,) = play([dead(0, 0.75, 1.0, 1.0, 0.1)], HEAD)
    assert told([alert]) == [("dead_units", "encoder.1.relu", 0, "raised")]
    assert (alert.severity, alert.flow, alert.value, alert.limit) == ("error", "encoder", 1.0, 0.7)
    assert "3 of 3" in alert.message


@pytest.mark.parametrize("closed", [True, False])
def test_a_rectifier_that_closes_a_model_with_targets_below_zero_is_told_so(closed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1), *([nn.ReLU()] if closed else []))
    with torch.no_grad():
        model[2 if closed else 0].bias.fill_(-99.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(3):
            loss = (model(torch.randn(32, 6)) + 2).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    (alert,) = [a for a in scope.alerts if a.kind == "dead_units"]
    assert (alert.where, alert.severity) == ("3" if closed else "1", "error")
    assert ("cannot answer below 0" in alert.advice) == closed


def test_most_units_dead_is_a_warning_on_two_records_and_resolves_well_below():
    # near is above .75 of .7 = .525: keeps the alert; three records at .5 end it
    series = [0.2, 0.75, 0.8, 0.8, *[0.6] * 20, 0.5, 0.5, 0.5]
    alerts = play((dead(s, 0.1, v, 0.2) for s, v in enumerate(series)), HEAD)
    assert told(alerts) == [
        ("dead_units", "encoder.1.relu", 2, "raised"),
        ("dead_units", "encoder.1.relu", 26, "resolved"),
    ]
    assert alerts[0].severity == "warning"


@pytest.mark.parametrize("values", [(0.4, 0.69, 0.1, 0.0, 0.0), (np.nan, np.nan, np.nan), (0.6, np.nan)])
def test_fewer_dead_units_and_none_seen_are_silent(values):
    assert play((dead(s, *values) for s in range(8)), HEAD) == []


def test_a_record_without_units_counts_for_nothing():
    series = [dead(0, 0.8), record(1), record(2), dead(3, 0.8), record(4), record(5), record(6), record(7)]
    (alert,) = play(series, HEAD)
    assert (alert.step, alert.since, alert.state) == (3, 0, "raised")


def test_flows_are_told_apart_and_what_lies_in_none_has_no_flow():
    alerts = play([dead(0, 0.0, 1.0, 0.0, 1.0, 1.0)], HEAD)
    assert [(a.where, a.flow) for a in alerts] == [
        ("encoder.1.relu", "encoder"), ("decoder.0.relu", "decoder"), ("stem.relu", None),
    ]  # fmt: skip


def test_the_share_of_the_step_is_used_where_no_lasting_one_is_recorded():
    (alert,) = play([dead(0, 1.0, metric="dead_fraction")], HEAD)
    assert alert.where == "encoder.0.relu"
    both = dead(0, 0.0)
    both.metrics["dead_fraction"] = np.array([1.0])
    assert play([both], HEAD) == []


def test_dead_layers_explain_a_gradient_that_vanishes_in_their_flow_and_half_dead_ones_do_not():
    def item(step: int, share: float) -> Record:
        return labelled(step, "dead_lasting", [share], RELU[:1], slope(1e-5, 3))

    assert {a.kind for a in play((item(s, 1.0) for s in range(5)), HEAD)} == {"dead_units"}
    assert {a.kind for a in play((item(s, 0.8) for s in range(5)), HEAD)} == {"dead_units", "vanishing_gradient"}
    other = (labelled(s, "dead_lasting", [1.0], RELU[3:4], slope(1e-5, 3)) for s in range(5))
    assert {a.kind for a in play(other, HEAD)} == {"dead_units", "vanishing_gradient"}


def test_the_input_of_a_layer_is_named_by_the_layer():
    (alert,) = play([labelled(0, "dead_lasting", [1.0], ["encoder.1.fc:input"])], HEAD)
    assert (alert.where, alert.flow) == ("encoder.1.fc", "encoder")


def test_a_saturated_module_inside_a_flow_is_told_and_its_end_or_a_pooler_is_not():
    names = ["encoder.0.tanh", "encoder.1.tanh", "encoder.2", "pooler.tanh"]
    values = [0.3, 0.75, 0.9, 0.95]  # encoder.2 is the last point of the flow
    (alert,) = play((labelled(s, "saturation", values, names) for s in range(4)), HEAD)
    assert told([alert]) == [("saturation", "encoder.1.tanh", 1, "raised")]
    assert (alert.value, alert.limit, alert.severity) == (0.75, 0.5, "warning")
    assert play((labelled(s, "saturation", [0.49, 0.1, 1.0, 1.0], names) for s in range(4)), HEAD) == []


MATRICES = ("0.weight", "2.weight", "4.weight")
CHAIN = header(layout("network", 3, "chain"))


def spread(step: int, *values: float, flow=None) -> Record:
    return labelled(step, "weight_spread", values, MATRICES, flow)


def test_two_matrices_of_equal_rows_are_an_error_at_once_and_explain_the_rest():
    flow = {**slope(1e-6, 3), "effective_rank": [20.0, 1.0, 1.0, 1.0]}
    alerts = play((spread(s, 1e-8, 0.0, 0.9, flow=flow) for s in range(6)), CHAIN)
    assert told(alerts) == [("symmetry", "0", 0, "raised")]
    assert alerts[0].severity == "error"
    assert "2 of 3" in alerts[0].message


def test_one_such_matrix_must_stay_so_and_the_last_may_be_constant():
    assert told(play((spread(s, 1.0, 1e-7, 1.0) for s in range(3)), CHAIN)) == [("symmetry", "2", 1, "raised")]
    assert play([spread(0, 1.0, 1e-7, 1.0), spread(1, 1.0, 0.1, 1.0), spread(2, 1.0, 0.2, 1.0)], CHAIN) == []
    assert play((spread(s, 1.0, 0.9, 0.0) for s in range(5)), CHAIN) == []
    assert play((spread(s, np.nan, 0.9, np.nan) for s in range(5)), CHAIN) == []


def test_a_set_that_loads_the_state_goes_on():
    series = [dead(s, 0.1, 0.8, 0.2) for s in range(4)]
    whole, parts = played_with_a_break(series, 1, HEAD)
    assert parts == whole


def test_units_off_by_chance_in_small_batches_are_not_lasting():
    probe, rng = UnitProbe("relu", "rectifier"), np.random.default_rng(0)
    on = rng.random((64, 200)) < 0.3
    on[:, :20] = False  # a tenth is dead for good
    values = []
    for row in on:
        values.append(probe.lasting(row.astype(float), 1))
    assert np.isnan(values[:31]).all()
    # .7^32 = 1e-5 of the others are off at all of 32 positions
    assert values[31:] == [0.1] * 33
    assert probe.lasting(np.zeros(200), 32) == 1.0  # a step of 32 positions speaks for itself


def alerts_of(model: nn.Module, lr: float, steps: int = 12) -> tuple[RunHeader, list]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(steps):
            x = torch.randn(40, 6, generator=generator)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    return [(a.kind, a.where) for a in scope.alerts if a.severity != "info"]


def chain(act: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 24), act(), nn.Linear(24, 20), act(), nn.Linear(20, 2))


def test_a_real_layer_with_its_bias_far_below_zero_is_dead():
    model = chain(nn.ReLU)
    assert alerts_of(model, 0.1) == []
    nn.init.constant_(model[2].bias, -30.0)
    assert alerts_of(model, 0.1) == [("dead_units", "3")]


def test_a_real_tanh_chain_with_large_weights_is_saturated():
    model = chain(nn.Tanh)
    assert alerts_of(model, 0.01) == []
    for k in (0, 2):
        nn.init.normal_(model[k].weight, std=5.0)
    assert alerts_of(model, 0.01) == [("saturation", "1")]


def test_a_real_chain_of_constants_is_symmetric():
    model = chain(nn.ReLU)
    for k in (0, 2, 4):
        nn.init.constant_(model[k].weight, 0.05)
    assert alerts_of(model, 0.05)[0] == ("symmetry", "0")
