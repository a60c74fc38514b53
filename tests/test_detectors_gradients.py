"""vanishing_gradient and exploding_gradient on series derived by hand and on the measured calibrations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from detector_records import gradients, header, layout, play, record, slope, told
from torch import nn
from torch.nn import functional

import flowscope
from flowscope.config import WatchConfig

STEPS = [*range(10), *range(10, 60, 10)]
# measured on a plain Post-LN stack: product of the first point by step; between them the series is geometric
POST_LN = {0: 2.0, 5: 0.27, 10: 1.5e-2, 20: 5e-4, 40: 1e-5, 50: 1e-5}


def post_ln(step: int) -> float:
    known = sorted(POST_LN)
    return float(np.exp(np.interp(step, known, np.log([POST_LN[s] for s in known]))))


def test_a_post_norm_stack_is_told_by_step_20():
    (alert,) = play(record(s, slope(post_ln(s))) for s in STEPS)
    assert alert.kind == "vanishing_gradient"
    assert alert.severity == "error"
    assert alert.step <= 20
    assert alert.flow == "blocks"
    assert "keel" in alert.advice
    assert "embed" in alert.message


def test_the_collapse_is_told_at_the_first_record_that_proves_it_however_sparse_the_records_are():
    (alert,) = play(record(s, slope(post_ln(s))) for s in (0, 20, 40))
    assert alert.step == 20


@pytest.mark.parametrize(
    "product",
    [
        [0.126] * 15,  # Post-LN at the start, 24 blocks
        [0.016] * 15,  # Post-LN at the start, 96 blocks: low, but it has always been
        [3.0, 3.5, 4.2] * 5,  # Pre-LN
        [0.993] * 15,  # DeepNorm
        [2.0, 1.2, 0.5, 0.2] + [0.14] * 11,  # Post-LN under SGD with momentum
        np.geomspace(50, 2, 15),  # small embeddings growing
    ],
)
def test_healthy_products_are_silent(product):
    assert play(record(s, slope(p)) for s, p in zip(STEPS, product, strict=True)) == []


def test_a_loss_scaled_by_1e_5_is_silent():
    assert play(record(s, slope(0.8, last=5e-6)) for s in STEPS) == []


def test_the_weakest_block_of_the_first_bad_stretch_is_named():
    # counted from the output: blocks 5 and 4 are fine, the stretch 3..2 falls below 1e-3, block 0 is worse but behind
    gain = [1e-4, 1.0, 1e-2, 1e-3, 1.0, 1.0]
    (alert,) = play(record(s, gradients(gain)) for s in (0, 1))
    assert alert.where == "blocks.3"
    assert alert.value == pytest.approx(1e-9)


def test_a_lone_mild_block_before_the_crossing_is_not_the_place():
    gain = [1.0, 1e-4, 1.0, 1.0, 1.0, 0.85]
    (alert,) = play(record(s, gradients(gain)) for s in (0, 1))
    assert alert.where == "blocks.1"


@pytest.mark.parametrize(
    ("start", "sizes", "severity"),
    [
        (0.3, [1.0] * 7, "info"),  # each block is given the start again
        (0.3, [1e-4] + [1.0] * 6, "error"),  # a norm behind a small embedding
        (0.05, [1.0] * 7, "error"),  # most is lost on this way, too
        (1e-4, [1.0] * 7, "error"),
    ],
)
def test_a_gradient_that_comes_to_the_start_past_the_blocks_is_a_note(start, sizes, severity):
    lost = gradients([1e-1] * 6)
    lost["gradient_product"] = [start, *lost["gradient_product"][1:]]
    (alert,) = play(record(s, {**lost, "act_rms": sizes}) for s in range(4))
    assert (alert.kind, alert.severity) == ("vanishing_gradient", severity)
    assert ("past the blocks" in alert.message) == (severity == "info")


class FedAgain(nn.Module):
    """Blocks that mix what nodes say with the start of all, as GCNII does."""

    def __init__(self, share: float):
        super().__init__()
        self.stem, self.share = nn.Linear(8, 32), share
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(24))
        self.end = nn.Linear(32, 3)

    def forward(self, x, mixing):
        h = start = functional.relu(self.stem(x))
        for block in self.blocks:
            mixed = (1 - self.share) * (mixing @ h) + self.share * start
            h = functional.relu(0.95 * mixed + 0.05 * block(mixed))
        return self.end(h)


@pytest.mark.parametrize("share", [0.3, 0.0])
def test_blocks_that_are_given_the_start_again_may_lose_the_gradient(share):
    torch.manual_seed(0)
    model, x, y = FedAgain(share), torch.randn(40, 8), torch.randint(0, 3, (40,))
    mixing = torch.rand(40, 40).lt(0.2).float() + torch.eye(40)
    mixing /= mixing.sum(1, keepdim=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(12):
            loss = functional.cross_entropy(model(x, mixing), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    found = {alert.severity for alert in scope.alerts if alert.kind == "vanishing_gradient"}
    assert found == {"info" if share else "error"}


@pytest.mark.parametrize(("product", "step"), [(0.9e-5, 0), (5e-4, 1)])
def test_certain_values_fire_at_once_and_others_on_two_records(product, step):
    (alert,) = play(record(s, slope(product)) for s in range(4))
    assert (alert.step, alert.since) == (step, 0)


def test_one_record_beyond_the_limit_is_no_alert():
    assert play(record(s, slope(5e-4 if s == 3 else 6e-3)) for s in range(8)) == []


def test_exact_zeros_count_only_after_three_records():
    zero = gradients([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    zero["gain"][:3] = np.nan
    assert play(record(s, zero if s in (4, 5) else slope(0.9)) for s in range(9)) == []
    (alert,) = play(record(s, zero if s >= 4 else slope(0.9)) for s in range(9))
    assert (alert.kind, alert.where, alert.step, alert.value) == ("vanishing_gradient", "blocks.3", 6, 0.0)


def test_a_zero_initialised_head_grows_out_of_its_zeros_in_silence():
    # the chain's last layer starts at zero and grows with a warm-up: upstream gains 0, 1e-7, 2e-7 ... then healthy
    def head(step: int) -> float:
        return 0.0 if step == 0 else 1e-7 * step if step < 9 else 1e-2 * step

    chain = header(layout("network", 3, "chain"))
    assert play((record(s, gradients([1.0, 1.0, head(s)])) for s in STEPS), chain) == []


def test_no_gradient_at_the_last_point_says_nothing():
    nothing = {"grad_norm": [0.0] * 7, "gradient_product": [np.nan] * 7}
    assert play(record(s, nothing) for s in range(5)) == []


def test_time_has_its_own_limit():
    time = header(layout("rnn", 60, "time"))
    lstm = play((record(s, slope(5e-8, 60)) for s in range(5)), time)  # 28 steps of a healthy LSTM
    (alert,) = play((record(s, slope(0.5**60, 60)) for s in range(5)), time)  # orthogonal * .5 over 60 steps
    assert lstm == []
    assert (alert.kind, alert.severity) == ("vanishing_gradient", "warning")
    assert "LSTM" in alert.advice
    assert "keel" not in alert.advice


def test_every_flow_is_judged_and_a_network_stands_for_its_stages():
    flows = header(layout("a", 6), layout("b", 6))
    (alert,) = play((record(s, slope(1.0), others={"b": slope(1e-4)}) for s in range(3)), flows)
    assert alert.flow == "b"
    stages = header(layout("stage1", 6, "stage"), layout("network", 6, "network"))
    (alert,) = play((record(s, slope(1e-4), others={"network": slope(1e-4)}) for s in range(3)), stages)
    assert alert.flow == "network"


def test_an_exploding_product_names_the_strongest_block():
    gain = [1.0, 30.0, 50.0, 20.0, 1.0, 1.0]
    (alert,) = play(record(s, gradients(gain)) for s in range(3))
    assert told([alert]) == [("exploding_gradient", "blocks.2", 1, "raised")]
    assert alert.value == pytest.approx(3e4)
    assert play(record(s, gradients([4.2, 1, 1, 1, 1, 1])) for s in range(3)) == []


def test_gradient_norms_have_no_limit_of_their_own():
    # H17: gradients 64 times as large by a summed loss; or 1e6, from the first step on
    for scale in (64.0, 1e6):
        assert play(record(s, slope(0.9, last=scale)) for s in range(12)) == []


def test_a_norm_far_above_its_own_first_steps_is_told():
    # the last steps of a real spike: 145.1, 960.4, 353.2, 379.3 over a usual .15
    norms = [0.15, 0.17, 0.13, 0.14, 0.15, 145.1, 960.4, 353.2, 379.3, 0.27, 0.21, 0.2]
    alerts = play(record(s, gradients([1.0] * 6, last=n)) for s, n in enumerate(norms))
    assert told(alerts) == [
        ("exploding_gradient", "blocks.0", 7, "raised"),
        ("exploding_gradient", "blocks.0", 11, "resolved"),
    ]
    assert alerts[0].limit == pytest.approx(150.0)  # 1,000 times the median .15


def test_norms_that_start_at_zero_are_no_baseline():
    norms = [0.0, 1e-7, 2e-7, 3e-7, 1e-5, *[1.0] * 10]
    assert play(record(s, gradients([1.0] * 6, last=n)) for s, n in enumerate(norms)) == []


def test_limits_come_from_the_configuration():
    config = WatchConfig(vanishing_product=1e-1)
    (alert,) = play((record(s, slope(0.05)) for s in range(3)), config=config)
    assert alert.limit == 0.1


CHAIN = header(layout("network", 5, "chain"))
# measured at the start on five sigmoid layers of 12 units, He-uniform: the gradient falls by a hundred only, while all
# samples end in one vector
SIGMOID = [0.01, 0.035, 0.09, 0.4, 1.285, 1.0]


def ordered(step: int, product: list[float], distance: list[float]):
    gain = np.array(product)[:-1] / np.array(product)[1:]
    return record(step, gradients(gain) | {"sample_cosine": 1 - np.array(distance)})


def test_a_low_product_beside_samples_that_end_alike_is_told_after_ten_records():
    (alert,) = play((ordered(s, SIGMOID, [0.25, 0.01, 3e-4, 8e-5, 1e-6, 1e-6]) for s in range(14)), CHAIN)
    # from the output the first point under .1 is x_2 (.09); blocks 2, 1, 0 pass .22, .39, .29 on
    assert told([alert]) == [("vanishing_gradient", "network.2", 9, "raised")]
    assert (alert.severity, alert.value, alert.limit) == ("warning", pytest.approx(0.01), 0.1)


@pytest.mark.parametrize(
    ("product", "distance"),
    [
        (SIGMOID, [0.25, 0.2, 0.1, 0.05, 0.02, 0.02]),  # samples stay apart: a ReLU chain of torch's default weights
        ([0.5, 0.5, 0.6, 0.7, 0.8, 1.0], [0.25, 0.01, 3e-4, 8e-5, 1e-6, 1e-6]),  # the gradient passes
        (SIGMOID, [0.005, 0.004, 3e-4, 8e-5, 1e-6, 1e-6]),  # alike when they came in
    ],
)
def test_one_of_the_two_alone_is_no_vanishing_gradient(product, distance):
    alerts = play((ordered(s, product, distance) for s in range(14)), CHAIN)
    assert "vanishing_gradient" not in {a.kind for a in alerts}


def test_a_sigmoid_chain_that_grows_out_of_it_in_nine_records_is_silent():
    alike, apart = [0.25, 0.01, 3e-4, 8e-5, 1e-6, 1e-6], [0.25, 0.2, 0.2, 0.2, 0.2, 0.2]
    assert play((ordered(s, SIGMOID, alike if s < 9 else apart) for s in range(20)), CHAIN) == []


@pytest.mark.parametrize(("cell", "severity"), [("RNN", "warning"), ("LSTM", "info"), ("GRUCell", "info")])
def test_cells_that_learn_how_far_they_look_back_are_an_info(cell, severity):
    head = header(replace(layout("rnn", 60, "time"), cell=cell))
    (alert,) = play((record(s, slope(0.5**60, 60)) for s in range(5)), head)
    assert alert.severity == severity
    assert ("forget-gate" in alert.advice) == (severity == "info")


@pytest.mark.parametrize(("cell", "severity"), [(nn.RNN, "warning"), (nn.LSTM, "info")])
def test_a_real_recurrent_layer_says_which_cell_it_is(cell, severity):
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = cell(2, 9, batch_first=True), nn.Linear(9, 3)
            if cell is nn.RNN:
                nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=0.4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = Last()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 50, 2)).square().mean().backward()
            optimizer.step()
    found = {(a.kind, a.severity, a.flow) for a in scope.alerts}
    assert found == {("vanishing_gradient", severity, "rnn")}


def test_a_real_sigmoid_chain_passes_nothing_in_either_direction():
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, 12, 12, 12, 12):
        layers += [nn.Linear(width, 12), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(12, 2))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flowscope.watch(model, optimizer, config={"console": "off"}) as scope:
        for _ in range(11):
            optimizer.zero_grad()
            x = torch.randn(50, 3)
            functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    assert [(a.kind, a.step) for a in scope.alerts if a.severity != "info"] == [("vanishing_gradient", 9)]
