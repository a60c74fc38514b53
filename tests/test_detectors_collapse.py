"""token_collapse and representation_collapse against the measured calibrations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from detector_records import header, layout, play, played_with_a_break, record, slope, told
from torch import nn
from torch.nn import functional

import flowscope

DEPTH = 24
HEAD = header(layout(depth=DEPTH))


def tokens(first: float, last: float) -> dict[str, np.ndarray]:
    """1 - token cosine falls geometrically from the first point to the last."""
    return {"token_cosine": 1 - np.geomspace(1 - first, 1 - last, DEPTH + 1)}


def depth_metrics(cosine: float, to_input: float) -> dict[str, np.ndarray]:
    return {"cosine": np.full(DEPTH, cosine), "cosine_to_input": np.linspace(1.0, to_input, DEPTH + 1)}


def test_post_norm_tokens_collapse_at_step_5_and_are_told_at_the_second_record():
    # measured: .989 at step 0, 1.000 from step 5
    lasts = [0.989, 0.994, 0.997, 0.9985, 0.9993, 0.99995, 0.99998, 0.99999]
    (alert,) = play((record(s, tokens(0.02, last)) for s, last in enumerate(lasts)), HEAD)
    assert alert.kind == "token_collapse"
    assert (alert.since, alert.step) == (5, 6)
    assert alert.value > 0.999
    # 1 - cos is .98 * r^l with r^24 = 2e-5/.98; below 1e-3 from l = 24 ln(980)/ln(49000) = 15.3 on: x_16
    assert alert.where == "blocks.15"
    assert "warm-up" in alert.advice


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.59), (0.0, 0.88), (0.0, 0.08), (0.0, 0.994), (0.995, 0.9995)])
def test_healthy_token_cosines_are_silent(first, last):
    """Pre-LN 24 and 96 blocks, Keel, Post-LN at the start, and tokens that were alike when they came in."""
    assert play((record(s, tokens(first, last)) for s in range(15)), HEAD) == []


@pytest.mark.parametrize(("product", "count"), [(0.9, 0), (0.2, 1)])
def test_a_few_collapsed_points_count_only_with_a_gradient_that_falls_too(product, count):
    """Measured: the last points of a healthy 10-block Pre-LN model reach .9993 for some steps, its product above 1."""
    flow = {"token_cosine": [0.1] * 21 + [0.9993] * 4, **slope(product, DEPTH)}
    alerts = play((record(s, flow) for s in range(5)), HEAD)
    assert [alert.kind for alert in alerts] == ["token_collapse"] * count


def test_without_tokens_there_is_nothing_to_say():
    assert play((record(s, {"token_cosine": np.full(DEPTH + 1, np.nan)}) for s in range(5)), HEAD) == []


def test_collapse_over_half_the_depth_is_an_error_at_once():
    (alert,) = play([record(0, {"token_cosine": np.array([0.0] + [0.99999] * DEPTH)})], HEAD)
    assert (alert.severity, alert.where, alert.step) == ("error", "blocks.0", 0)


@pytest.mark.parametrize(
    ("cosine", "to_input"),
    [(0.99999, 0.998), (0.999999, 0.862), (0.998, 0.12), (0.89, 0.0), (1.0, 1.0)],
)
def test_adjacent_cosines_near_one_from_the_start_are_healthy(cosine, to_input):
    """DeepNorm, Keel, Pre-LN, Post-LN, and branches that start at zero."""
    assert play((record(s, depth_metrics(cosine, to_input)) for s in range(40)), HEAD) == []


def test_layer_scale_that_starts_as_identity_and_opens_is_healthy():
    series = [depth_metrics(1 - 1e-6 * 1.2**s, 1 - 1e-5 * 1.2**s) for s in range(40)]
    assert play((record(s, m) for s, m in enumerate(series)), HEAD) == []


def test_blocks_that_turn_into_copies_are_told():
    series = [depth_metrics(0.97, 0.3)] * 12 + [depth_metrics(0.99999, 0.9995)] * 3
    (alert,) = play((record(s, m) for s, m in enumerate(series)), HEAD)
    assert told([alert]) == [("representation_collapse", "blocks.0", 13, "raised")]
    assert alert.severity == "warning"


def test_blocks_that_turn_into_copies_while_the_last_point_still_differs_are_silent():
    series = [depth_metrics(0.97, 0.3)] * 12 + [depth_metrics(0.99999, 0.3)] * 8
    assert play((record(s, m) for s, m in enumerate(series)), HEAD) == []


def ranks(*series: tuple[float, ...]) -> list:
    return [record(s, {"effective_rank": values} if s % 2 == 0 else {}) for s, values in _doubled(series)]


def _doubled(series):
    return [(s, series[s // 2]) for s in range(2 * len(series))]


CHAIN = header(layout("network", 3, "chain"))


def test_samples_that_fall_into_one_vector_are_told_across_records_without_ranks():
    # self-supervised training without stop-gradient: 32 features of 64 samples
    series = [(30, 25, 22, 20), (30, 25, 15, 8), (30, 24, 4, 1.05), (30, 24, 3, 1.01), (30, 24, 3, 1.0)]
    (alert,) = play(ranks(*series), CHAIN)
    assert (alert.kind, alert.step, alert.since, alert.where) == ("rank_collapse", 6, 4, "network.2")


def test_softmax_between_layers_is_told_from_the_start():
    (alert,) = play(ranks(*[(20, 3, 1.01, 1.0)] * 4), CHAIN)
    assert (alert.kind, alert.where) == ("rank_collapse", "network.1")


@pytest.mark.parametrize(
    "series",
    [
        [(20, 12, 9, 1.0)] * 5,  # regression: one output unit has rank 1 by construction
        [(20, 12, 9, 2.0), (20, 12, 5, 1.2), (20, 12, 4, 1.1)],  # two classes
        [(1.0, 1.0, 1.0, 1.0)] * 5,  # a batch of one
        [(30, 25, 22, 20), (30, 20, 10, 6), (30, 18, 8, 4)],  # ten classes, learned
        [(59.0, 58.0, 59.0, 57.0)] * 5,  # DeepNorm, Keel
    ],
)
def test_healthy_ranks_are_silent(series):
    assert play(ranks(*series), CHAIN) == []


def test_collapsed_tokens_explain_a_collapsed_rank():
    both = {"token_cosine": [0.0, 0.5, 0.99999, 0.99999], "effective_rank": [30, 20, 1.0, 1.0]}
    first = {"token_cosine": [0.0, 0.1, 0.2, 0.3], "effective_rank": [30, 25, 20, 20]}
    (alert,) = play((record(s, first if s < 2 else both) for s in range(8)), CHAIN)
    assert alert.kind == "token_collapse"


TWO = header(layout("encoder", 2, "chain"), layout("decoder", 2, "chain"))


def samples(step: int, *distance: float, calls: float = 1, **parameters):
    flow = {"sample_cosine": 1 - np.array(distance), "forward_calls": [calls] * len(distance)}
    return record(step, flow, **parameters)


def test_samples_that_end_alike_from_the_start_are_told_after_ten_records():
    # x_1 is still fine, x_2 and x_3 hold one vector: 1 - cos under 1e-3, at x_0 0.5
    (alert,) = play((samples(s, 0.5, 0.1, 5e-4, 1e-5) for s in range(12)), CHAIN)
    assert told([alert]) == [("representation_collapse", "network.1", 9, "raised")]
    assert alert.value == pytest.approx(1 - 1e-5)


@pytest.mark.parametrize(
    "series",
    [
        [(0.5, 0.3, 0.2, 1e-9)] * 15,  # one output unit: positive predictions have a cosine of 1
        [(0.005, 1e-4, 1e-5, 1e-5)] * 15,  # alike when they came in
        [(0.5, 0.1, 5e-4, 5e-4)] * 8 + [(0.5, 0.2, 0.1, 0.2)] * 8,  # an untrained sigmoid chain that learns
        [(0.3, 0.3, 0.3, 0.2)] * 3 + [(0.3, 0.3, 0.2, 0.01)] * 12,  # a head with a large common part
        [(np.nan,) * 4] * 15,
    ],
)
def test_healthy_sample_cosines_are_silent(series):
    assert play((samples(s, *values) for s, values in enumerate(series)), CHAIN) == []


@pytest.mark.parametrize(("width", "alerts"), [(1.0, 0), (3.0, 1)])
def test_the_cosine_of_a_scalar_output_is_no_point(width, alerts):
    """A regression on targets with a large mean: the last hidden layer leans towards it, the output cannot but."""
    series = [samples(s, 0.5, 0.1, 1e-4, 1e-12, output_width=[width]) for s in range(15)]
    assert len(play(series, CHAIN)) == alerts


@pytest.mark.parametrize(("size", "alerts"), [(40.0, 0), (1.0, 1)])
def test_samples_as_far_apart_as_ever_beside_a_common_mode_that_grew_are_healthy(size, alerts):
    """Targets with a large mean: cosines rise because |x| grows by 40, not because samples come closer."""
    series = [samples(0, 0.5, 0.3, 0.2, 0.2, act_rms=[1.0] * 4)]
    series += [samples(s, 0.5, 0.2, 2e-4, 2e-4, act_rms=[1.0, 1.0, size, size]) for s in range(1, 15)]
    assert len(play(series, CHAIN)) == alerts


def test_compared_embeddings_that_close_up_are_told_after_three_records():
    # runs twice a step: 1 - cos falls from .4 to under .02 at step 4
    series = [0.4, 0.3, 0.1, 0.05, 0.018, 0.015, 0.012, 0.012, *[0.03] * 4, *[0.2] * 3]
    alerts = play((samples(s, 0.3, 0.3, 0.2, last, calls=2) for s, last in enumerate(series)), CHAIN)
    assert told(alerts) == [
        ("representation_collapse", "network.2", 6, "raised"),
        ("representation_collapse", "network.2", 14, "resolved"),
    ]
    assert alerts[0].since == 4
    assert "stop-gradient" in alerts[0].advice


def codes(step: int, before: float, code: float, last: bool = False):
    flow, other = {"act_rms": [1.0, before, code]}, {"act_rms": [1.0, 1.0, 1.0]}
    return record(step, other if last else flow, others={"decoder": flow if last else other})


def test_an_inner_code_that_fades_by_itself_is_told():
    series = [(0.5, 0.7)] * 3 + [(0.4, 0.2), (0.3, 0.13), (0.3, 0.12), (0.3, 0.1)]
    (alert,) = play((codes(s, *sizes) for s, sizes in enumerate(series)), TWO)
    # .7 / 5 = .14 is the limit; the layer before fell by 1.7
    assert told([alert]) == [("representation_collapse", "encoder.1", 6, "raised")]
    assert (alert.since, alert.flow) == (4, "encoder")
    assert (alert.value, alert.limit) == (0.1, pytest.approx(0.14))


@pytest.mark.parametrize("optimizers", [(0, 1), (0, 0)])
def test_the_answer_of_a_net_that_is_trained_by_an_optimizer_of_its_own_is_no_code(optimizers: tuple[int, int]):
    series = [(0.5, 0.7)] * 3 + [(0.4, 0.2), (0.3, 0.13), (0.3, 0.12), (0.3, 0.1)]

    def actor(step: int, sizes: tuple[float, float]):
        one = codes(step, *sizes)
        one.metrics["param_optimizer"] = np.array([*optimizers, np.nan])
        one.metric_labels["param_optimizer"] = ("encoder.1.weight", "decoder.1.weight", "target.1.weight")
        return one

    apart = optimizers[0] != optimizers[1]
    assert len(play((actor(s, sizes) for s, sizes in enumerate(series)), TWO)) == (not apart)


def test_outputs_that_shrink_and_flows_that_shrink_as_a_whole_are_healthy():
    whole = [(0.5, 0.7)] * 3 + [(0.05, 0.06)] * 9
    assert play((codes(s, *sizes) for s, sizes in enumerate(whole)), TWO) == []
    output = [(0.5, 0.7)] * 3 + [(0.5, 0.01)] * 9
    assert play((codes(s, *sizes, last=True) for s, sizes in enumerate(output)), TWO) == []


def test_one_cause_one_alert_of_samples_rank_and_output():
    def item(step: int):
        out = samples(step, 0.5, 1e-5, 1e-6, 1e-6, output_spread=[1e-7])
        out.metrics["effective_rank"] = np.array([20.0, 1.0, 1.0, 1.0])
        return out

    assert [a.kind for a in play((item(s) for s in range(15)), CHAIN)] == ["representation_collapse"]


def test_an_output_that_is_constant_for_ten_records_is_told_for_the_whole_model():
    (alert,) = play((record(s, None, output_spread=[3e-6]) for s in range(12)), CHAIN)
    assert told([alert]) == [("constant_output", "", 9, "raised")]
    assert (alert.value, alert.limit, alert.flow) == (3e-6, 1e-5, None)
    assert play((record(s, None, output_spread=[2e-4]) for s in range(12)), CHAIN) == []
    assert play((record(s, None, output_spread=[np.nan]) for s in range(12)), CHAIN) == []
    assert play((record(s, None, output_spread=[0.0 if s < 9 else 0.3]) for s in range(20)), CHAIN) == []


def test_collapsed_tokens_with_the_gradient_gone_are_one_error_at_once():
    flow = {"token_cosine": [0.0, 0.5, 0.9, 0.9995, 0.9999, 0.9999, 0.9999], **slope(1e-5)}
    (alert,) = play(record(s, flow) for s in range(4))
    assert (alert.kind, alert.severity, alert.where, alert.step) == ("token_collapse", "error", "blocks.2", 0)
    flow |= slope(5e-3)  # short of its own limit: a warning
    (alert,) = play(record(s, flow) for s in range(4))
    assert (alert.kind, alert.severity, alert.step) == ("token_collapse", "warning", 1)


@pytest.mark.parametrize("cut", [2, 7, 12])
def test_the_state_of_collapses_goes_on(cut):
    def item(step: int):
        out = samples(step, 0.3, 0.3, 0.2, 0.4 if step < 6 else 0.01, calls=2)
        out.metrics["effective_rank"] = np.array([30, 25, 22, 20.0 if step < 9 else 1.0])
        out.metrics["act_rms"] = np.array([1.0, 1.0, 1.0, 1.0 if step < 5 else 0.1])
        return out

    head = header(layout("network", 3, "chain"), layout("decoder", 3, "chain"))
    whole, parts = played_with_a_break([item(s) for s in range(16)], cut, head)
    assert len(whole) >= 2
    assert parts == whole


def alerts_of(model: nn.Module, loss, lr: float, steps: int) -> list[tuple[str, str]]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model, torch.randn(30, 6, generator=generator), generator).backward()
            optimizer.step()
    return [(a.kind, a.where) for a in scope.alerts if a.severity != "info" and a.state == "raised"]


def twins(model: nn.Module, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Two noisy views are drawn together, and nothing keeps samples apart."""
    first, second = (model(x + 0.1 * torch.randn(x.shape, generator=generator)) for _ in range(2))
    return -functional.cosine_similarity(first, second).mean()


def test_real_twins_without_a_stop_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 8))
    kinds = {kind for kind, _ in alerts_of(model, twins, 0.2, 120)}
    assert kinds == {"representation_collapse"}


def test_a_real_softmax_between_layers_ends_alike():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 20), nn.Softmax(-1), nn.Linear(20, 16), nn.Softmax(-1), nn.Linear(16, 12), nn.Softmax(-1),
        nn.Linear(12, 3),
    )  # fmt: skip

    def loss(model, x, generator):
        return functional.cross_entropy(model(x), (x[:, 0] > 0).long())

    assert {kind for kind, _ in alerts_of(model, loss, 0.1, 12)} <= {"vanishing_gradient", "representation_collapse"}
    assert alerts_of(model, loss, 0.1, 12)


def test_a_real_clamp_above_every_output_is_constant():
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 2))
            self.low = 50.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).clamp(min=self.low)

    def loss(model, x, generator):
        return (model(x) - x[:, :2]).square().mean()

    model = Clamped()
    # the clamp's gradient is exactly 0: that is told, and explains the constant output
    assert alerts_of(model, loss, 0.01, 12) == [("no_gradient", "")]
    model.low = -50.0
    assert alerts_of(model, loss, 0.01, 12) == []


def test_token_collapse_names_a_merge_site_where_the_cosines_are_those_of_sites():
    sites = tuple(f"blocks.{k // 2}#{k % 2}" for k in range(12))  # two a block, on the 7 points of 6 blocks
    series = [record(s, {"token_cosine": 1 - np.geomspace(0.9, 1e-7, 12)}) for s in range(3)]
    for item in series:
        item.metric_labels = {"token_cosine": sites}
    (alert,) = play(series)
    # .9 r^k with r^11 = 1e-7/.9 is below 1e-3 from k = 11 ln(900)/ln(9e6) = 4.7 on: site 5
    assert alert.where == "blocks.2"
    assert "12 merge sites" in alert.message
