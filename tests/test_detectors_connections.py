"""gate_saturation, stream_collapse, mixing_gain, expert_collapse, solver_cost, solver_unconverged by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from detector_records import header, layout, play, played_with_a_break, record, told
from torch import nn

import flowscope
from flowscope.records import FlowLayout, Record

SITES = tuple(f"blocks.{k // 2}#{k % 2}" for k in range(6))
HEAD = header(layout(depth=3))
OWN = header(FlowLayout("gates", "gates", (), ()))


def sites(step: int, **metrics) -> Record:
    item = record(step, metrics)
    labels = {name: SITES[: np.size(values)] for name, values in metrics.items()}
    return replace(item, metric_labels={**item.metric_labels, **labels})


def gates(step: int, share, mean) -> Record:
    return sites(step, gate_saturation=share, gate_mean=mean)


def test_gates_that_are_mostly_shut_are_a_warning_on_two_records():
    series = [gates(s, [0.1, 0.9, 1.0, 0.8, 0.0, 0.0], [0.3, 0.004, 0.001, 0.01, 0.3, 0.3]) for s in range(3)]
    (alert,) = play(series, HEAD)
    assert told([alert]) == [("gate_saturation", "blocks.0", 1, "raised")]
    assert (alert.severity, alert.value, alert.limit, alert.flow) == ("warning", 0.9, 0.5, "blocks")
    assert "3 of 6 gates are shut" in alert.message


@pytest.mark.parametrize(
    ("share", "mean", "severities"),
    [
        ([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.1, 0.001, 0.1, 0.1, 0.1, 0.1], ["info"]),  # one skipped block
        ([1.0] * 6, [0.999] * 6, ["info"]),  # all open: the plain residual
        ([0.4] * 6, [0.01] * 6, []),
        ([np.nan] * 6, [np.nan] * 6, []),
    ],
)
def test_few_shut_gates_and_open_ones_are_an_info(share, mean, severities):
    assert [a.severity for a in play((gates(s, share, mean) for s in range(4)), HEAD)] == severities


def test_gates_of_the_users_own_model_count_open_too():
    (alert,) = play((gates(s, [0.9, 0.0], [0.999, 0.4]) for s in range(4)), OWN)
    assert alert.severity == "warning"


def test_a_gate_alert_stays_near_its_limit_and_resolves_below():
    shut = [0.001] * 6
    series = [[0.9] * 6] * 3 + [[0.45] * 6] * 9 + [[0.3] * 6] * 3
    alerts = play((gates(s, share, shut) for s, share in enumerate(series)), HEAD)
    assert [(a.step, a.state) for a in alerts] == [(1, "raised"), (14, "resolved")]


def streams(step: int, distance: float, least: float = 0.5) -> Record:
    return sites(step, stream_cosine=np.full(6, 1 - distance), mix_colsum_min=np.full(6, least))


def test_streams_that_had_parted_and_fall_together_are_told():
    # parted to 1 - cos = .2; the limit is 1e-3, a hundred times it .1
    series = [0.0, 1e-4, 0.05, 0.2, 0.01, 5e-4, 4e-4, 2e-3, 2e-3, 2e-3, 2e-3, 5e-3, 5e-3, 5e-3]
    alerts = play((streams(s, d) for s, d in enumerate(series)), HEAD)
    assert told(alerts) == [
        ("stream_collapse", "blocks.0", 6, "raised"),
        ("stream_collapse", "blocks.0", 13, "resolved"),
    ]
    assert alerts[0].severity == "warning"
    assert alerts[0].value == pytest.approx(1 - 4e-4)


def test_streams_that_start_equal_are_healthy_and_one_that_feeds_all_is_not():
    assert play((streams(s, 0.0) for s in range(30)), HEAD) == []
    (alert,) = play((streams(s, 0.0, least=0.01) for s in range(4)), HEAD)
    assert (alert.kind, alert.step) == ("stream_collapse", 1)
    assert "one stream feeds them all" in alert.message
    assert play((streams(s, 0.04, least=0.01) for s in range(4)), HEAD) == []


def mixing(step: int, forward, backward) -> Record:
    return sites(step, mix_gain_forward_norm=forward, mix_gain_backward_norm=backward)


def test_an_amplifying_product_names_where_it_crosses_the_limit():
    grow, fade = [1.0, 2.0, 6.0, 12.0, 30.0, 80.0], [80.0, 30.0, 12.0, 6.0, 2.0, 1.0]
    (alert,) = play((mixing(s, grow, [1.0] * 6) for s in range(3)), HEAD)
    assert told([alert]) == [("mixing_gain", "blocks.1", 1, "raised")]  # site 3 is block 1's second
    assert (alert.severity, alert.value, alert.limit) == ("warning", 80.0, 10.0)
    (alert,) = play((mixing(s, [1.0] * 6, fade) for s in range(3)), HEAD)
    assert alert.where == "blocks.1"  # towards the input the product exceeds 10 from site 2 on
    assert "backward" in alert.message


def test_a_gain_of_3000_is_an_error_at_once_and_the_papers_1_6_is_healthy():
    (alert,) = play([mixing(0, [1.0] * 5 + [3000.0], [1.0] * 6)], HEAD)
    assert (alert.severity, alert.where) == ("error", "blocks.2")
    assert play((mixing(s, [1.6] * 6, [1.5] * 6) for s in range(5)), HEAD) == []


def test_a_mapping_that_passes_nothing_is_told():
    (alert,) = play((mixing(s, [1.0, 0.5, 0.2, 0.05, 0.02, 0.01], [0.01] * 6) for s in range(3)), HEAD)
    assert (alert.kind, alert.where, alert.value) == ("mixing_gain", "blocks.1", 0.01)
    assert "cut" in alert.message


def labelled(step: int, names: tuple[str, ...], **metrics) -> Record:
    item = record(step, None, **metrics)
    return replace(item, metric_labels={**item.metric_labels, **dict.fromkeys(metrics, names)})


ROUTERS = ("blocks.0.router", "blocks.1.router", "blocks.2.router")


LATE = 10
"""A router is not judged before this step: its first ones are uneven."""


def routes(step: int, dead, violation, entropy=(0.9, 0.2, 0.8)) -> Record:
    return labelled(LATE + step, ROUTERS, route_dead=dead, route_max_violation=violation, route_entropy=list(entropy))


def test_a_router_that_leaves_most_experts_out_is_told_after_four_records():
    series = [routes(s, [0.0, 0.75, 0.6], [0.7, 2.9, 1.2]) for s in range(5)]
    (alert,) = play(series, HEAD)
    assert told([alert]) == [("expert_collapse", "blocks.1.router", LATE + 3, "raised")]
    assert (alert.value, alert.limit, alert.flow) == (0.75, 0.5, "blocks")
    assert "3.9 times the mean load" in alert.message
    assert "entropy 0.20" in alert.message


def test_a_router_near_its_limit_or_not_seen_keeps_the_alert():
    beyond, near, clean = ([0.0, dead, 0.1] for dead in (0.75, 0.4, 0.2))
    series = [routes(s, dead, [0.7, 0.9, 0.2]) for s, dead in enumerate([*[beyond] * 4, *[near] * 5])]
    series += [record(LATE + s) for s in range(9, 14)] + [routes(s, clean, [0.7, 0.9, 0.2]) for s in range(14, 18)]
    assert [(a.step, a.state) for a in play(series, HEAD)] == [(LATE + 3, "raised"), (LATE + 16, "resolved")]


def test_undecided_routers_have_twenty_records():
    series = [routes(s, [0.0, 0.75, 0.6], [0.7, 2.9, 1.2], (0.999, 0.995, 0.999)) for s in range(25)]
    assert play(series[:19], HEAD) == []
    (alert,) = play(series, HEAD)
    assert told([alert]) == [("expert_collapse", "blocks.1.router", LATE + 19, "raised")]


def test_a_load_far_above_the_mean_is_told_and_balanced_routers_are_not():
    (alert,) = play((routes(s, [0.0, 0.0, 0.0], [0.04, 0.7, 6.5]) for s in range(5)), HEAD)
    assert (alert.where, alert.value, alert.limit) == ("blocks.2.router", 6.5, 3.0)
    assert play((routes(s, [0.0, 0.1, 0.2], [0.04, 0.72, 1.2]) for s in range(9)), HEAD) == []
    early = [routes(s, [0.8 if s < 3 else 0.0] * 3, [2.0 if s < 3 else 0.5] * 3) for s in range(9)]
    assert play(early, HEAD) == []


def solved(step: int, *, nfe=None, residual=None, radius=None) -> Record:
    metrics = {"solver_nfe": nfe, "solver_residual": residual, "jacobian_radius": radius}
    return labelled(step, ("ode", "deq"), **{name: values for name, values in metrics.items() if values is not None})


def test_a_solver_that_takes_four_times_its_first_evaluations_is_told():
    series = [20, 26, 20, 32, 40, 60, 79, 81, 90, 62, 70, 33, 30, 30]
    alerts = play((solved(s, nfe=[n, np.nan]) for s, n in enumerate(series)), HEAD)
    # the median of the first ten stays between 20 and 50: 4 times 30 and more is never reached
    assert alerts == []
    flat = [20.0] * 10 + [50.0, 81.0, 90.0, 85.0, 45.0, 45.0, 39.0, 39.0, 39.0]
    alerts = play((solved(s, nfe=[n, np.nan]) for s, n in enumerate(flat)), HEAD)
    assert told(alerts) == [("solver_cost", "ode", 12, "raised"), ("solver_cost", "ode", 18, "resolved")]
    assert (alerts[0].value, alerts[0].limit) == (90.0, 80.0)


def test_a_residual_above_its_limit_is_told_with_the_radius():
    series = [solved(s, residual=[np.nan, 0.03], radius=[np.nan, 1.2]) for s in range(3)]
    (alert,) = play(series, HEAD)
    assert told([alert]) == [("solver_unconverged", "deq", 1, "raised")]
    assert (alert.severity, alert.value, alert.limit) == ("warning", 0.03, 0.01)
    assert "1.20: no contraction" in alert.message
    (alert,) = play([solved(0, residual=[0.9, 0.001])], HEAD)
    assert (alert.severity, alert.where, alert.step) == ("error", "ode", 0)
    assert play((solved(s, residual=[1e-3, 0.009]) for s in range(6)), HEAD) == []


def test_a_solver_that_does_not_converge_explains_its_cost():
    first = [solved(s, nfe=[10.0, 10.0], residual=[1e-3, 1e-3]) for s in range(10)]
    then = [solved(s, nfe=[10.0, 60.0], residual=[1e-3, 0.5]) for s in range(10, 14)]
    assert [a.kind for a in play([*first, *then], HEAD)] == ["solver_unconverged"]


def test_state_goes_on():
    series = [solved(s, nfe=[20.0 if s < 8 else 100.0, 5.0]) for s in range(12)]
    series += [streams(s, 0.3 if s < 20 else 1e-4) for s in range(12, 26)]
    whole, parts = played_with_a_break(series, 22, HEAD)
    assert {a.kind for a in whole} == {"solver_cost", "stream_collapse"}
    assert parts == whole


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(5, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(Block(12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def alerts_of(model: nn.Module, lr: float = 0.01) -> list[tuple[str, str]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(1)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(7, 5, generator=generator)).square().mean().backward()
            optimizer.step()
    return [(a.kind, a.where) for a in scope.alerts if a.severity != "info"]


@pytest.mark.parametrize(("bias", "expected"), [(-2.0, []), (-9.0, [("gate_saturation", "blocks.0")])])
def test_real_gates_that_start_shut(bias, expected):
    model = flowscope.wrap(Net(), mode="highway", init_bias=bias, example_inputs=torch.randn(3, 5))
    assert alerts_of(model) == expected


def test_real_streams_with_a_residual_mapping_scaled_up():
    assert alerts_of(flowscope.wrap(Net(), mode="shc", streams=4, example_inputs=torch.randn(3, 5))) == []
    model = flowscope.wrap(Net(), mode="shc", streams=4, example_inputs=torch.randn(3, 5))
    with torch.no_grad():
        for _, connection in flowscope.connections(model):
            (static,) = connection.parameters()
            assert torch.equal(static[1:5], torch.eye(4))  # read, residual mapping, write
            static[1:5] *= 3.0
    # 3, 9, 27: past 10 at the third site
    assert alerts_of(model, lr=1e-6) == [("mixing_gain", "blocks.2")]
